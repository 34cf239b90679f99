"""At which times to look at which sequence, what to make of the costs, and how far the mean may then be off.

Every sequence is looked at in pairs, a pair in each of draws/2 equal parts of (0, 1). In each part the looks of all
sequences stand in one of its 2n equal strata each, in random order: together they are spread over (0, 1) as evenly as
can be, and still each by itself is uniform in its part.

The mean is off because of noise, and because of which sequence met which time. Both show in the differences of pairs:
what belongs to a sequence cancels in them, and the variance of a sum of two is that of their difference. Three things
can be told from the rest, and are, by least squares on the differences:

- what the time explains, a trend and a broken line: no error, since all strata are met;
- luck, how much more noise took than was to be expected: its expectation is 0, so it is subtracted from the mean;
- what is left: its squares, each as it would be had its pair not been fitted, are the variance.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Float, Int, UInt

SEGMENTS = 32
"""Of the broken line at most; each needs 16 pairs."""
FEW = 8
"""Pairs of which nothing can be told."""


class Settled(NamedTuple):
    """Costs, once times and luck have had their say."""

    costs: Float[np.ndarray, "sequences draws"]
    variance: float
    """Of Σ over sequences of the mean of their looks, given the sequences."""


@final
@dataclass(frozen=True)
class Design:
    """Times for ``draws`` looks at each of ``sequences``: a function of these numbers alone."""

    sequences: int
    draws: int
    seed: int

    def __post_init__(self) -> None:
        if self.draws < 2 or self.draws % 2:
            raise ValueError(f"draws is {self.draws}; they come in pairs, whose differences are the error: 2, 4, 6 …")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}; it must lie in 0..2⁶³ − 1")

    @cached_property
    def strata(self) -> Int[np.ndarray, "sequences draws"]:
        """In which of sequences·draws equal parts of (0, 1) a look stands; pairs are neighbouring columns."""
        size = 2 * self.sequences
        parts = [(part * size + self._order(part, size)).reshape(-1, 2) for part in range(self.draws // 2)]
        return np.concatenate(parts, axis=1)

    def _order(self, part: int, size: int) -> Int[np.ndarray, " size"]:
        """A permutation by sorting bits: numpy promises that Philox stays as it is, but not that its shuffles do."""
        return np.asarray(np.argsort(self._bits(part, size), kind="stable"))

    def _bits(self, stream: int, size: int) -> UInt[np.ndarray, " size"]:
        return np.asarray(np.random.Philox(key=np.array([self.seed, stream], np.uint64)).random_raw(size))

    @cached_property
    def u(self) -> Float[np.ndarray, "sequences draws"]:
        """A point inside each stratum."""
        bits = self._bits(self.draws, self.strata.size).reshape(self.strata.shape)
        inside = ((bits >> 11).astype(np.float64) + 0.5) * 2.0**-53
        return np.asarray((self.strata + inside) / self.strata.size)

    @property
    def middles(self) -> Float[np.ndarray, "sequences draws"]:
        """The middle of each stratum: where in it a look stands is left to chance, and so is part of the error."""
        return (self.strata + 0.5) / self.strata.size

    def settle(
        self,
        costs: Float[np.ndarray, "sequences draws"],
        trend: Float[np.ndarray, "sequences draws"],
        luck: Float[np.ndarray, "sequences draws kinds"],
    ) -> Settled:
        """The costs without luck and times, with the same expected mean; ``trend`` is a function of `middles`."""
        line, kinds = self._line(trend), luck.shape[-1]
        steps = _differences(np.concatenate([luck, line], -1))
        differences = _differences(costs[..., None])[:, 0]
        fit = np.linalg.pinv(steps) if len(steps) >= FEW else np.zeros(steps.T.shape)
        factors = fit @ differences
        explained = line @ factors[kinds:]
        # as if the pair had not been fitted: what it pulled the fit towards itself is undone
        left = (differences - steps @ factors) / np.maximum(1 - (steps * fit.T).sum(-1), 1e-9)
        # the factors of luck are not known exactly, and what they were multiplied with is not exactly 0
        unsure = luck.sum((0, 1)) @ fit[:kinds]
        return Settled(
            costs=costs - luck @ factors[:kinds] - (explained - explained.mean()),
            variance=float((left**2 * (1 + unsure**2)).sum()) / self.draws**2,
        )

    def _line(self, trend: Float[np.ndarray, "sequences draws"]) -> Float[np.ndarray, "sequences draws corners"]:
        """The trend, and how far each segment of the broken line has been walked."""
        segments = min(SEGMENTS, self.strata.size // 32)
        walked = np.clip(self.middles[..., None] * segments - np.arange(segments), 0, 1)
        return np.concatenate([trend[..., None], walked], -1)


def _differences(x: Float[np.ndarray, "sequences draws columns"]) -> Float[np.ndarray, "pairs columns"]:
    return np.asarray((x[:, 0::2] - x[:, 1::2]).reshape(-1, x.shape[-1]))
