"""Variance reduction for Monte Carlo estimates of the bound: stratified times, control variates, an error estimate.

Each sequence is drawn in pairs, one pair in each of draws/2 equal parts of (0, 1). Within a part, the draws of all n
sequences occupy its 2n equal strata in random order: together they cover (0, 1) evenly, and each one is uniform in its
part.

The estimated mean is wrong because of the noise, and because each sequence met only some times. Both errors show in
the differences within pairs: what belongs to the sequence cancels, and the variance of a sum of two draws is that of
their difference. A least-squares fit to the differences separates three parts:

- what the time explains, a trend and a piecewise linear function: not an error, since every stratum is used;
- control variates, how much more noise a sequence received than expected: their expectation is 0, so their fitted
  contribution is subtracted from the mean;
- residuals: their squares, each corrected as if its pair had been left out of the fit, give the variance.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from jaxtyping import Float, Int, UInt

from sedd.schema import check_count, check_seed

SEGMENTS = 32
"""Most segments of the piecewise linear function; each needs 16 pairs."""
MIN_PAIRS = 8
"""With fewer pairs nothing is fitted."""


def check_draws(draws: int | None) -> None:
    """Reject a number of draws per sequence that is not even; None is the default."""
    if draws is None:
        return
    if draws < 2 or draws % 2:
        raise ValueError(f"draws is {draws}; they come in pairs, whose differences give the error: choose 2, 4, 6 …")
    check_count("draws", draws)


@final
@dataclass(frozen=True)
class StratifiedTimes:
    """Stratified times for ``draws`` draws of each of ``sequences``: a function of these numbers and the seed alone."""

    sequences: int
    draws: int
    seed: int

    def __post_init__(self) -> None:
        check_draws(self.draws)
        check_seed(self.seed)

    def _bits(self, stream: int, size: int) -> UInt[np.ndarray, " size"]:
        return np.asarray(np.random.Philox(key=np.array([self.seed, stream], np.uint64)).random_raw(size))

    @cached_property
    def strata(self) -> Int[np.ndarray, "sequences draws"]:
        """The stratum of each draw among sequences·draws equal parts of (0, 1); pairs are neighbouring columns."""
        size, parts = 2 * self.sequences, []
        for part in range(self.draws // 2):
            # permute by sorting random bits: numpy keeps Philox stable across versions, but not its shuffles
            order = np.argsort(self._bits(part, size), kind="stable")
            parts.append((part * size + order).reshape(-1, 2))
        return np.concatenate(parts, axis=1)

    @cached_property
    def u(self) -> Float[np.ndarray, "sequences draws"]:
        """A uniform point inside each stratum."""
        bits = self._bits(self.draws, self.strata.size).reshape(self.strata.shape)
        inside = ((bits >> 11).astype(np.float64) + 0.5) * 2.0**-53
        return np.asarray((self.strata + inside) / self.strata.size)

    @property
    def midpoints(self) -> Float[np.ndarray, "sequences draws"]:
        """The midpoint of each stratum: the position within it is random and counts as error."""
        return (self.strata + 0.5) / self.strata.size

    def adjust(
        self,
        costs: Float[np.ndarray, "sequences draws"],
        trend: Float[np.ndarray, "sequences draws"],
        control_variates: Float[np.ndarray, "sequences draws kinds"],
    ) -> tuple[Float[np.ndarray, "sequences draws"], float]:
        """Subtract control variates, whose expectation is 0, and the effect of time; the expected mean stays the same.

        The second value is the variance of the sum over sequences of the mean of their draws, given the sequences.

        ``trend`` is the expected shape of the costs as a function of `midpoints`, up to a factor.
        """
        # what is fitted: control variates, and as functions of time the trend and one ramp for each segment
        segments, kinds = min(SEGMENTS, self.strata.size // 32), control_variates.shape[-1]
        ramps = np.clip(self.midpoints[..., None] * segments - np.arange(segments), 0, 1)
        basis = np.concatenate([trend[..., None], ramps], -1)
        columns = np.concatenate([control_variates, basis, costs[..., None]], -1)
        within_pairs = (columns[:, 0::2] - columns[:, 1::2]).reshape(-1, columns.shape[-1])
        regressors, differences = np.ascontiguousarray(within_pairs[:, :-1]), np.ascontiguousarray(within_pairs[:, -1])
        fit = np.linalg.pinv(regressors) if len(regressors) >= MIN_PAIRS else np.zeros(regressors.T.shape)
        coefficients = fit @ differences
        explained = basis @ coefficients[kinds:]
        # leave-one-out residuals: divide by one minus the leverage of the pair
        residuals = (differences - regressors @ coefficients) / np.maximum(1 - (regressors * fit.T).sum(-1), 1e-9)
        # the coefficients of the control variates are estimates, and the sums they multiply are not exactly 0
        uncertainty = control_variates.sum((0, 1)) @ fit[:kinds]
        variance = float((residuals**2 * (1 + uncertainty**2)).sum()) / self.draws**2
        return costs - control_variates @ coefficients[:kinds] - (explained - explained.mean()), variance


def neighbour_variance(values: Float[np.ndarray, " n"], times: Float[np.ndarray, " n"]) -> float:
    """Estimate the variance of the sum of values, one in each of n strata of time.

    Two neighbours have about the same mean, so that their sum varies as their difference does. The last of an odd
    number is paired once more.
    """
    in_order = values[np.argsort(times)]
    pairs = in_order[1::2] - in_order[: len(in_order) - 1 : 2]
    last = np.diff(in_order[-2:]) if len(in_order) % 2 else in_order[:0]
    return float((np.concatenate([pairs, last]) ** 2).sum())
