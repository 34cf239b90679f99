"""A package of someone else's: noise for ordered tokens, such as quantized measurements, and a sampler."""

from dataclasses import dataclass
from math import pi
from typing import ClassVar, final

import torch
from dense_process import DenseProcess
from torch import Tensor

from sedd.samplers.loop import GridSampler, Rows, draw_clean_tokens


@final
@dataclass(frozen=True)
class RandomWalk(DenseProcess):
    """A token moves to the one above or below it, at a rate with which σ = 1 is one relaxation time."""

    def rate(self, y: Tensor, x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """(N/π)² for neighbours; minus what leaves x on the diagonal."""
        neighbours = (x > 0).to(dtype) + (x < self.vocab_size - 1).to(dtype)
        distance = (y - x).abs()
        rates = (distance == 1).to(dtype) - (distance == 0).to(dtype) * neighbours
        return (self.vocab_size / pi) ** 2 * rates


@final
@dataclass(frozen=True)
class Renoise(GridSampler):
    """Draw all clean tokens from p(x_0 | x_t), then add the noise of the next time to them."""

    assumes: ClassVar[str] = "absorbing noise; the conditionals of one distribution"
    order: ClassVar[float] = 0.5

    def step(self, x: Tensor, t: Tensor, s: Tensor, rows: Rows) -> Tensor:
        """Predict and renoise."""
        clean = draw_clean_tokens(x, rows.schedule.sigma(t), rows.free, rows)
        u = rows.rng(x.shape[-1], rows.step, event=5)
        return torch.where(rows.free, rows.process.corrupt_by(clean, rows.schedule.sigma(s), u), x)
