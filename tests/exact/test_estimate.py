"""Estimates of likelihoods are the bound, their standard errors are right, and fixed orders give likelihoods."""

import itertools
import math
from collections.abc import Callable

import definitions
import numpy as np
import pytest
import torch
from toys import random_distribution, random_model, with_schedule

from sedd import exact
from sedd.draws import CounterRNG
from sedd.exact import pairs
from sedd.likelihood import LikelihoodEstimate, estimate_likelihood, estimators
from sedd.likelihood.estimators import (
    AnyOrderEstimator,
    AutoregressiveEstimator,
    BoundEstimator,
    DiffusionTermEstimator,
    Draw,
    FixedOrderEstimator,
)
from sedd.likelihood.variance_reduction import StratifiedTimes
from sedd.nn.transformer import Modern
from sedd.objectives import DenoisingScoreEntropy
from sedd.parameterization import MeanModel, ScoreModel
from sedd.process import Absorbing, Frequency, Hybrid, Process, Uniform, at_token
from sedd.reverse import denoising_table
from sedd.runtime.distributed import Ranks
from sedd.schedule import Cosine, Geometric, LogLinear, Schedule

ALONE = Ranks(0, 1, torch.device("cpu"))
NOISES = [
    (Absorbing(3), LogLinear()),
    (Absorbing(3), Geometric(1e-3, 8.0)),
    (Uniform(3), Geometric(1e-3, 8.0)),
    (Hybrid(3, 0.6), LogLinear(1e-2)),
    (Frequency(3, (1, 2, 3)), Geometric(1e-3, 8.0)),
]


def found(
    model: object, estimator: estimators.Estimator, rows: object, draws: int = 8, seed: int = 0, batch: int = 512
) -> LikelihoodEstimate:
    as_arrays = [np.asarray(row) for row in rows]
    return estimate_likelihood(model, estimator, as_arrays, draws=draws, seed=seed, batch=batch, ranks=ALONE)


def bound_of_each(model: object, process: Process, schedule: Schedule, length: int = 3, nodes: int = 40) -> np.ndarray:
    """The bound on every sequence of 3 tokens, in nats: all that noise can do to it, at Gauss–Legendre times."""
    all_alike = exact.Distribution(torch.full((3,) * length, 3.0**-length, dtype=torch.float64))
    losses, trained = DenoisingScoreEntropy(), with_schedule(model, schedule)
    ends = schedule.sigma(torch.tensor([0.0, 1.0], dtype=torch.float64))
    total = process.prior_kl(exact.all_sequences(3, length), ends[1].expand(3**length)).sum(-1)

    def add(cost: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], sigma: torch.Tensor, share: float) -> None:
        x_t, x_0, weight = pairs(all_alike, process, sigma)
        total.index_add_(0, exact.index_of(x_0, 3), share * 3**length * weight * cost(x_t, x_0).sum(-1))

    for point, share in zip(*np.polynomial.legendre.leggauss(nodes), strict=True):
        u = torch.tensor((point + 1) / 2, dtype=torch.float64)
        t = u**3
        add(
            lambda x, y, t=t: losses.loss(trained, x, y, t.expand(len(x))), schedule.sigma(t), float(share * 1.5 * u**2)
        )
    if ends[0] > 0:
        add(lambda x, y: -at_token(denoising_table(model, process, x, ends[0].expand(len(x))), y).log(), ends[0], 1.0)
    return total.numpy()


@pytest.mark.parametrize(("process", "schedule"), NOISES, ids=str)
@pytest.mark.parametrize("wrapper", [None, ScoreModel, MeanModel], ids=["exact", "score", "mean"])
def test_the_estimate_is_the_bound(process: Process, schedule: Schedule, wrapper: type | None) -> None:
    """5 standard errors, 4 numbers: false alarm below 1e-5. They are 20 % of the bound at most."""
    distribution = random_distribution(3, 3, 0)
    model = (
        exact.Score(distribution, process)
        if wrapper is None
        else random_model(wrapper, process, 3).requires_grad_(False)
    )
    truth = exact.bound(model, distribution, process, schedule, nodes=80)
    every = bound_of_each(model, process, schedule, nodes=80)
    np.testing.assert_allclose(
        distribution.probabilities.numpy() @ every, truth.total, rtol=1e-3
    )  # two ways to the same
    # a data set in which each sequence occurs as often as in the distribution, to a 300th
    rows = distribution.sequences.repeat_interleave((300 * distribution.probabilities).round().long(), 0)
    result = found(model, BoundEstimator(process, schedule), rows, draws=8)
    expected = every[exact.index_of(rows, 3)].mean() / 3
    assert abs(result.nats - expected) <= 5 * result.stderr
    assert 5 * result.stderr <= 0.2 * expected
    assert sum(result.terms) == pytest.approx(result.nats, abs=1e-12)
    assert result.terms[1] == pytest.approx(truth.prior.item() / 3, abs=1e-9)
    for value, exact_value in zip(result.terms, truth, strict=True):
        assert abs(value - exact_value.item() / 3) <= 5 * result.stderr + 0.01  # the 300ths


