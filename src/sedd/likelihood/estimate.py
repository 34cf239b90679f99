"""The likelihood of a data set: every look at every sequence, made anywhere, summed in one order.

What a look shows is a function of the seed and its number, so the result depends neither on the size of a batch nor on
the number of processes, but for the last bits of the network's own arithmetic.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.diffusion.rng import CounterRNG
from sedd.likelihood.estimators import Drawn, Estimator
from sedd.likelihood.variance_reduction import Design
from sedd.runtime.distributed import Ranks
from sedd.tokenizer import Ids

OnProgress = Callable[[int, int], None]
"""Told how many looks this process has made, and how many there are."""


class Estimate(NamedTuple):
    """Nats a token of one data set."""

    nats: float
    stderr: float
    """Of the value on these sequences, whatever further draws would show; 0 where it is exact."""
    stderr_population: float | None
    """Of the value on all sequences of their kind, as if these had been drawn independently; None for one alone."""
    terms: tuple[float, ...]
    """Diffusion, prior, reconstruction; their sum is ``nats``."""


def estimate(
    model: Any,
    estimator: Estimator,
    rows: Sequence[Ids],
    *,
    draws: int,
    seed: int,
    batch: int,
    ranks: Ranks,
    on_progress: OnProgress = lambda done, total: None,
) -> Estimate:
    """The likelihood of ``rows`` of tokens under ``model``, ``batch`` looks at a time, shared by all processes."""
    if batch < 1:
        raise ValueError(f"batch is {batch}; at least 1 look is made at a time")
    if not rows or not all(map(len, rows)):
        raise ValueError(f"of {len(rows)} sequences some or all are empty; there is nothing to score in them")
    design = Design(len(rows), draws, seed) if isinstance(estimator, Drawn) else None
    looks = _Looks(estimator, rows, design, seed)
    found = torch.zeros(len(looks), 5, dtype=torch.float64)
    mine = list(looks.batches(batch))[ranks.rank :: ranks.world_size]
    done, total = 0, sum(map(len, mine))
    for numbers in mine:
        x_0, *shown = (column.to(ranks.device) for column in looks.show(numbers))
        with torch.no_grad():
            costs = estimator.cost(model, x_0, *shown)
        found[torch.from_numpy(numbers), :3] = torch.stack(costs, -1).double().cpu()
        if isinstance(estimator, Drawn):
            found[torch.from_numpy(numbers), 3:] = estimator.luck(x_0, *shown).cpu()
        on_progress(done := done + len(numbers), total)
    return _summary(ranks.all_reduce_sum(found.to(ranks.device)).cpu().numpy(), looks)


@final
class _Looks:
    """All looks at a data set, by number: those at its first sequence, then those at its second …"""

    def __init__(self, estimator: Estimator, rows: Sequence[Ids], design: Design | None, seed: int) -> None:
        self.estimator, self.rows, self.design, self.seed = estimator, rows, design, seed
        self.lengths = np.array([len(row) for row in rows])
        lengths, which = np.unique(self.lengths, return_inverse=True)
        counts = np.array([estimator.looks(n, design.draws if design else 0) for n in lengths.tolist()])[which]
        self.starts = np.concatenate([[0], np.cumsum(counts)])
        self.u = design.u.ravel() if design else np.zeros(len(self))  # nothing is drawn where the value is exact

    def __len__(self) -> int:
        return int(self.starts[-1])

    def batches(self, size: int) -> Iterator[Int[np.ndarray, " looks"]]:
        """All numbers, those of sequences of one length together: nothing is ever padded."""
        for length in np.unique(self.lengths):
            rows = np.flatnonzero(self.lengths == length)
            numbers = np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in rows])
            yield from (numbers[i : i + size] for i in range(0, len(numbers), size))

    def show(self, numbers: Int[np.ndarray, " looks"]) -> tuple[Tensor, ...]:
        """The sequences, and what is shown of them: made on the CPU, so the same everywhere."""
        rows = np.searchsorted(self.starts, numbers, side="right") - 1
        looks = numbers - self.starts[rows]
        x_0 = torch.from_numpy(np.stack([self.rows[row] for row in rows]))
        chance = CounterRNG(self.seed, torch.from_numpy(numbers))
        return x_0, *self.estimator.show(x_0, torch.from_numpy(looks), torch.from_numpy(self.u[numbers]), chance)


def _summary(found: Float[np.ndarray, "looks 5"], looks: _Looks) -> Estimate:
    """Means over looks and sums over sequences, in the order of their numbers."""
    if not np.isfinite(found).all():
        raise ValueError("the model gives a cost that is not finite; its weights are damaged, or its training blew up")
    costs, luck, tokens = found[:, :3], found[:, 3:], looks.lengths.sum()
    means = np.add.reduceat(costs, looks.starts[:-1]) / np.diff(looks.starts)[:, None]
    each, variance = means.sum(-1), 0.0
    if isinstance(looks.estimator, Drawn) and looks.design is not None:
        shape = looks.design.strata.shape
        trend = looks.estimator.trend(torch.from_numpy(looks.design.middles.ravel())).numpy()
        settled = looks.design.settle(costs.sum(-1).reshape(shape), trend.reshape(shape), luck.reshape(*shape, -1))
        each, variance = settled.costs.mean(-1), settled.variance
    certain = means[:, 1:].sum(0)  # luck is of the diffusion term
    terms = np.array([each.sum() - certain.sum(), *certain]) / tokens
    return Estimate(
        nats=float(each.sum() / tokens),
        stderr=float(variance**0.5 / tokens),
        stderr_population=_spread(each, looks.lengths),
        terms=tuple(terms.tolist()),
    )


def _spread(costs: Float[np.ndarray, " rows"], lengths: Int[np.ndarray, " rows"]) -> float | None:
    """The error of Σ costs/Σ lengths as an estimate of E cost/E length, by the residuals cost − ratio·length."""
    n = len(costs)
    if n < 2:
        return None
    left = costs - costs.sum() / lengths.sum() * lengths
    return float((n / (n - 1) * (left**2).sum()) ** 0.5 / lengths.sum())
