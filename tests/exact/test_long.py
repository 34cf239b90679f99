"""Long proofs, for `make verify`: more distributions, more draws, smaller steps. `-s` prints the numbers."""

from functools import partial

import pytest
import scipy.stats
import torch
from test_bound import bound_of_training_code
from test_categorical import FALSE_ALARM, N, chi_square, nine_decades
from test_sampler_distributions import BLANK, CASES, FAMILY, SETTINGS, make, p_value, run
from test_samplers import distributions_of_steps, error, last_error
from toys import random_distribution, tensor

from sedd import draws, exact
from sedd.process import Absorbing, Process, Uniform
from sedd.samplers import Euler, Tweedie, cosine_grid, empty
from sedd.schedule import Cosine, Geometric, LogLinear, Polynomial, Schedule

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3000)]
SCHEDULES: list[Schedule] = [
    LogLinear(),
    LogLinear(0.1),
    Geometric(1e-5, 20.0),
    Cosine(),
    Polynomial(),
    Polynomial(3.0),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("kind", [Absorbing, Uniform])
@pytest.mark.parametrize("length", [3, 4])
def test_the_bound_is_the_entropy_on_many_distributions(kind: type[Process], schedule: Schedule, length: int) -> None:
    allowed = 1e-10 if kind is Absorbing and not isinstance(schedule, Geometric) else 1e-4
    for seed in range(20):
        distribution, process = random_distribution(3, length, 100 + seed), kind(3)
        terms = exact.bound(
            exact.Score(distribution, process), distribution, process, schedule, true_base=True, nodes=120
        )
        assert abs(terms.total - distribution.entropy()) <= allowed
    gap = bound_of_training_code(distribution, process, schedule, nodes=400) - distribution.entropy()
    print(f"{process} {schedule} length {length}: gap {gap:+.1e}")
    assert abs(gap) <= allowed


@pytest.mark.parametrize("sampler", [Tweedie, Euler])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("kind", [Absorbing, Uniform])
def test_orders_of_every_sampler(kind: type[Process], schedule: Schedule, sampler: type) -> None:
    distribution, process = random_distribution(3, 3, 0), kind(3)
    table = partial(exact.transition_table, sampler(), exact.Score(distribution, process, schedule))
    coarse, fine = (last_error(distributions_of_steps(distribution, process, schedule, n, table)) for n in (1024, 2048))
    print(f"{sampler.__name__} {process} {schedule}: error {fine:.1e}, ratio {coarse / fine:.3f}")
    assert 0.95 * 2**sampler.order < coarse / fine < 1.05 * 2**sampler.order


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("kind", [Absorbing, Uniform])
def test_tweedie_is_exact_for_one_token_at_any_number_of_steps(kind: type[Process], schedule: Schedule) -> None:
    for n in (2, 3, 8):
        distribution, process = random_distribution(n, 1, n), kind(n)
        table = partial(exact.transition_table, Tweedie(), exact.Score(distribution, process, schedule))
        rounding = 1e-15 * schedule.sigma(tensor(1.0)).exp()  # exp(−ΔσQ) multiplies by up to e^σ(1) what is lost
        for steps in (1, 2, 5, 100):
            assert error(distributions_of_steps(distribution, process, schedule, steps, table)) <= 1e-11 + rounding


def test_every_token_of_the_vocabulary_has_its_interval() -> None:
    weights = nine_decades(torch.float32)
    ends = weights.double().cumsum(0)
    middle = (ends - weights.double() / 2) / ends[-1]
    tokens = torch.arange(N)[weights > 0]
    found = torch.cat([draws.sample_inverse_cdf(weights.expand(len(t), -1), middle[t]) for t in tokens.split(500)])
    assert torch.equal(found, tokens)


def test_twenty_million_draws(generator: torch.Generator) -> None:
    """A hundred times the draws of `make test`; weights off by 0.3 % are detected with power > 0.999."""
    count, weights = 20_000_000, torch.rand(12, generator=generator, dtype=torch.float64) + 0.2
    counts = sum(
        torch.bincount(draws.sample(weights.expand(200_000, -1), generator), minlength=12)
        for _ in range(count // 200_000)
    )
    p = chi_square(counts, weights)
    print(f"draws: p = {p:.3f}")
    assert p > FALSE_ALARM
    assert scipy.stats.ncx2.sf(scipy.stats.chi2.isf(FALSE_ALARM, 11), 11, count * 0.003**2) > 0.999


def test_moves_at_step_probability_1e_4_and_vocabulary_50257(generator: torch.Generator) -> None:
    """A million rows; a rate off by half is detected with power > 0.99. And tokens are drawn evenly."""
    rows, step = 1_000_000, 1e-4
    distribution = torch.full((N,), step / (N - 1)).index_fill(0, torch.tensor(0), 1 - step)
    x = torch.zeros(1000, dtype=torch.long)
    moved = torch.cat(
        [
            draws.sample_next(x, distribution.expand(1000, -1), draws.uniforms((1000, 2), generator))
            for _ in range(rows // 1000)
        ]
    )
    moved = moved[moved > 0]
    rate, even = scipy.stats.binomtest(len(moved), rows, step), scipy.stats.kstest(moved.numpy() / N, "uniform")
    print(f"moves: {len(moved)} of {rows * step:.0f}, p = {rate.pvalue:.3f}; evenness p = {even.pvalue:.3f}")
    assert rate.pvalue > FALSE_ALARM
    assert even.pvalue > FALSE_ALARM


@pytest.mark.parametrize(("name", "kind", "at"), CASES)
def test_every_sampler_on_every_model_again_with_more_draws(name: str, kind: str, at: int) -> None:
    """400,000 draws on a grid of nine cosine steps; an error of 1.5 % in every outcome is detected with power > 0.9."""
    count, times = 400_000, cosine_grid(9)
    with torch.no_grad():
        chosen, model = make(name, kind, at)
        p = p_value(
            run(chosen, model, empty(count, 3), times),
            exact.sample_distribution(chosen, model, BLANK, times),
            model.process.num_states,
        )
    print(f"{name}, {kind}, {SETTINGS[at][0]}, {SETTINGS[at][1]}: p = {p:.3f}")
    assert p > FAMILY / len(CASES)
    threshold = scipy.stats.chi2.isf(FAMILY / len(CASES), 26)
    assert scipy.stats.ncx2.sf(threshold, 26, count * 0.015**2) > 0.9
