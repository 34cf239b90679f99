"""What a run would cost, measured before it is paid."""

import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from sedd.config import BudgetConfig, RunConfig
from sedd.runtime import cuda_graphs, distributed
from sedd.training.batches import open_data
from sedd.training.trainer import Trainer


def plan(config: RunConfig, prepare: Callable[[], Path], steps: int = 20) -> dict[str, float | int]:
    """What a run would cost on this machine, measured over ``steps`` steps."""
    with distributed.process_group() as ranks:
        blocks, held_out = open_data(config, prepare, ranks)
        trainer = Trainer(config, blocks, held_out, ranks)
        each, tokens = _measured(trainer, steps)
        parameters = sum(p.numel() for p in trainer.network.parameters())
        cuda = ranks.device.type == "cuda"
        peak = cuda_graphs.peak_memory() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "parameters": parameters,
            "training_tokens_at_hand": len(blocks) * config.model.seq_len,
            "tokens_a_step": tokens,
            "weights_and_moments_MiB": parameters * 4 * 5 / 2**20,  # weights, gradients, two moments, average
            "peak_memory_MiB": peak / 2**20,
            "milliseconds_a_step": each * 1e3,
            "tokens_a_second": tokens / each,
            "minutes_to_finish": _minutes(config.budget, each, tokens),
        }


def _measured(trainer: Trainer, steps: int) -> tuple[float, int]:
    """Seconds and tokens of a step, in the median; the first, which warms up, is not counted."""
    seconds: list[float] = []
    tokens: list[int] = []
    for _, batch in zip(range(steps + 1), trainer.batches.since(0), strict=False):
        began = time.perf_counter()
        trainer.update(0.0, batch, trainer.gradients(batch))
        trainer.settle()
        trainer.mover.forget()
        if trainer.ranks.device.type == "cuda":
            torch.cuda.synchronize()
            if not seconds:  # what was recorded then is counted as what is kept since
                torch.cuda.reset_peak_memory_stats()
        seconds.append(time.perf_counter() - began)
        tokens.append(int(batch.tokens))
    return median(seconds[1:]), int(median(tokens[1:]))


def _minutes(budget: BudgetConfig, seconds_a_step: float, tokens_a_step: int) -> float:
    """Until the first limit of the budget is reached."""
    steps = [budget.steps, None if budget.tokens is None else budget.tokens / tokens_a_step]
    limits = [count * seconds_a_step / 60 for count in steps if count is not None]
    return min([*limits, *([] if budget.minutes is None else [budget.minutes])])
