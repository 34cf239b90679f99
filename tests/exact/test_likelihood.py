"""The estimated bound is, on average, the bound by enumeration; its three terms one by one."""

import math

import pytest
import torch
from toys import random_distribution, random_model

from sedd import exact
from sedd.exact import pairs
from sedd.likelihood.estimators import BoundEstimator
from sedd.parameterization import MeanModel, ScoreModel
from sedd.process import Absorbing, Process, Uniform
from sedd.schedule import Geometric, LogLinear, LowNoiseTimes, Schedule, Times, stratified

DRAWS = 60_000


@pytest.mark.parametrize("wrapper", [ScoreModel, MeanModel])
@pytest.mark.parametrize(
    ("process", "schedule"),
    [(Absorbing(3), LogLinear()), (Absorbing(3), Geometric(1e-2, 8.0)), (Uniform(3), Geometric(1e-2, 8.0))],
    ids=str,
)
def test_terms_average_to_the_expected_bound(process: Process, schedule: Schedule, wrapper: type) -> None:
    """5 standard errors, 3 terms: false alarm below 1e-5. 10 standard errors are 10 % of the bound at most."""
    distribution, generator = random_distribution(3, 3, 0), torch.Generator().manual_seed(0)
    model = random_model(wrapper, process, 3).requires_grad_(False)
    expected = exact.bound(model, distribution, process, schedule, nodes=150)
    x_0, times = distribution.draw(DRAWS, generator), LowNoiseTimes()(stratified(DRAWS, generator))
    x_t, x_first = (process.corrupt(x_0, schedule.sigma(s), generator) for s in (times.t, torch.zeros_like(times.t)))
    valid = torch.ones_like(x_0, dtype=torch.bool)
    found = BoundEstimator(process, schedule).nats(model, x_0, x_t, x_first, *times, valid)
    for name in ("diffusion", "prior", "reconstruction"):
        values, truth = getattr(found, name).double(), getattr(expected, name)
        error = values.std() / math.sqrt(DRAWS)
        assert abs(values.mean() - truth) <= 5 * error + 1e-6, name
        assert 10 * error <= 0.1 * expected.total
    torch.testing.assert_close(found.total, found.diffusion + found.prior + found.reconstruction)


@pytest.mark.parametrize("process", [Absorbing(3), Uniform(3)], ids=str)
@pytest.mark.parametrize("lo", [1e-2, 1e-4, 1e-6])
def test_the_reconstruction_term_counts_however_little_noise_there_is(process: Process, lo: float) -> None:
    """In float64, over all noise at t = 0, it is that of the definition."""
    distribution, schedule = random_distribution(3, 2, 0), Geometric(lo, 8.0)
    score = exact.Score(distribution, process)
    x_first, x_0, weight = pairs(distribution, process, schedule.sigma(torch.zeros((), dtype=torch.float64)))
    times = Times(*(torch.ones(len(x_0), dtype=torch.float64) for _ in range(2)))
    found = BoundEstimator(process, schedule).nats(score, x_0, x_0, x_first, *times, torch.ones_like(x_0).bool())
    expected = exact.bound(score, distribution, process, schedule, nodes=1).reconstruction
    assert expected > lo / 10
    torch.testing.assert_close((weight * found.reconstruction).sum(), expected, rtol=1e-6, atol=0)


def test_padding_does_not_count() -> None:
    process, schedule = Absorbing(3), LogLinear()
    model = random_model(MeanModel, process, 3).requires_grad_(False)
    x_0, masks = torch.tensor([[0, 1, 2]]), torch.full((1, 3), 3)
    times, valid = LowNoiseTimes()(torch.tensor([0.7])), torch.tensor([[True, True, False]])
    whole, part = (
        BoundEstimator(process, schedule).nats(model, x_0, masks, x_0, *times, each)
        for each in (torch.ones_like(valid), valid)
    )
    assert part.diffusion < whole.diffusion
    torch.testing.assert_close(part.prior, whole.prior * 2 / 3)
