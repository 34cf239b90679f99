"""The likelihood of sequences: Monte Carlo draws of each, computed in any batches, averaged in one order.

`bound` returns one value per row of a tensor, `estimate_likelihood` one for a whole data set.

The noise of a draw is a function of the seed and the draw's number, so the result depends neither on the batch size nor
on the number of processes, up to the rounding of the network's own arithmetic.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd import tensors
from sedd.draws import CounterRNG, derive_seed
from sedd.likelihood.estimators import Estimator, MonteCarloEstimator, default_estimator
from sedd.likelihood.precision_check import FIRST, PrecisionCheck, check_precision
from sedd.likelihood.variance_reduction import AdjustedCosts, StratifiedTimes
from sedd.parameterization import DiscreteModel
from sedd.runtime.distributed import Ranks
from sedd.schema import check_count
from sedd.tokenizer import Ids

OnProgress = Callable[[int, int], None]
"""Called with the number of draws that this process has finished, and how many it has in all."""


class BoundEstimate(NamedTuple):
    """An upper bound on −log p of each sequence, in nats; the exact value for an autoregressive model."""

    nats: Float[Tensor, " b"]
    stderr: Float[Tensor, " b"]
    """Standard error of each value, from its draws; 0 where it is exact; the errors of rows are independent."""


@torch.no_grad()
def bound(
    model: Any,
    x_0: Int[Tensor, "b L"],
    draws: int = 64,
    seed: int = 0,
    *,
    valid: Bool[Tensor, "b L"] | None = None,
    batch: int | None = None,
) -> BoundEstimate:
    """Bound −log p of each sequence by the variational bound (negative ELBO).  [§8]

    The noise of a row is a function of the seed, the row's tokens and the number of equal rows before it. So different
    rows do not change its value, and all errors are independent.

    Args:
        model: A model of log-scores, with its process and schedule, or an autoregressive model.
        x_0: The sequences, one per row.
        draws: Monte Carlo draws per sequence: an even number. An autoregressive model needs none.
        seed: Decides times and noise.
        valid: False at padding, which does not count; by default as the model has it bound.
        batch: Draws per call of the network; it does not change the result. None: chosen for the device.
    """
    for name in ("process", "schedule"):
        if not hasattr(model, name):
            raise TypeError(
                f"model is {type(model).__name__}, which has no {name}; pass a model, as in "
                "bound(ScoreModel(network, process, schedule), x_0)"
            )
    process, device = model.process, _device(model, x_0)
    valid = getattr(model, "valid", None) if valid is None else valid
    _check_rows(x_0, valid)
    x_0 = x_0.to(device)
    if valid is not None:
        valid = valid.to(device).expand_as(x_0)
        x_0 = torch.where(valid, x_0, 0)
    tensors.check_clean_tokens(x_0, process.vocab_size)
    by = default_estimator(model)
    rows, length = x_0.shape
    times = [StratifiedTimes(1, draws, row_seed) for row_seed in _row_seeds(seed, x_0, valid)]
    u = torch.tensor(np.array([each.u[0] for each in times]), device=device)
    seeds = torch.tensor([each.seed for each in times], device=device)
    count = by.draws_of(length, draws)
    batch = default_batch(device, process.num_states, length) if batch is None else batch
    check_count("batch", batch)
    found = torch.zeros(rows, count, 5, dtype=torch.float64, device=device)
    with evaluation_mode(model):
        for place in torch.arange(rows * count, device=device).split(batch):
            row, index = place // count, place % count
            x, some = x_0[row], None if valid is None else valid[row]
            inputs = by.inputs(x, index, u[row, index], CounterRNG(seeds[row], index), some)
            found[row, index] = by.values(_of_rows(model, row, some), x, *inputs)
    values = found.cpu().numpy()
    if not (finite := np.isfinite(values).all((1, 2))).all():
        raise ValueError(
            f"the loss is not finite in rows {np.flatnonzero(~finite).tolist()}; look for NaN in the network's output"
        )
    costs, control_variates = values[..., :3].sum(-1), values[..., 3:]
    nats, variance = costs.mean(-1), np.zeros(rows)
    if isinstance(by, MonteCarloEstimator):
        for i in range(rows):
            adjusted = _adjust(by, times[i], costs[i : i + 1], control_variates[i : i + 1])
            nats[i], variance[i] = adjusted.costs.mean(), adjusted.variance
    return BoundEstimate(*(torch.from_numpy(column).to(device) for column in (nats, variance**0.5)))


def _device(model: Any, x_0: Tensor) -> torch.device:
    """Return the device of a model's parameters; of ``x_0`` if it has none."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return x_0.device if parameter is None else parameter.device


