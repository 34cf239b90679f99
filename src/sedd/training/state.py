"""The progress of a run: the counters that a checkpoint stores, and the step that a GPU may still be computing."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sedd.training.batches import Batch


class NonFiniteError(RuntimeError):
    """A loss, gradient, weight or final bound was not finite; checkpoints from before that are kept."""


@dataclass
class TrainingState:
    """Counters of a run, stored as state.json in each checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Wall-clock seconds of training; see `clock.Clock`."""
    eval_seconds: float = 0.0
    """Wall-clock seconds of validation and of logged samples."""
    save_seconds: float = 0.0
    """Wall-clock seconds of saving checkpoints."""
    skipped: int = 0
    """Steps skipped because their loss or gradient was not finite."""
    best: float | None = None
    """Lowest validation bound of a checkpoint so far."""
    best_step: int | None = None
    above_best: bool = False
    """Whether the latest validation found a higher bound than that."""
    logged: int | None = None
    """Records in the log."""

    def update_best(self, bound: float, is_saved: bool = True) -> bool:
        """Store ``bound`` if it is the lowest of a checkpoint so far, and return whether it is stored.

        Args:
            is_saved: Whether this step is saved if its bound is the lowest.
        """
        is_lowest = math.isfinite(bound) and (self.best is None or bound < self.best)
        self.above_best = not is_lowest
        if is_lowest and is_saved:
            self.best, self.best_step = bound, self.step
        return is_lowest and is_saved


class PendingStep(NamedTuple):
    """A step whose finiteness flag may still be on the GPU; a step that is not finite has changed no weight."""

    step: int
    tokens: int
    """Training tokens before this step."""
    batch: Batch
    finite: Tensor
    """On the CPU; to be read once ``copied`` is reached."""
    copied: torch.cuda.Event | None
    """None: ``finite`` can be read at once."""

    @classmethod
    def start(cls, state: TrainingState, batch: Batch, finite: Tensor) -> "PendingStep":
        """Begin to copy the flag to the host without waiting for it."""
        if finite.device.type != "cuda":
            return cls(state.step, state.tokens, batch, finite, None)
        on_host = torch.empty((), dtype=torch.bool, pin_memory=True)
        on_host.copy_(finite, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return cls(state.step, state.tokens, batch, on_host, copied)

    def is_finite(self) -> bool:
        """Wait for this step, not for later ones, and return its flag."""
        if self.copied is not None:
            self.copied.synchronize()
        return bool(self.finite)