def coverage(distributions: int, sequences: int, draws: int) -> tuple[float, float, float]:
    """Return how often the 95 % intervals, for this data set and for the population, contain the exact value.

    And the least number of standard errors by which a bound lies above the −log p that it bounds.
    """
    inside, population, above = 0, 0, []
    for i in range(distributions):
        process, schedule = NOISES[i % 3]
        distribution, generator = random_distribution(3, 3, i), torch.Generator().manual_seed(i)
        model = exact.Score(distribution, process)
        every = bound_of_each(model, process, schedule, nodes=16)
        x_0 = distribution.draw(sequences, generator)
        result = found(model, BoundEstimator(process, schedule), x_0, draws=draws, seed=i)
        inside += abs(result.nats - every[exact.index_of(x_0, 3)].mean() / 3) < 1.96 * result.stderr
        population += (
            abs(result.nats - distribution.probabilities.numpy() @ every / 3) < 1.96 * result.stderr_population
        )
        above.append((result.nats + distribution.log_prob(x_0).mean().item() / 3) / result.stderr)
    return inside / distributions, population / distributions, min(above)


@pytest.mark.verify
@pytest.mark.timeout(1200)  # a minute of one core, and twice that with shapes checked
def test_the_error_is_calibrated_and_the_bound_bounds() -> None:
    """92 to 98 % of 850 distributions, in both: that is 4 standard errors of a coverage of 95 %.

    The bound of the exact score is −log p on average and 5.5 standard errors below it with probability 2e-5 in all.
    """
    inside, population, above = coverage(distributions=850, sequences=64, draws=16)
    assert 0.92 <= inside <= 0.98
    assert 0.92 <= population <= 0.98
    assert above > -5.5


def small() -> MeanModel:
    """An untrained transformer whose head is not 0: 8 tokens, any length."""
    network = Modern(
        states=9, width=16, depth=1, heads=2, time_conditioning=False, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        network.head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    return MeanModel(network.requires_grad_(False).eval(), Absorbing(8))


def texts(count: int, lengths: tuple[int, ...]) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 8, size=lengths[i % len(lengths)]) for i in range(count)]


def as_if_independent(
    self: StratifiedTimes, costs: np.ndarray, trend: np.ndarray, control_variates: np.ndarray
) -> tuple[np.ndarray, float]:
    """The error of a plain mean, which takes the draws as independent."""
    return costs, float(costs.size * costs.var(ddof=1)) / self.draws**2