def _check_rows(x_0: Tensor, valid: Tensor | None) -> None:
    if x_0.ndim != 2 or x_0.numel() == 0 or x_0.dtype != torch.long:
        raise ValueError(
            f"x_0 is {x_0.dtype} of shape {tuple(x_0.shape)}; pass int64 tokens of shape (rows, length), as x_0[None] "
            "for one sequence"
        )
    if valid is not None and (valid.dtype != torch.bool or valid.shape not in (x_0.shape, x_0.shape[1:])):
        raise ValueError(
            f"valid is {valid.dtype} of shape {tuple(valid.shape)}; pass booleans of shape {tuple(x_0.shape)}, "
            "False at padding"
        )


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


def _of_rows(model: Any, row: Int[Tensor, " k"], valid: Tensor | None) -> Any:
    """Return the model given the padding and labels of these rows."""
    label = model.label if isinstance(model, DiscreteModel) else None
    label = None if label is None or label.ndim == 0 else label[row]
    if valid is None and label is None:
        return model
    return model.bind(label=label, valid=valid)


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Switch off dropout for a time."""
    training = [module for module in model.modules() if module.training] if isinstance(model, nn.Module) else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def default_batch(device: torch.device, num_states: int, length: int) -> int:
    """Return the draws to evaluate at a time: 16 on a CPU; on a GPU 2^16 tokens, or 2^30 logits if that is less."""
    return 16 if device.type == "cpu" else max(1, min(2**16, 2**30 // num_states) // max(1, length))


class LikelihoodEstimate(NamedTuple):
    """Negative log-likelihood of a data set, or a bound on it, in nats per token."""

    nats: float
    stderr: float
    """Standard error of the value on these sequences, from the Monte Carlo draws; 0 where it is exact."""
    stderr_population: float | None
    """Standard error of the value on the population, as if these sequences were independent samples of it; None for a
    single sequence and in training."""
    terms: tuple[float, ...]
    """Diffusion, prior and reconstruction term; their sum is ``nats``."""
    network_calls: int
    """Sequences that the network evaluated, those of the comparison of precisions not counted."""
    lower: float | None = None
    """A lower bound on the negative log-likelihood, where there is one; ``nats`` itself where it is exact."""
    lower_stderr: float | None = None
    precision_check: PrecisionCheck | None = None
    """What low precision would change, or does change if that is negligible; None if it was not tried."""

    @property
    def is_exact(self) -> bool:
        """Whether ``nats`` is the value itself, not a bound."""
        return self.lower == self.nats


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
    on_progress: OnProgress = lambda done, total: None,
) -> LikelihoodEstimate:
    """Estimate the likelihood of token sequences under a model.

    With ``low_precision_model`` all draws are evaluated by that model, and some by ``model`` too. The value is that of
    low precision if the difference is negligible, that is, small beside the standard error; else all draws are
    evaluated by ``model``. So an exact estimator, which has no standard error, uses ``model`` alone, and so do fewer
    than 64 draws.

    Args:
        model: The model that ``estimator`` evaluates.
        estimator: How a sequence's likelihood is estimated.
        sequences: Token ids; lengths may differ.
        draws: Monte Carlo draws per sequence; exact estimators ignore it.
        seed: Decides times and noise.
        batch: How many draws are evaluated at once on each process; it does not change the result.
        ranks: The processes that share the work, and their device.
        low_precision_model: The same model in a faster precision; None: there is none.
        on_progress: Called after each batch.
    """
    check_count("batch", batch)
    if not sequences or not all(map(len, sequences)):
        raise ValueError(f"of {len(sequences)} sequences some or all are empty; there is nothing to score in them")
    times = StratifiedTimes(len(sequences), draws, seed) if isinstance(estimator, MonteCarloEstimator) else None
    all_draws = _Draws(estimator, sequences, times, seed)
    evaluate = partial(_evaluate, draws=all_draws, batch=batch, ranks=ranks)
    numbers = np.arange(len(all_draws))
    full = partial(evaluate, model, on_progress=on_progress)
    if low_precision_model is None or times is None or len(all_draws) < 4 * FIRST:
        return _summary(full(numbers), all_draws)
    low = evaluate(low_precision_model, numbers, on_progress=on_progress)
    if not np.isfinite(low).all():
        return _summary(full(numbers), all_draws)
    estimate = _summary(low, all_draws)
    per_draw = len(all_draws) / (all_draws.lengths * np.diff(all_draws.starts)).sum()  # the mean is in nats per token
    check = check_precision(
        low[:, :3].sum(-1) * per_draw,
        lambda chosen: evaluate(model, chosen)[:, :3].sum(-1) * per_draw,
        estimate.stderr,
        seed,
    )
    if check is None or not check.is_negligible:
        estimate = _summary(full(numbers), all_draws)
    return estimate._replace(precision_check=check)


class LikelihoodDifference(NamedTuple):
    """How much more one model needs for a data set than another, in nats per token."""

    nats: float
    stderr: float | None
    """Standard error over the sequences; None for a single one."""


def estimate_difference(
    models: tuple[Any, Any],
    estimator: Estimator,
    sequences: Sequence[Ids],
    *,
    draws: int,
    seed: int,
    batch: int,
    ranks: Ranks,
    on_progress: OnProgress = lambda done, total: None,
) -> LikelihoodDifference:
    """Estimate the likelihood under the second model minus that under the first, on the same draws.

    Common random numbers: the error of the difference of similar models is far below that of either value. The other
    arguments are those of `estimate_likelihood`.

    Args:
        models: The two models.
        estimator: How a sequence's likelihood is estimated.
        sequences: Token ids; lengths may differ.
        draws: Monte Carlo draws per sequence.
        seed: Decides times and noise.
        batch: How many draws are evaluated at once.
        ranks: The processes that share the work.
        on_progress: Called after each batch.
    """
    times = StratifiedTimes(len(sequences), draws, seed) if isinstance(estimator, MonteCarloEstimator) else None
    all_draws = _Draws(estimator, sequences, times, seed)
    numbers = np.arange(len(all_draws))
    first, second = (
        _evaluate(model, numbers, draws=all_draws, batch=batch, ranks=ranks, on_progress=on_progress)[:, :3].sum(-1)
        for model in models
    )
    costs = np.add.reduceat(second - first, all_draws.starts[:-1]) / np.diff(all_draws.starts)
    return LikelihoodDifference(
        float(costs.sum() / all_draws.lengths.sum()), population_stderr(costs, all_draws.lengths)
    )


def _evaluate(
    model: Any,
    numbers: Int[np.ndarray, " n"],
    *,
    draws: "_Draws",
    batch: int,
    ranks: Ranks,
    on_progress: OnProgress = lambda done, total: None,
) -> Float[np.ndarray, "n 5"]:
    """Return the three terms and two control variates of the draws with these numbers, from all processes."""
    found = torch.zeros(len(numbers), 5, dtype=torch.float64, device=ranks.device)
    mine = list(draws.batches(numbers, batch))[ranks.rank :: ranks.world_size]
    done, total = 0, sum(map(len, mine))
    finished = torch.cuda.Event() if found.is_cuda else None
    for places in mine:  # a GPU computes one batch while the next one is prepared
        x_0, *inputs = draws.inputs(numbers[places], ranks.device)
        rows = torch.from_numpy(places).to(ranks.device)
        with torch.no_grad():
            found[rows] = draws.estimator.values(model, x_0, *inputs)
        if finished is not None:
            previous, finished = finished, torch.cuda.Event()
            finished.record()
            previous.synchronize()
        on_progress(done := done + len(places), total)
    values: np.ndarray = ranks.all_reduce_sum(found).cpu().numpy()
    return values


@final
class _Draws:
    """All draws of a data set by number: those of the first sequence, then those of the second …"""

    def __init__(
        self, estimator: Estimator, sequences: Sequence[Ids], times: StratifiedTimes | None, seed: int
    ) -> None:
        self.estimator, self.sequences, self.times, self.seed = estimator, sequences, times, seed
        self.lengths = np.array([len(ids) for ids in sequences])
        lengths, which = np.unique(self.lengths, return_inverse=True)
        counts = np.array([estimator.draws_of(n, times.draws if times else 0) for n in lengths.tolist()])[which]
        self.starts = np.concatenate([[0], np.cumsum(counts)])
        self.u = times.u.ravel() if times else np.zeros(len(self))  # unused where the value is exact

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def network_calls(self) -> int:
        """The number of sequences that the network evaluates."""
        calls = map(self.estimator.calls_per_draw, self.lengths.tolist())
        return int(np.dot(np.diff(self.starts), list(calls)))

    def batches(self, numbers: Int[np.ndarray, " n"], size: int) -> Iterator[Int[np.ndarray, " b"]]:
        """Yield places in ``numbers``; sequences of one length come together, so that nothing is padded."""
        lengths = self.lengths[self._sequence_of(numbers)]
        for length in np.unique(lengths):
            places = np.flatnonzero(lengths == length)
            yield from (places[i : i + size] for i in range(0, len(places), size))

    def inputs(self, numbers: Int[np.ndarray, " b"], device: torch.device) -> tuple[Tensor, ...]:
        """Return the sequences of these draws and the estimator's inputs, made on the device, as integers decide."""
        rows = self._sequence_of(numbers)
        columns = np.stack([self.sequences[row] for row in rows]), numbers, numbers - self.starts[rows], self.u[numbers]
        x_0, number, index, u = (torch.from_numpy(column).to(device) for column in columns)
        return x_0, *self.estimator.inputs(x_0, index, u, CounterRNG(self.seed, number))

    def _sequence_of(self, numbers: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        return np.searchsorted(self.starts, numbers, side="right") - 1


def _summary(found: Float[np.ndarray, "draws 5"], draws: _Draws) -> LikelihoodEstimate:
    """Average over draws and sum over sequences, in the order of their numbers."""
    if not np.isfinite(found).all():
        raise ValueError("the model gives a loss that is not finite; its weights are damaged, or its training diverged")
    costs, control_variates, tokens = found[:, :3], found[:, 3:], draws.lengths.sum()
    means = np.add.reduceat(costs, draws.starts[:-1]) / np.diff(draws.starts)[:, None]
    nats, variance = means.sum(-1), 0.0
    if isinstance(draws.estimator, MonteCarloEstimator) and draws.times is not None:
        shape = draws.times.strata.shape
        adjusted = _adjust(
            draws.estimator, draws.times, costs.sum(-1).reshape(shape), control_variates.reshape(*shape, -1)
        )
        nats, variance = adjusted.costs.mean(-1), adjusted.variance
    other_terms = means[:, 1:].sum(0)  # control variates adjust the diffusion term alone
    terms = np.array([nats.sum() - other_terms.sum(), *other_terms]) / tokens
    return LikelihoodEstimate(
        nats=float(nats.sum() / tokens),
        stderr=float(variance**0.5 / tokens),
        stderr_population=population_stderr(nats, draws.lengths),
        terms=tuple(terms.tolist()),
        network_calls=draws.network_calls,
        lower=float(nats.sum() / tokens) if draws.estimator.is_exact else None,
        lower_stderr=0.0 if draws.estimator.is_exact else None,
    )


def _adjust(
    estimator: MonteCarloEstimator,
    times: StratifiedTimes,
    costs: Float[np.ndarray, "sequences draws"],
    control_variates: Float[np.ndarray, "sequences draws 2"],
) -> AdjustedCosts:
    """Reduce the variance of the costs, and estimate what is left of it."""
    trend = estimator.trend(torch.from_numpy(times.midpoints.ravel())).numpy()
    return times.adjust(costs, trend.reshape(costs.shape), control_variates)


def population_stderr(costs: Float[np.ndarray, " sequences"], lengths: Int[np.ndarray, " sequences"]) -> float | None:
    """Standard error of the ratio estimator Σ costs/Σ lengths, from the residuals cost − ratio·length."""
    n = len(costs)
    if n < 2:
        return None
    residuals = costs - costs.sum() / lengths.sum() * lengths
    return float((n / (n - 1) * (residuals**2).sum()) ** 0.5 / lengths.sum())
