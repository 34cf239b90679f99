"""A dry run, behind ``sedd plan``: measure what a training run would cost on this machine."""

import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sedd.config import BudgetConfig, RunConfig
from sedd.runtime import cuda_graphs, distributed
from sedd.training.datasets import open_datasets
from sedd.training.step import finish_step, train_step
from sedd.training.trainer import Trainer


def estimate_cost(config: RunConfig, prepare: Callable[[], Path], steps: int = 20) -> dict[str, float | int]:
    """Measure memory and time over ``steps`` training steps, and extrapolate to the end of the budget."""
    with distributed.process_group() as ranks:
        blocks, validation_blocks = open_datasets(config, prepare, ranks)
        trainer = Trainer(config, blocks, validation_blocks, ranks)
        seconds, tokens = _time_steps(trainer, steps)
        parameters = sum(p.numel() for p in trainer.network.parameters())
        cuda = ranks.device.type == "cuda"
        peak = cuda_graphs.peak_memory() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        training_minutes = _training_minutes(config.budget, seconds, tokens)
        evaluation_minutes = _evaluation_minutes(trainer, steps=training_minutes * 60 / seconds)
        return {
            "parameters": parameters,
            "training_tokens": len(blocks) * config.model.seq_len,
            "tokens_per_step": tokens,
            "weights_and_optimizer_MiB": parameters * 4 * 5 / 2**20,  # weights, gradients, EMA, AdamW's moments
            "peak_memory_MiB": peak / 2**20,
            "milliseconds_per_step": seconds * 1e3,
            "tokens_per_second": tokens / seconds,
            "training_minutes": training_minutes,
            "evaluation_minutes": evaluation_minutes,
            "minutes_to_finish": training_minutes + evaluation_minutes,
        }


def _time_steps(trainer: Trainer, steps: int) -> tuple[float, int]:
    """Return the mean seconds and tokens of steps at learning rate 0, after one that warms up.

    As in training, steps are queued without waiting for the device, and the next batch is built meanwhile.
    """
    tokens, start = 0, 0.0
    for i, batch in zip(range(steps + 1), trainer.dataloader.iterate(0), strict=False):
        train_step(trainer, batch, 0.0, lambda pending: None)
        if i in (0, steps):
            finish_step(trainer, lambda pending: None)
            _synchronize(trainer)
        if i == 0:
            if trainer.ranks.device.type == "cuda":  # what CUDA graphs were captured with is in their pools from now on
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
        else:
            tokens += int(batch.tokens)
    return (time.perf_counter() - start) / steps, round(tokens / steps)


def _synchronize(trainer: Trainer) -> None:
    """Wait until all queued work is done."""
    if trainer.ranks.device.type == "cuda":
        torch.cuda.synchronize()


def _training_minutes(budget: BudgetConfig, seconds_per_step: float, tokens_per_step: int) -> float:
    """Return the minutes of training until the first limit of the budget is reached."""
    steps = [budget.steps, None if budget.tokens is None else budget.tokens / tokens_per_step]
    limits = [count * seconds_per_step / 60 for count in steps if count is not None]
    return min([*limits, *([] if budget.minutes is None else [budget.minutes])])


def _evaluation_minutes(trainer: Trainer, steps: float) -> float:
    """Return the minutes of all validations of a run of ``steps``, one of them at its end, from the time of one."""
    every = trainer.config.train.eval_every
    seconds = []
    for _ in range(1 if trainer.config.train.precision == "float32" else 2):  # else the first is in both precisions
        start = time.perf_counter()
        trainer.validation_bound()
        seconds.append(time.perf_counter() - start)
    return (seconds[0] + seconds[-1] * (int(steps / every) if every else 0)) / 60
