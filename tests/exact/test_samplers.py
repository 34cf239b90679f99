"""Ladder step 4: the distribution of samples by dynamic programming, and wrong samplers that must be caught by it."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from toys import random_distribution, tensor

from sedd import exact
from sedd.exact import Distribution
from sedd.process import Absorbing, Process, Uniform
from sedd.reverse import analytic_weights, denoising_table, normalize_probs
from sedd.samplers import Euler, Tweedie
from sedd.schedule import Geometric, LogLinear, Schedule

SETTINGS = [(Absorbing, LogLinear()), (Uniform, LogLinear(1e-2)), (Uniform, Geometric(1e-3, 8.0))]


def distributions_of_steps(
    distribution: Distribution,
    process: Process,
    schedule: Schedule,
    steps: int,
    table: Callable[..., torch.Tensor],
    last: bool = True,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the distribution after each of ``steps`` equal steps and the last to no noise, each with the true one."""
    x = exact.all_sequences(process.num_states, distribution.length)
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    p = distribution.at(process, schedule.sigma(times[0]))
    found = []
    for t, s in pairwise(times):
        p = exact.propagate(p, table(x, t.expand(len(x)), s.expand(len(x))))
        found.append((p, distribution.at(process, schedule.sigma(s))))
    if last:
        sigma = schedule.sigma(times[-1])
        if sigma > 0:
            p = exact.propagate(
                p, denoising_table(exact.Score(distribution, process), process, x, sigma.expand(len(x)))
            )
    return [*found, (p, distribution.at(process, tensor(0.0)))]


def error(distributions: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Total variation from the truth, at the worst time."""
    return max((p - truth).abs().sum().item() / 2 for p, truth in distributions)


def last_error(distributions: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Total variation of the samples from the data."""
    return error(distributions[-1:])


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize(("kind", "schedule"), SETTINGS)
def test_tweedie_is_exact_for_one_token(kind: type[Process], schedule: Schedule, steps: int) -> None:
    distribution, process = random_distribution(4, 1, 0), kind(4)
    table = partial(exact.transition_table, Tweedie(), exact.Score(distribution, process, schedule))
    assert error(distributions_of_steps(distribution, process, schedule, steps, table)) <= 1e-12


@pytest.mark.parametrize("sampler", [Tweedie, Euler])
@pytest.mark.parametrize(("kind", "schedule"), SETTINGS)
def test_the_error_falls_at_the_declared_order(kind: type[Process], schedule: Schedule, sampler: type) -> None:
    distribution, process = random_distribution(3, 3, 0), kind(3)
    table = partial(exact.transition_table, sampler(), exact.Score(distribution, process, schedule))
    coarse, fine = (
        last_error(distributions_of_steps(distribution, process, schedule, steps, table)) for steps in (128, 256)
    )
    assert 0.9 * 2**sampler.order < coarse / fine < 1.1 * 2**sampler.order


# Tests of the test -----------------------------------------------------------------------------------------


class Changed:
    """A model with another log-score."""

    def __init__(self, model: exact.Score, log_score: Callable[..., torch.Tensor]) -> None:
        self.process, self.schedule, self.log_score = model.process, model.schedule, log_score

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.log_score(x, sigma)


def late_score(distribution: Distribution, process: Process, schedule: Schedule) -> Callable[..., torch.Tensor]:
    """The network is called with the noise level of half a step later."""
    score = exact.Score(distribution, process)

    def table(x: torch.Tensor, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        late_sigma = schedule.sigma((t + s) / 2)
        log_score = score(x, late_sigma)
        return normalize_probs(analytic_weights(process, log_score, x, schedule.sigma(t), schedule.sigma(s)))

    return table


def unstaggered(distribution: Distribution, process: Process, schedule: Schedule) -> Callable[..., torch.Tensor]:
    """P(y) ∝ s_y · P_Δσ(x, y): the ratios of time t used as if they were those of s."""
    score, states = exact.Score(distribution, process), torch.arange(process.num_states)

    def table(x: torch.Tensor, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        step = (schedule.sigma(t) - schedule.sigma(s))[:, None, None]
        p = score(x, schedule.sigma(t)).exp() * process.transition(x[..., None], states, step)
        return p / p.sum(-1, keepdim=True)

    return table


def no_reset(distribution: Distribution, process: Process, schedule: Schedule) -> Callable[..., torch.Tensor]:
    """The entry at y = x_t is the network's output, not ratio 1."""
    score = exact.Score(distribution, process, schedule)
    biased = Changed(score, lambda x, sigma: score(x, sigma).scatter(-1, x[..., None], -0.7))
    return partial(exact.transition_table, Tweedie(), biased)


@pytest.mark.parametrize("wrong", [late_score, unstaggered, no_reset])
@pytest.mark.parametrize(("kind", "schedule"), SETTINGS)
def test_wrong_samplers_are_caught(kind: type[Process], schedule: Schedule, wrong: Callable[..., object]) -> None:
    distribution, process = random_distribution(4, 1, 0), kind(4)
    distributions = distributions_of_steps(distribution, process, schedule, 7, wrong(distribution, process, schedule))
    assert error(distributions) > 1e-3  # the right one has 1e-12


def test_a_missing_last_step_is_caught() -> None:
    distribution, process, schedule = random_distribution(4, 1, 0), Uniform(4), Geometric(1e-2, 8.0)
    table = partial(exact.transition_table, Tweedie(), exact.Score(distribution, process, schedule))
    assert last_error(distributions_of_steps(distribution, process, schedule, 7, table)) <= 1e-12
    assert last_error(distributions_of_steps(distribution, process, schedule, 7, table, last=False)) > 1e-3


def test_no_mask_survives_the_last_step() -> None:
    distribution, process = random_distribution(3, 2, 0), Absorbing(3)
    x = exact.all_sequences(4, 2)
    p = denoising_table(exact.Score(distribution, process), process, x, tensor(0.5).expand(len(x)))
    assert (p[..., process.mask] == 0).all()
    torch.testing.assert_close(p.sum(-1), torch.ones(len(x), 2).double())
    torch.testing.assert_close(
        p[-1],
        exact.Score(distribution, process).log_mean(x[-1:], tensor(0.5).view(1))[0].exp() @ torch.eye(3, 4).double(),
    )


def test_steps_too_long_and_scores_too_wrong_still_give_distributions() -> None:
    """Entries below 0 are clamped, entries above 1 normalised: the rows of a table always sum to 1."""
    x = exact.all_sequences(3, 2)
    loud = lambda x, sigma: torch.full((*x.shape, 3), 3.0).double().scatter(-1, x[..., None], 0)  # noqa: E731
    quiet = lambda x, sigma: torch.full((*x.shape, 3), -9.0).double().scatter(-1, x[..., None], 0)  # noqa: E731
    t, s = (tensor(v).expand(len(x)) for v in (1.0, 0.0))
    score = exact.Score(random_distribution(3, 2, 0), Uniform(3))
    for log_score in (loud, quiet):
        for sampler in (Tweedie(), Euler()):
            table = exact.transition_table(sampler, Changed(score, log_score), x, t, s)
            assert (table >= 0).all()
            torch.testing.assert_close(table.sum(-1), torch.ones(len(x), 2).double())
