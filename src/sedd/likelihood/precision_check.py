"""Check that the error of low precision is below the standard error."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class PrecisionCheck(NamedTuple):
    """The mean of some values in low precision minus that in full precision."""

    difference: float
    stderr: float
    """Standard error of the difference."""
    compared: int
    """Number of values that were computed in both."""
    is_negligible: bool


def is_negligible(difference: float, difference_stderr: float, stderr: float) -> bool:
    """Return whether a difference, plus two of its standard errors, is below a tenth of the value's standard error."""
    return abs(difference) + 2 * difference_stderr < stderr / 10


FIRST = 16
"""Number of values to begin a comparison with."""


def check_precision(
    low: Float[np.ndarray, " n"],
    compute: Callable[[Int[np.ndarray, " k"]], Float[np.ndarray, " k"]],
    stderr: float,
    seed: int = 0,
) -> PrecisionCheck | None:
    """Compare low with full precision on more and more values, until it is clear whether the difference is negligible.

    ``compute`` returns the values of some indices in full precision; ``stderr`` is the mean's standard error.
    If a quarter of the values does not show it, the difference counts as not negligible. None: there are fewer than 64
    values, or one is not finite, so that low precision is out of the question.
    """
    if len(low) < 4 * FIRST or not np.isfinite(low).all():
        return None
    order = np.random.default_rng(seed).permutation(len(low))
    differences, size = np.zeros(0), FIRST
    while True:
        chosen = order[len(differences) : size]
        differences = np.concatenate([differences, low[chosen] - compute(chosen)])
        mean, error = float(differences.mean()), float(differences.std(ddof=1) / len(differences) ** 0.5)
        is_small, is_large = is_negligible(mean, error, stderr), abs(mean) - 2 * error > stderr / 10
        if is_small or is_large or 2 * size > len(low) // 4:
            return PrecisionCheck(mean, error, len(differences), is_small)
        size *= 2
