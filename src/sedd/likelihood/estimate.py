"""The likelihood of sequences: Monte Carlo draws of each, computed in any batches, averaged in one order.

`bound` returns one value per row of a tensor, `estimate_likelihood` one for a whole data set.

The noise of a draw is a function of the seed and the draw's number, so the result depends neither on the batch size nor
on the number of processes, up to the rounding of the network's own arithmetic.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, Generic, TypeVar, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd import tensors
from sedd.draws import CounterRNG, derive_seed
from sedd.likelihood.estimators import (
    AnyOrderEstimator,
    BoundTerms,
    DiffusionTermEstimator,
    Draw,
    Estimator,
    FixedOrderEstimator,
    default_estimator,
)
from sedd.likelihood.orders import AllOrdersEstimator, ImportanceWeightedEstimator, Orders, check_mixture, check_orders
from sedd.likelihood.precision_check import FIRST, PrecisionCheck, check_precision
from sedd.likelihood.variance_reduction import StratifiedTimes
from sedd.parameterization import DiscreteModel, HasNoise, MeanModel
from sedd.runtime.distributed import Ranks
from sedd.schema import check_count
from sedd.tokenizer import Ids

OnProgress = Callable[[int, int], None]
"""Called with the number of draws that this process has finished, and how many it has in all."""
V = TypeVar("V", float, Tensor)


@final
@dataclass(frozen=True)
class LikelihoodEstimate(Generic[V]):
    """−log p or an upper bound on it: of each row in nats (tensors), or of a data set in nats per token (floats)."""

    nats: V
    stderr: V
    """Standard error of the value on these sequences, from the Monte Carlo draws; 0 where it is exact."""
    stderr_population: float | None = None
    """Standard error of the value on the population, as if these sequences were independent samples of it; None for a
    single sequence, for rows and in training."""
    terms: tuple[float, ...] = ()
    """Diffusion, prior and reconstruction term of a data set; their sum is ``nats``."""
    network_calls: int = 0
    """Sequences that the network evaluated for a data set, without the comparison of precisions."""
    lower: float | None = None
    """A lower bound on the negative log-likelihood, where there is one; ``nats`` itself where it is exact."""
    lower_stderr: float | None = None
    precision_check: PrecisionCheck | None = None
    """What low precision would change, or does change if that is negligible; None if it was not tried."""
    is_exact: bool = False
    """Whether ``nats`` is the value itself, not a bound."""


def build_estimator(
    name: str | None,
    model: DiscreteModel,
    terms: Sequence[str] = BoundTerms._fields,
    t_min: float = 0.0,
    seed: int = 0,
    orders: Orders | None = None,
) -> Estimator:
    """Build the estimator of a model's likelihood: bound, any-order, forward, backward or random; None: the first.

    Args:
        terms: The terms of the bound to include: all, or the diffusion term alone as in published tables.  [§8]
        t_min: The time at which the integral of the diffusion term begins, where it stands alone.
        seed: Decides the order named ``random``.
        orders: The number of orders of the mixture that a time-free denoiser of masks is, or ``all``; None: by name.
    """
    process, default = model.process, default_estimator(model)
    denoises_masks = isinstance(model, MeanModel) and process.only_masks
    what = f"a {type(model).__name__} under {type(process).__name__} noise"
    if orders is not None:
        check_orders(orders, name)
        check_mixture(denoises_masks, bool(model.depends_on_sigma), what)
        return AllOrdersEstimator(process) if orders == "all" else ImportanceWeightedEstimator(process, int(orders))
    has_all = default.is_exact or set(terms) == set(BoundTerms._fields)
    first = default if has_all else DiffusionTermEstimator(process, model.schedule, t_min)
    estimators: dict[str, Estimator] = {"forward" if default.is_exact else "bound": first}
    if denoises_masks:
        estimators |= {
            "any-order": AnyOrderEstimator(process),
            "forward": FixedOrderEstimator(process, torch.arange),
            "backward": FixedOrderEstimator(process, lambda length: torch.arange(length).flip(0)),
            "random": FixedOrderEstimator(
                process, lambda length: torch.randperm(length, generator=torch.Generator().manual_seed(seed))
            ),
        }
    if name is not None and name not in estimators:
        raise ValueError(f"estimator, for {what}, is {name!r}; choose one of {', '.join(estimators)}")
    return estimators[name or next(iter(estimators))]


@torch.no_grad()
def bound(
    model: Any,
    x_0: Int[Tensor, "b L"],
    draws: int = 64,
    seed: int = 0,
    *,
    valid: Bool[Tensor, "b L"] | None = None,
    batch: int | None = None,
) -> LikelihoodEstimate[Tensor]:
    """Bound −log p of each sequence by the variational bound (negative ELBO), in nats.  [§8]

    The noise of a row is a function of the seed, the row's tokens and the number of equal rows before it. So different
    rows do not change its value, and all errors are independent. The value of an autoregressive model is exact.

    Args:
        model: A model of log-scores, with its process and schedule, or an autoregressive model.
        x_0: The sequences, one per row.
        draws: Monte Carlo draws per sequence: an even number. An autoregressive model needs none.
        seed: Decides times and noise.
        valid: False at padding, which does not count; by default as the model has it bound.
        batch: Draws per call of the network; it does not change the result. None: chosen for the device.
    """
    if not isinstance(model, HasNoise):
        raise TypeError(
            f"model is {type(model).__name__}, which has no process and schedule; pass a model, as in "
            "bound(ScoreModel(network, process, schedule), x_0)"
        )
    if x_0.ndim != 2 or x_0.numel() == 0 or x_0.dtype != torch.long:
        raise ValueError(
            f"x_0 is {x_0.dtype} of shape {tuple(x_0.shape)}; pass int64 tokens of shape (rows, length), as x_0[None] "
            "for one sequence"
        )
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    device = x_0.device if parameter is None else parameter.device
    valid = getattr(model, "valid", None) if valid is None else valid
    if valid is not None:
        if valid.dtype != torch.bool or valid.shape not in (x_0.shape, x_0.shape[1:]):
            raise ValueError(
                f"valid is {valid.dtype} of shape {tuple(valid.shape)}; pass booleans of shape {tuple(x_0.shape)}, "
                "False at padding"
            )
        valid = valid.to(device).expand_as(x_0)
        x_0 = torch.where(valid, x_0.to(device), 0)
    tensors.check_clean_tokens(x_0, model.process.vocab_size)
    batch = default_batch(device, model.process.num_states, x_0.shape[-1]) if batch is None else batch
    rows, seeds, ranks = list(x_0.cpu().numpy()), _row_seeds(seed, x_0, valid), Ranks(0, 1, device)
    made = _Draws(default_estimator(model), rows, draws, seeds, batch, ranks, valid)
    training = [module for module in model.modules() if module.training] if isinstance(model, nn.Module) else []
    for module in training:  # no dropout
        module.training = False
    try:
        nats, variance = made.costs(made.evaluate(model, made.numbers))
    finally:
        for module in training:
            module.training = True
    to_device = partial(torch.as_tensor, device=device)
    return LikelihoodEstimate(to_device(nats), to_device(variance**0.5), is_exact=made.estimator.is_exact)


def _row_seeds(seed: int, x_0: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"] | None) -> list[int]:
    """Derive a seed from the tokens of each row, padding left out, and the number of equal rows before it."""
    tokens = x_0 if valid is None else x_0.masked_fill(~valid, -1)
    seen: Counter[str] = Counter()
    seeds = []
    for row in tokens.tolist():
        key = str([token for token in row if token >= 0])
        seeds.append(derive_seed(seed, f"{key} {seen[key]}"))
        seen[key] += 1
    return seeds


def default_batch(device: torch.device, num_states: int, length: int) -> int:
    """Return the draws to evaluate at a time: 16 on a CPU; on a GPU 2^16 tokens, or 2^30 logits if that is less."""
    return 16 if device.type == "cpu" else max(1, min(2**16, 2**30 // num_states) // max(1, length))


def estimate_likelihood(
    model: Any,
    estimator: Estimator,
    sequences: Sequence[Ids],
    *,
    draws: int,
    seed: int,
    batch: int,
    ranks: Ranks,
    low_precision_model: Any = None,
    on_progress: OnProgress | None = None,
) -> LikelihoodEstimate[float]:
    """Estimate the likelihood of token sequences under a model.

    With ``low_precision_model`` all draws are evaluated by that model, and some by ``model`` too. The value is that of
    low precision if the difference is negligible, that is, small next to the standard error; else all draws are
    evaluated by ``model``. So an exact estimator, which has no standard error, uses ``model`` alone, and so do fewer
    than 64 draws.

    Args:
        sequences: Token ids; lengths may differ.
        draws: Monte Carlo draws per sequence; exact estimators ignore it.
        batch: How many draws are evaluated at once on each process; it does not change the result.
        ranks: The processes that share the work, and their device.
    """
    if not sequences or not all(map(len, sequences)):
        raise ValueError(f"of {len(sequences)} sequences some or all are empty; there is nothing to score in them")
    made, check = _Draws(estimator, sequences, draws, [seed], batch, ranks), None
    tries_low = low_precision_model is not None and not estimator.is_exact and len(made.numbers) >= 4 * FIRST
    if tries_low and np.isfinite(low := made.evaluate(low_precision_model, made.numbers, on_progress)).all():
        estimate = made.summary(low)
        per_draw = len(low) / made.lengths[made.rows].sum()  # the mean is in nats per token
        check = check_precision(
            low[:, :3].sum(-1) * per_draw,
            lambda chosen: made.evaluate(model, chosen)[:, :3].sum(-1) * per_draw,
            estimate.stderr,
            seed,
        )
        if check is not None and check.is_negligible:
            return replace(estimate, precision_check=check)
    return replace(made.summary(made.evaluate(model, made.numbers, on_progress)), precision_check=check)


def estimate_difference(
    models: tuple[Any, Any],
    estimator: Estimator,
    sequences: Sequence[Ids],
    *,
    draws: int,
    seed: int,
    batch: int,
    ranks: Ranks,
    on_progress: OnProgress | None = None,
) -> LikelihoodEstimate[float]:
    """Estimate the likelihood under the second model minus that under the first, on the same draws.

    Common random numbers: the error of the difference of similar models is far below the error of either value. The
    errors are standard errors over the sequences.
    """
    made = _Draws(estimator, sequences, draws, [seed], batch, ranks)
    first, second = (made.evaluate(model, made.numbers, on_progress)[:, :3].sum(-1) for model in models)
    costs = np.add.reduceat(second - first, made.starts) / made.counts
    error = population_stderr(costs, made.lengths)
    return LikelihoodEstimate(float(costs.sum() / made.lengths.sum()), error or 0.0, error)


@final
class _Draws:
    """All draws of some sequences by number: those of the first, then those of the second …

    Times are stratified over the sequences of one seed: over all of them, or each alone if it has a seed of its own.
    """

    def __init__(
        self,
        estimator: Estimator,
        sequences: Sequence[Ids],
        draws: int,
        seeds: Sequence[int],
        batch: int,
        ranks: Ranks,
        valid: Bool[Tensor, "b L"] | None = None,
    ) -> None:
        check_count("batch", batch)
        self.estimator, self.seeds, self.batch, self.ranks, self.valid = estimator, seeds, batch, ranks, valid
        self.lengths, self.tokens = np.array(list(map(len, sequences))), np.concatenate(sequences)
        self.counts = np.array(list(map(estimator.draws_of, self.lengths.tolist(), repeat(draws))))
        self.starts, self.rows = self.counts.cumsum() - self.counts, np.repeat(np.arange(len(sequences)), self.counts)
        self.numbers, self.u = np.arange(len(self.rows)), np.zeros(len(self.rows))
        self.times: list[StratifiedTimes] = []
        if not estimator.is_exact:
            self.times = list(map(partial(StratifiedTimes, len(sequences) // len(seeds), draws), seeds))
            self.u = np.concatenate([times.u.ravel() for times in self.times])

    def evaluate(
        self, model: Any, numbers: Int[np.ndarray, " n"], on_progress: OnProgress | None = None
    ) -> Float[np.ndarray, "n 5"]:
        """Return the three terms and two control variates of the draws with these numbers, from all processes."""
        found = torch.zeros(len(numbers), 5, dtype=torch.float64, device=self.ranks.device)
        lengths, batches = self.lengths[self.rows[numbers]], []
        for length in np.unique(lengths):  # sequences of one length come together, so that nothing is padded
            alike = np.flatnonzero(lengths == length)
            batches += np.split(alike, range(self.batch, len(alike), self.batch))
        mine = batches[self.ranks.rank :: self.ranks.world_size]
        done, total = 0, sum(map(len, mine))
        finished = torch.cuda.Event() if found.is_cuda else None
        for places in mine:  # a GPU computes one batch while the next one is prepared
            draw, label = self.at(numbers[places]), getattr(model, "label", None)
            label = label[self.rows[numbers[places]]] if label is not None and label.ndim else None
            given = model if draw.valid is None and label is None else model.bind(label=label, valid=draw.valid)
            with torch.no_grad():
                inputs = self.estimator.inputs(draw)
                terms = torch.stack(self.estimator.nats(given, draw.x_0, *inputs), -1)
                control_variates = self.estimator.control_variates(draw.x_0, *inputs)
                values = torch.cat([terms.double(), control_variates.double()], -1)
                found[torch.from_numpy(places).to(found.device)] = values
            if finished is not None:
                previous, finished = finished, torch.cuda.Event()
                finished.record()
                previous.synchronize()
            done += len(places)
            if on_progress is not None:
                on_progress(done, total)
        summed: np.ndarray = self.ranks.all_reduce_sum(found).cpu().numpy()
        return summed

    def at(self, numbers: Int[np.ndarray, " b"]) -> Draw:
        """Return what the inputs of these draws are made from, on the device: integers decide all noise."""
        rows, to_device = self.rows[numbers], partial(torch.as_tensor, device=self.ranks.device)
        places = self.lengths.cumsum()[rows, None] + np.arange(-self.lengths[rows[0]], 0)
        columns = self.tokens[places], numbers, numbers - self.starts[rows], self.u[numbers]
        x_0, number, index, u = map(to_device, columns)
        one_seed = len(self.seeds) == 1
        rng = CounterRNG(self.seeds[0], number) if one_seed else CounterRNG(to_device(self.seeds)[rows], index)
        return Draw(x_0, index, u, rng, None if self.valid is None else self.valid[rows])

    def costs(
        self, found: Float[np.ndarray, "draws 5"]
    ) -> tuple[Float[np.ndarray, " sequences"], Float[np.ndarray, " seeds"]]:
        """Return the nats of each sequence and, for each seed, the Monte Carlo variance of the sum of its sequences."""
        if not (finite := np.isfinite(found).all(-1)).all():
            raise ValueError(
                f"the loss is not finite in rows {np.unique(self.rows[~finite])[:8].tolist()}; the weights are "
                "damaged, or training diverged: look for NaN in the network's output"
            )
        if not self.times:
            return np.add.reduceat(found[:, :3], self.starts).sum(-1) / self.counts, np.zeros(len(self.seeds))
        values, costs, variances = found.reshape(len(self.times), *self.times[0].strata.shape, 5), [], []
        for times, nats, control_variates in zip(self.times, values[..., :3].sum(-1), values[..., 3:], strict=True):
            trend = self.estimator.trend(torch.from_numpy(times.midpoints)).numpy()
            adjusted, variance = times.adjust(nats, trend, control_variates)
            costs.append(adjusted.mean(-1))
            variances.append(variance)
        return np.concatenate(costs), np.array(variances)

    def summary(self, found: Float[np.ndarray, "draws 5"]) -> LikelihoodEstimate[float]:
        """Average over draws and sum over sequences, in the order of their numbers."""
        (costs, (variance,)), tokens, is_exact = self.costs(found), self.lengths.sum(), self.estimator.is_exact
        # control variates adjust the diffusion term alone
        other_terms = (np.add.reduceat(found[:, 1:3], self.starts) / self.counts[:, None]).sum(0)
        terms = np.array([costs.sum() - other_terms.sum(), *other_terms]) / tokens
        nats = float(costs.sum() / tokens)
        return LikelihoodEstimate(
            nats=nats,
            stderr=float(variance**0.5 / tokens),
            stderr_population=population_stderr(costs, self.lengths),
            terms=tuple(terms.tolist()),
            network_calls=int(np.dot(self.counts, list(map(self.estimator.calls_per_draw, self.lengths.tolist())))),
            lower=nats if is_exact else None,
            lower_stderr=0.0 if is_exact else None,
            is_exact=is_exact,
        )


def population_stderr(costs: Float[np.ndarray, " sequences"], lengths: Int[np.ndarray, " sequences"]) -> float | None:
    """Standard error of the ratio estimator Σ costs/Σ lengths, from the residuals cost − ratio·length."""
    n = len(costs)
    if n < 2:
        return None
    residuals = costs - costs.sum() / lengths.sum() * lengths
    return float((n / (n - 1) * (residuals**2).sum()) ** 0.5 / lengths.sum())
