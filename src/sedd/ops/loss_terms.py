"""What a row of a head's output costs: score entropy of a score, or cross entropy of a prediction."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.diffusion.divergence import score_entropy
from sedd.diffusion.precision import upcast
from sedd.ops.linear_loss_reference import GUARD, Entries, Sums

_ZERO = -70.0  # the least logarithm of a ratio, as in `divergence`


@runtime_checkable
class Twin(Protocol):
    """`definition` or `tiles`."""

    def slopes_(self, z: Tensor, entries: Entries) -> Sums:
        """Sum the costs, and overwrite the output by its gradient."""
        ...

    def logsumexp(self, z: Tensor, states: int, bias: Tensor | None) -> Tensor:
        """The logarithm of the sum of exponentials."""
        ...


class Formed(NamedTuple):
    """The loss of a block of rows, whose output is now its own gradient."""

    loss: Tensor
    columns: Tensor
    overflow_count: Tensor


class Cost(ABC):
    """What rows of a head's output cost, each with a weight; the head's first ``states`` entries count."""

    states: int

    @abstractmethod
    def part(self, rows: slice) -> "Cost":
        """The same for some of the rows."""

    @abstractmethod
    def form_(self, z: Tensor, bias: Tensor | None, twin: Twin) -> Formed:
        """Losses of the rows of output z, and z ← its gradient."""


@final
@dataclass(frozen=True)
class ScoreEntropy(Cost):
    """weight·Σ_{y≠x_t} [s_y − a_y log s_y + K(a_y)], log s_y = z_y + scale, with one a at x_0 and one elsewhere.  [§4]

    Its gradient is weight·(s_y − a_y): no entry waits for another, and there is no normaliser.  [§7]
    """

    states: int
    x_t: Int[Tensor, " n"] | None
    """None: no entry is left out."""
    x_0: Int[Tensor, " n"]
    scale: Float[Tensor, " n"]
    log_data: Float[Tensor, " n"]
    """log a at y = x_0."""
    log_rest: Float[Tensor, " n"] | None
    """log a at every other y; None: a = 0."""
    weight: Float[Tensor, " n"]

    def part(self, rows: slice) -> "ScoreEntropy":
        """The same for some of the rows."""
        x_t, log_rest = (None if a is None else a[rows] for a in (self.x_t, self.log_rest))
        return ScoreEntropy(
            self.states, x_t, self.x_0[rows], self.scale[rows], self.log_data[rows], log_rest, self.weight[rows]
        )

    def form_(self, z: Tensor, bias: Tensor | None, twin: Twin) -> Formed:
        """The entry at x_0 is one a row, and computed here; the twin does the rest."""
        log_s = (_at(z, bias, self.x_0) + self.scale).clamp_max(GUARD)
        away = 1.0 if self.x_t is None else (self.x_t != self.x_0).to(log_s.dtype)
        entries = Entries(
            states=self.states,
            bias=bias,
            scale=self.scale,
            weight=self.weight,
            data=self.x_0,
            at_data=self.weight * away * score_entropy.slope(log_s, self.log_data),
            skip=self.x_t,
            log_rest=None if self.log_rest is None else self.log_rest.clamp_min(_ZERO),
        )
        sums = twin.slopes_(z, entries)
        each = sums.values + away * score_entropy.value(log_s, self.log_data)
        each = torch.where(sums.overflow_count > 0, torch.inf, each)
        return Formed(torch.where(self.weight == 0, 0, self.weight * each), sums.columns, sums.overflow_count)


@final
@dataclass(frozen=True)
class CrossEntropy(Cost):
    """−weight·log p_{x_0}, p = softmax of the first ``states`` entries.  [§5, §6]"""

    states: int
    x_0: Int[Tensor, " n"]
    weight: Float[Tensor, " n"]

    def part(self, rows: slice) -> "CrossEntropy":
        """The same for some of the rows."""
        return CrossEntropy(self.states, self.x_0[rows], self.weight[rows])

    def form_(self, z: Tensor, bias: Tensor | None, twin: Twin) -> Formed:
        """With the normaliser known, p is a score against ratios of 0 everywhere but at x_0."""
        total = twin.logsumexp(z, self.states, bias)
        log_p = _at(z, bias, self.x_0) - total
        at_data = self.weight * torch.expm1(log_p)
        sums = twin.slopes_(z, Entries(self.states, bias, -total, self.weight, self.x_0, at_data))
        return Formed(torch.where(self.weight == 0, 0, -self.weight * log_p), sums.columns, sums.overflow_count)


def _at(z: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
    """The entry at y of every row, in float32 or better."""
    at = upcast(z.gather(-1, y[:, None]).squeeze(-1))
    return at if bias is None else at + bias[y]
