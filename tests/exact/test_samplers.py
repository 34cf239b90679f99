"""Ladder step 4: the law of samples by dynamic programming, and wrong samplers that must be caught by it."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from toys import random_distribution, tensor

from sedd import exact
from sedd.diffusion.process import Absorbing, Process, Uniform
from sedd.diffusion.reverse import analytic_table, denoising_table
from sedd.diffusion.schedule import Geometric, LogLinear, Schedule
from sedd.exact import Distribution
from sedd.sampling import Euler, Tweedie

SETTINGS = [(Absorbing, LogLinear()), (Uniform, LogLinear(1e-2)), (Uniform, Geometric(1e-3, 8.0))]


def laws_on_the_way(
    law: Distribution,
    process: Process,
    schedule: Schedule,
    steps: int,
    table: Callable[..., torch.Tensor],
    last: bool = True,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """From the true law at t = 1 down ``steps`` equal steps and one to no noise: the law found and the true one."""
    x = exact.every(process.num_states, law.length)
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    p = law.at(process, schedule.sigma(times[0]))
    found = []
    for t, s in pairwise(times):
        p = exact.propagate(p, table(x, t.expand(len(x)), s.expand(len(x))))
        found.append((p, law.at(process, schedule.sigma(s))))
    if last:
        sigma = schedule.sigma(times[-1])
        if sigma > 0:
            p = exact.propagate(p, denoising_table(exact.Score(law, process), process, x, sigma.expand(len(x))))
    return [*found, (p, law.at(process, tensor(0.0)))]


def error(laws: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Total variation from the truth, at the worst time."""
    return max((p - truth).abs().sum().item() / 2 for p, truth in laws)


def last_error(laws: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Total variation of the samples from the data."""
    return error(laws[-1:])


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize(("kind", "schedule"), SETTINGS)
def test_tweedie_is_exact_for_one_token(kind: type[Process], schedule: Schedule, steps: int) -> None:
    law, process = random_distribution(4, 1, 0), kind(4)
    table = partial(exact.transition_table, Tweedie(exact.Score(law, process), process, schedule))
    assert error(laws_on_the_way(law, process, schedule, steps, table)) <= 1e-12


@pytest.mark.parametrize("sampler", [Tweedie, Euler])
@pytest.mark.parametrize(("kind", "schedule"), SETTINGS)
def test_the_error_falls_at_the_declared_order(kind: type[Process], schedule: Schedule, sampler: type) -> None:
    law, process = random_distribution(3, 3, 0), kind(3)
    sampler = sampler(exact.Score(law, process), process, schedule)
    coarse, fine = (
        last_error(laws_on_the_way(law, process, schedule, steps, partial(exact.transition_table, sampler)))
        for steps in (128, 256)
    )
    assert 0.9 * 2**sampler.order < coarse / fine < 1.1 * 2**sampler.order


# Tests of the test -----------------------------------------------------------------------------------------


def late_score(law: Distribution, process: Process, schedule: Schedule) -> Callable[..., torch.Tensor]:
    """The network is told the noise of half a step later."""
    score = exact.Score(law, process)

    def table(x: torch.Tensor, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        told = schedule.sigma((t + s) / 2)
        return analytic_table(lambda x, _: score(x, told), process, x, schedule.sigma(t), schedule.sigma(s))

    return table


def unstaggered(law: Distribution, process: Process, schedule: Schedule) -> Callable[..., torch.Tensor]:
    """P(y) ∝ s_y · P_Δσ(x, y): the ratios of time t used as if they were those of s."""
    score, states = exact.Score(law, process), torch.arange(process.num_states)

    def table(x: torch.Tensor, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        step = (schedule.sigma(t) - schedule.sigma(s))[:, None, None]
        p = score(x, schedule.sigma(t)).exp() * process.transition(x[..., None], states, step)
        return p / p.sum(-1, keepdim=True)

    return table


def no_reset(law: Distribution, process: Process, schedule: Schedule) -> Callable[..., torch.Tensor]:
    """The entry at y = x_t is whatever the network says, not ratio 1."""
    score = exact.Score(law, process)

    def biased(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return score(x, sigma).scatter(-1, x[..., None], -0.7)

    return partial(exact.transition_table, Tweedie(biased, process, schedule))


@pytest.mark.parametrize("wrong", [late_score, unstaggered, no_reset])
@pytest.mark.parametrize(("kind", "schedule"), SETTINGS)
def test_wrong_samplers_are_caught(kind: type[Process], schedule: Schedule, wrong: Callable[..., object]) -> None:
    law, process = random_distribution(4, 1, 0), kind(4)
    laws = laws_on_the_way(law, process, schedule, 7, wrong(law, process, schedule))
    assert error(laws) > 1e-3  # the right one has 1e-12


def test_a_missing_last_step_is_caught() -> None:
    law, process, schedule = random_distribution(4, 1, 0), Uniform(4), Geometric(1e-2, 8.0)
    table = partial(exact.transition_table, Tweedie(exact.Score(law, process), process, schedule))
    assert last_error(laws_on_the_way(law, process, schedule, 7, table)) <= 1e-12
    assert last_error(laws_on_the_way(law, process, schedule, 7, table, last=False)) > 1e-3


def test_no_mask_survives_the_last_step() -> None:
    law, process = random_distribution(3, 2, 0), Absorbing(3)
    x = exact.every(4, 2)
    p = denoising_table(exact.Score(law, process), process, x, tensor(0.5).expand(len(x)))
    assert (p[..., process.mask] == 0).all()
    torch.testing.assert_close(p.sum(-1), torch.ones(len(x), 2).double())
    torch.testing.assert_close(
        p[-1], exact.Score(law, process).log_mean(x[-1:], tensor(0.5).view(1))[0].exp() @ torch.eye(3, 4).double()
    )


def test_steps_too_long_and_scores_too_wrong_still_give_laws() -> None:
    """Entries below 0 are clamped, entries above 1 normalised: a table is always a law."""
    x = exact.every(3, 2)
    loud = lambda x, sigma: torch.full((*x.shape, 3), 3.0).double().scatter(-1, x[..., None], 0)  # noqa: E731
    quiet = lambda x, sigma: torch.full((*x.shape, 3), -9.0).double().scatter(-1, x[..., None], 0)  # noqa: E731
    t, s = (tensor(v).expand(len(x)) for v in (1.0, 0.0))
    for model in (loud, quiet):
        for sampler in (Tweedie(model, Uniform(3), LogLinear()), Euler(model, Uniform(3), LogLinear())):
            table = exact.transition_table(sampler, x, t, s)
            assert (table >= 0).all()
            torch.testing.assert_close(table.sum(-1), torch.ones(len(x), 2).double())