@pytest.mark.parametrize(
    ("adjust", "lengths"),
    [(StratifiedTimes.adjust, (40,)), (StratifiedTimes.adjust, (40, 10, 3)), (as_if_independent, (40,))],
    ids=["equal lengths", "ragged", "naive"],
)
def test_the_error_is_the_spread_over_seeds(
    adjust: object, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 seeds know it to 8 %, so that 33 % off is 4 standard errors. The naive error is twice too large."""
    monkeypatch.setattr(StratifiedTimes, "adjust", adjust)
    bound, rows, model = BoundEstimator(Absorbing(8), LogLinear()), texts(10, lengths), small()
    results = [found(model, bound, rows, draws=12, seed=seed) for seed in range(80)]
    reported = math.sqrt(np.mean([result.stderr**2 for result in results]))
    ratio = reported / np.std([result.nats for result in results], ddof=1)
    assert ratio > 2 if adjust is as_if_independent else abs(ratio - 1) < 0.33


def test_the_error_counts_the_uncertainty_of_the_factors_of_control_variates() -> None:
    """Control variates whose sum is far from 0, as may happen: the error in their factor is then two thirds of it all.

    Over 600 draws of the costs, whose variance is known to 6 %; the residuals make it 7 % too large.
    """
    times, draw = StratifiedTimes(sequences=200, draws=2, seed=0), np.random.default_rng(0)
    trend, control_variates = np.zeros((200, 2)), 1 + draw.standard_normal((200, 2, 1))
    adjusted = [times.adjust(draw.standard_normal((200, 2)), trend, control_variates) for _ in range(600)]
    variance = np.var([costs.mean(-1).sum() for costs, _ in adjusted], ddof=1)
    assert variance > 250  # of the costs alone it is 100
    assert np.mean([reported for _, reported in adjusted]) == pytest.approx(variance, rel=0.3)


@pytest.mark.parametrize(("process", "schedule"), NOISES[1:], ids=str)
def test_control_variates_leave_the_expectation(process: Process, schedule: Schedule) -> None:
    """40 seeds, their mean within 4 of its standard errors, half that of one; with little to fit the factors to."""
    distribution = random_distribution(3, 3, 1)
    model = random_model(MeanModel, process, 3).requires_grad_(False)
    truth = bound_of_each(model, process, schedule).mean() / 3
    values = [
        found(model, BoundEstimator(process, schedule), distribution.sequences, draws=4, seed=seed).nats
        for seed in range(40)
    ]
    assert abs(np.mean(values) - truth) < 4 * np.std(values, ddof=1) / math.sqrt(40)


def test_every_stratum_is_used_once_and_each_draw_is_uniform() -> None:
    times = StratifiedTimes(sequences=5, draws=6, seed=3)
    assert sorted(times.strata.ravel()) == list(range(30))
    np.testing.assert_array_equal(np.floor(times.u * 30), times.strata)
    parts = np.floor(times.u * 3).astype(int)
    np.testing.assert_array_equal(parts, np.tile([0, 0, 1, 1, 2, 2], (5, 1)))
    firsts = np.array([StratifiedTimes(2, 2, seed).u[0, 0] for seed in range(400)])
    assert abs(firsts.mean() - 0.5) < 4 * 0.289 / 20  # 4 standard errors


@pytest.mark.parametrize("schedule", [LogLinear(), Geometric(1e-3, 8.0), Cosine()], ids=str)
@pytest.mark.parametrize("t_min", [0.0, 0.1])
def test_times_carry_their_weight(schedule: Schedule, t_min: float) -> None:
    """∫ f dt from t_min to 1, whatever the distribution of the times: 20,000 points, evenly, leave less than 1e-3."""
    u = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    t, weight = estimators.times_by_noise(u, schedule, t_min)
    assert t.min() >= t_min
    for power in (0, 1, 3):
        torch.testing.assert_close(
            (weight * t**power).mean().item(), (1 - t_min ** (power + 1)) / (power + 1), rtol=1e-3, atol=0
        )


def test_batches_and_processes_change_nothing() -> None:
    """To the digits that are printed, and more: the network's own rounding is all that is left."""
    bound, rows = BoundEstimator(Absorbing(8), LogLinear()), texts(9, (12, 5))
    whole = found(small(), bound, rows, batch=64)
    for batch in (1, 7):
        part = found(small(), bound, rows, batch=batch)
        np.testing.assert_allclose(part.nats, whole.nats, rtol=1e-6)
        np.testing.assert_allclose(part.stderr, whole.stderr, rtol=1e-5)
    halves: list[torch.Tensor] = []

    class Half(Ranks):  # keeps what it would send, and goes on with the sum once both are there
        def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
            halves.append(values)
            return torch.stack(halves).sum(0)

    for rank in (0, 1):
        share = estimate_likelihood(
            small(), bound, rows, draws=8, seed=0, batch=7, ranks=Half(rank, 2, torch.device("cpu"))
        )
    assert ((halves[0][:, 1] == 0) != (halves[1][:, 1] == 0)).all()  # each draw, and so its prior, by one of them
    np.testing.assert_allclose(share.nats, whole.nats, rtol=1e-6)


def test_a_draw_does_not_depend_on_the_batch() -> None:
    """The inputs of a draw are the same in a batch of one and in a larger one."""
    x_0 = torch.arange(8).view(2, 4)
    u, rng = torch.tensor([0.9, 0.3], dtype=torch.float64), CounterRNG(7, torch.tensor([5, 6]))
    for estimator in (
        BoundEstimator(Uniform(8), Geometric()),
        DiffusionTermEstimator(Uniform(8), Geometric(), 0.1),
        AnyOrderEstimator(Absorbing(8)),
    ):
        both = estimator.inputs(Draw(x_0, torch.tensor([0, 0]), u, rng))
        one = estimator.inputs(Draw(x_0[1:], torch.tensor([0]), u[1:], CounterRNG(7, torch.tensor([6]))))
        for a, b in zip(both, one, strict=True):
            assert torch.equal(a[1:], b)


@pytest.mark.parametrize("process", [Absorbing(4), Uniform(4)], ids=str)
def test_inputs_are_noised_as_the_process_defines(process: Process) -> None:
    """Transition frequencies of 40,000 tokens against exp(σQ): 5 standard errors, 40 entries: below 3e-5."""
    x_0 = torch.arange(4).repeat(10_000, 1)
    u = torch.full((10_000,), 0.8, dtype=torch.float64)
    bound = BoundEstimator(process, LogLinear())
    draw = Draw(x_0, torch.zeros(10_000, dtype=torch.long), u, CounterRNG(0, torch.arange(10_000)))
    x_t, _, t, *_ = bound.inputs(draw)
    expected = exact.transition_matrix(process, LogLinear().sigma(t[:1]))[0, :, :4]
    counts = torch.stack([torch.bincount(x_t[:, i], minlength=process.num_states) for i in range(4)], 1) / 10_000
    assert ((counts - expected).abs() <= 5 * (expected * (1 - expected) / 10_000).sqrt() + 1e-12).all()


# Orders ----------------------------------------------------------------------------------------------------


def chain_rule(model: MeanModel, x_0: torch.Tensor, order: tuple[int, ...]) -> float:
    """−log p(x_0) in an order, a token after the other."""
    x, total = torch.full_like(x_0, model.process.num_states - 1), 0.0
    for position in order:
        log_p = model.log_mean(x[None], torch.ones(1))[0, position, x_0[position]]
        total -= log_p.item()
        x[position] = x_0[position]
    return total


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_one_order_is_the_chain_rule(order: tuple[int, ...]) -> None:
    distribution, process = random_distribution(3, 3, 0), Absorbing(3)
    estimator = FixedOrderEstimator(process, lambda length: torch.tensor(order))
    model = random_model(MeanModel, process, 3).requires_grad_(False)
    for x_0 in distribution.sequences[::5]:
        result = found(model, estimator, x_0[None])
        assert result.nats * 3 == pytest.approx(chain_rule(model, x_0, order), abs=1e-9)
        assert result.stderr == 0
    # in every order the exact denoiser has the exact likelihood
    result = found(exact.Score(distribution, process), estimator, distribution.sequences)
    assert result.nats == pytest.approx(-distribution.log_prob(distribution.sequences).mean().item() / 3, abs=1e-9)


def test_one_order_sums_to_one() -> None:
    """So it is a likelihood: Σ_x p(x) = 1 over all 27 sequences, for a model that is wrong about everything."""
    model, process = random_model(MeanModel, Absorbing(3), 3).requires_grad_(False), Absorbing(3)
    backward = FixedOrderEstimator(process, lambda length: torch.arange(length).flip(0))
    costs = [3 * found(model, backward, x[None]).nats for x in exact.all_sequences(3, 3)]
    assert np.exp(-np.array(costs)).sum() == pytest.approx(1, abs=1e-9)


def test_any_order_is_the_mean_over_orders_and_the_bound() -> None:
    """5 standard errors. Equal to the enumeration over k and masks, to the mean over orders, and to the diffusion term.

    And it bounds the value of a model that draws its order at random: −log of the mean of p over the orders.
    """
    distribution, process = random_distribution(3, 3, 0), Absorbing(3)
    model = random_model(MeanModel, process, 3).requires_grad_(False)
    rows = distribution.sequences.repeat_interleave((300 * distribution.probabilities).round().long(), 0)
    uneven = torch.bincount(exact.index_of(rows, 3), minlength=27).double()
    as_often = exact.Distribution((uneven / uneven.sum()).view(3, 3, 3))
    expected = np.mean([definitions.any_order(model, as_often, process, k).item() for k in (1, 2, 3)]) / 3
    result = found(model, AnyOrderEstimator(process), rows, draws=12)
    assert abs(result.nats - expected) <= 5 * result.stderr
    assert 5 * result.stderr < 0.1 * expected
    orders = list(itertools.permutations(range(3)))
    table = np.array([[chain_rule(model, x, order) for order in orders] for x in distribution.sequences])
    weights = as_often.probabilities.numpy()
    assert weights @ table.mean(1) / 3 == pytest.approx(expected, abs=1e-9)
    diffusion = exact.bound(model, as_often, process, LogLinear(eps=1e-9), nodes=40).diffusion.item()
    assert diffusion / 3 == pytest.approx(expected, abs=1e-6)
    mixture = -np.log(np.exp(-table).mean(1))
    assert weights @ mixture / 3 < expected


def test_left_to_right_is_exact() -> None:
    distribution = random_distribution(3, 3, 0)
    result = found(exact.Score(distribution, Absorbing(3)), AutoregressiveEstimator(), distribution.sequences)
    assert result.nats == pytest.approx(-distribution.log_prob(distribution.sequences).mean().item() / 3, abs=1e-9)
    assert result.stderr == 0
    spread = distribution.log_prob(distribution.sequences).std().item() / 3 / math.sqrt(27)
    assert result.stderr_population == pytest.approx(spread, rel=1e-6)


def test_every_draw_has_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 texts, 6 draws each, in two batches: no two share a random number."""
    seen, inputs = [], BoundEstimator.inputs

    def record(self: BoundEstimator, draw: Draw) -> object:
        seen.append(draw.rng(4))
        return inputs(self, draw)

    monkeypatch.setattr(BoundEstimator, "inputs", record)
    found(small(), BoundEstimator(Absorbing(8), LogLinear()), texts(5, (3,)), draws=6, batch=16)
    assert len(seen) == 2
    assert len(torch.cat(seen).unique()) == 5 * 6 * 4 * 2


def test_texts_of_different_lengths_count_by_their_tokens() -> None:
    """Exactly: the nats of all texts over the tokens of all, neither the mean over texts nor over draws."""
    by, rows = FixedOrderEstimator(Absorbing(8), torch.arange), texts(3, (9, 2, 1))
    nats = [len(row) * found(small(), by, [row]).nats for row in rows]
    assert found(small(), by, rows).nats == pytest.approx(sum(nats) / 12, abs=1e-6)
    assert abs(np.mean([value / len(row) for value, row in zip(nats, rows, strict=True)]) - sum(nats) / 12) > 1e-3


@pytest.mark.parametrize("t_min", [1e-3, 0.2])
def test_published_numbers_are_means_over_t_of_the_diffusion_term(t_min: float) -> None:
    distribution, process, schedule = random_distribution(3, 3, 0), Absorbing(3), LogLinear()
    model = random_model(MeanModel, process, 3).requires_grad_(False)
    each = exact.Distribution(torch.full((3, 3, 3), 1 / 27, dtype=torch.float64))
    truth = exact.bound(model, each, process, schedule, t_min=t_min, nodes=60).diffusion.item() / (1 - t_min) / 3
    result = found(
        model, DiffusionTermEstimator(process, schedule, t_min), distribution.sequences.repeat(8, 1), draws=12
    )
    assert abs(result.nats - truth) <= 5 * result.stderr
    assert 5 * result.stderr < 0.2 * truth
    assert result.terms[1:] == (0.0, 0.0)


# Tests of the tests ----------------------------------------------------------------------------------------


def without_prior(kept: object) -> object:
    def terms(*arguments: object) -> estimators.BoundTerms:
        all_terms = kept(*arguments)
        return all_terms._replace(prior=torch.zeros_like(all_terms.prior))

    return terms


def over_masked_tokens(kept: object) -> object:
    def terms(by: BoundEstimator, model: object, x_0: torch.Tensor, x_t: torch.Tensor, *rest: object):
        all_terms = kept(by, model, x_0, x_t, *rest)
        share = by.process.is_noisy(x_t).float().mean(-1).clamp_min(1 / x_t.shape[-1])
        return all_terms._replace(diffusion=all_terms.diffusion / share)

    return terms


def biased(kept: object) -> object:
    return lambda *arguments: kept(*arguments) + 1


def without_constant(kept: object) -> object:
    return lambda *arguments: (times := kept(*arguments))._replace(weight=times.weight / 3)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        (None, None),
        ("BoundEstimator.nats", without_prior),
        ("BoundEstimator.nats", over_masked_tokens),
        ("times_by_noise", without_constant),
        ("BoundEstimator.control_variates", biased),
    ],
    ids=[
        "none",
        "prior dropped",
        "mean over masked tokens",
        "constant of the weight dropped",
        "a control variate with a mean",
    ],
)
def test_mutants_are_caught(name: str | None, mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right is within 4 standard errors of the bound, what is wrong is not within 14."""
    distribution, process, schedule = (
        random_distribution(3, 3, 0),
        Absorbing(3),
        LogLinear(eps=0.2),
    )  # a prior that is worth noticing
    model = exact.Score(distribution, process)
    truth = bound_of_each(model, process, schedule).mean() / 3
    if name is not None:
        *owner, name = name.split(".")
        place = getattr(estimators, owner[0]) if owner else estimators
        monkeypatch.setattr(place, name, mutant(getattr(place, name)))
    result = found(model, BoundEstimator(process, schedule), distribution.sequences.repeat(10, 1), draws=8)
    off = abs(result.nats - truth) / result.stderr
    assert off < 4 if name is None else off > 14
