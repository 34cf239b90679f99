"""At which times to look at which sequence, and how far the mean may then be off.

Every sequence is looked at in pairs, a pair in each of draws/2 equal parts of (0, 1). In each part the looks of all
sequences stand in one of its 2n equal strata each, in random order: together they are spread over (0, 1) as evenly as
can be, and still each by itself is uniform in its part.

The error of the mean comes from noise, and from which sequence met which time. Both show in the differences of pairs:
what belongs to a sequence cancels in them. What the time explains of a difference, on average over the sequences, is no
error, since all strata are met; a broken line through the differences takes it away. What is left is unbiased: the
variance of the mean is Σ(difference)²/draws².
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Float, Int, UInt

SEGMENTS = 32
"""Of the broken line at most; with fewer pairs than eight a segment there are fewer."""


class Settled(NamedTuple):
    """Costs, once the times have had their say."""

    flattened: Float[np.ndarray, "sequences draws"]
    """Less what their times explain."""
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
        self, costs: Float[np.ndarray, "sequences draws"], trend: Float[np.ndarray, "sequences draws"]
    ) -> Settled:
        """What is left of the costs beside a multiple of ``trend`` and a broken line, and its variance.

        Both are functions of the middle of a stratum, fitted to the differences of pairs.
        """
        known = self._known(trend)
        factors, rank = _least_squares(known, costs)
        explained = known @ factors
        flattened = costs - (explained - explained.mean())
        left = flattened[:, 0::2] - flattened[:, 1::2]
        return Settled(flattened, float((left**2).sum()) * left.size / ((left.size - rank) * self.draws**2))

    def _known(self, trend: Float[np.ndarray, "sequences draws"]) -> Float[np.ndarray, "sequences draws factors"]:
        """The trend, and how far each segment of the line has been walked; of one pair nothing can be known."""
        pairs = self.strata.size // 2
        segments = min(SEGMENTS, pairs // 8)
        walked = np.clip(self.middles[..., None] * segments - np.arange(segments), 0, 1)
        return np.concatenate([trend[..., None], walked], -1)[..., : pairs if pairs > 1 else 0]


def _least_squares(
    known: Float[np.ndarray, "sequences draws factors"], costs: Float[np.ndarray, "sequences draws"]
) -> tuple[Float[np.ndarray, " factors"], int]:
    """By which factors the differences in pairs of the costs follow those of what is known; how many are determined."""
    steps = (known[:, 0::2] - known[:, 1::2]).reshape(-1, known.shape[-1])
    factors, _, rank, _ = np.linalg.lstsq(steps, (costs[:, 0::2] - costs[:, 1::2]).ravel(), rcond=None)
    return factors, int(rank)
