"""One training step: forward, loss, backward, gradient clipping, optimizer, EMA."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sedd.training import optimizer
from sedd.training.batches import DROPOUT_STREAM, Batch, seeded_generator
from sedd.training.state import PendingStep
from sedd.training.trainer import Trainer

TIME_BINS = 10
"""Number of equal intervals of time in which the loss is also logged."""


class StepMetrics(NamedTuple):
    """Metrics of a step over all processes, on the device: reading one waits for the step and those queued after it."""

    loss: Tensor
    """In nats per token."""
    grad_norm: Tensor
    """Before clipping."""
    by_time: Tensor
    """Summed loss and number of tokens in each time bin, (2, TIME_BINS)."""

    def start_copy(self) -> Callable[[], "StepMetrics"]:
        """Begin to copy the metrics to the host; the function returned waits for this step alone and returns them."""
        if self.loss.device.type != "cuda":
            return lambda: self
        copies = StepMetrics(*(torch.empty(a.shape, dtype=a.dtype, pin_memory=True) for a in self))
        for copy, value in zip(copies, self, strict=True):
            copy.copy_(value, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> "StepMetrics":
            copied.synchronize()
            return copies

        return wait


OnNonFinite = Callable[[PendingStep], None]
"""Called with a step whose loss or gradient was not finite; raises to stop the run."""


def train_step(trainer: Trainer, batch: Batch, lr: float, on_nonfinite: OnNonFinite) -> StepMetrics:
    """Train on one batch.

    The weights are updated only if loss and gradient are finite. On a GPU the optimizer reads that flag on the device;
    the host reads it one step later, in `finish_step`, when the next forward and backward pass are queued, so that the
    device is never idle.

    Args:
        trainer: Network, EMA and optimizers; its counters advance by one step.
        on_nonfinite: Called if the loss or gradient of the previous step, on a CPU of this one, was not finite.
    """
    config, state, ranks = trainer.config, trainer.state, trainer.ranks
    _seed_dropout(ranks.device, seeded_generator(config.seed, state.step, DROPOUT_STREAM, ranks.rank).initial_seed())
    trainer.network.train()

    by_time = torch.zeros(2, TIME_BINS, device=ranks.device)
    micro_batches = batch.micro_batches(config.train.grad_accumulation)
    for micro_batch in micro_batches:
        with trainer.gradient_sync(micro_batch is micro_batches[-1]):
            total, sequence_losses = trainer.batch_loss(micro_batch)  # forward pass and loss
            # gradients are averaged over processes; the factor makes that average their sum
            (total / batch.tokens * ranks.world_size).backward()
        time_bin = (micro_batch.t * TIME_BINS).long().clamp_max(TIME_BINS - 1)
        by_time[0].index_add_(0, time_bin, sequence_losses.float())
        by_time[1].index_add_(0, time_bin, micro_batch.valid.sum(-1).float())

    grad_norm = optimizer.clip_grad_norm(trainer.weights, config.optim.grad_clip)
    by_time = ranks.all_reduce_sum(by_time)
    loss = by_time[0].sum() / batch.tokens
    finite = loss.isfinite() & grad_norm.isfinite()

    finish_step(trainer, on_nonfinite)  # the step before this one, whose EMA update must precede new weights
    optimizer.set_learning_rate(trainer.optimizers, lr)
    optimizer.step_if_finite(trainer.optimizers, finite)
    trainer.pending_step = PendingStep.start(state, batch, finite)
    if ranks.device.type == "cpu":
        finish_step(trainer, on_nonfinite)
    optimizer.zero_grad(trainer.optimizers)

    state.step, state.tokens = state.step + 1, state.tokens + int(batch.tokens)
    return StepMetrics(loss, grad_norm, by_time)


def _seed_dropout(device: torch.device, seed: int) -> None:
    """Seed the generator of one device; `torch.manual_seed` makes a traceback for each kind that is not there."""
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def finish_step(trainer: Trainer, on_nonfinite: OnNonFinite) -> None:
    """Update the EMA once the last step is known to have been finite; else call ``on_nonfinite``."""
    pending, trainer.pending_step = trainer.pending_step, None
    if pending is None:
        return
    if pending.is_finite():
        trainer.ema.update(pending.step)
    else:
        on_nonfinite(pending)
