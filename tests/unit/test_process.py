"""Draws of noise and of times, and losses without a tensor of the size of the vocabulary."""

import math

import pytest
import scipy.stats
import torch

from sedd import exact
from sedd.objectives import DenoisingScoreEntropy
from sedd.process import Absorbing, Frequency, Hybrid, Process, Uniform, log_odds
from sedd.schedule import (
    Cosine,
    Geometric,
    ImportanceTimes,
    LogLinear,
    LowNoiseTimes,
    Polynomial,
    Schedule,
    TimeSampler,
    UniformTimes,
    bell_times,
    stratified,
)

EVERY = [
    Uniform(5),
    Absorbing(5),
    Hybrid(5, 0.6),
    Frequency(5, (1, 2, 0.5, 4, 3)),
    Process(5, mask_share=0.3, frequencies=(1, 2, 0.5, 4, 3)),
]


@pytest.mark.parametrize("sigma", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("process", EVERY, ids=str)
def test_corrupt_draws_from_the_transition(process: Process, sigma: float, generator: torch.Generator) -> None:
    """Chi-square, 300,000 tokens, false alarm 1e-6."""
    x_0 = torch.full((3, 100_000), 2)
    x_t = process.corrupt(x_0, torch.full((3,), sigma), generator)
    counts = torch.bincount(x_t.flatten(), minlength=process.num_states).numpy()
    distribution = process.transition_matrix(torch.tensor(sigma, dtype=torch.float64))[:, 2].numpy()
    assert (counts[distribution == 0] == 0).all()
    assert scipy.stats.chisquare(counts[distribution > 0], distribution[distribution > 0] * counts.sum()).pvalue > 1e-6


@pytest.mark.parametrize("process", EVERY, ids=str)
def test_uniforms_are_mapped_to_the_transition_and_to_its_limit(process: Process) -> None:
    """Equally spaced uniforms: each state has its share to within one of them."""
    count, p = 50_000, process.transition_matrix(torch.tensor(80.0, dtype=torch.float64))[:, 2]
    u = (torch.arange(count).double() + 0.5) / count
    found = process.prior_sample(u).bincount(minlength=process.num_states) / count
    torch.testing.assert_close(found.double(), p, rtol=0, atol=2 / count)
    x_0, replaced = torch.full((1, count), 2), torch.stack([torch.zeros(count).double(), u], -1)[None]
    assert torch.equal(process.corrupt_by(x_0, torch.tensor([0.7]), replaced)[0], process.prior_sample(u))
    assert torch.equal(process.corrupt_by(x_0, torch.tensor([0.7]), 1 - 1e-9 * replaced - 1e-9), x_0)


@pytest.mark.parametrize("process", EVERY, ids=str)
def test_each_row_has_its_own_noise_level(process: Process, generator: torch.Generator) -> None:
    x_0 = torch.randint(5, (2, 500), generator=generator)
    x_t = process.corrupt(x_0, torch.tensor([0.0, 30.0]), generator)
    assert torch.equal(x_t[0], x_0[0])
    assert not torch.equal(x_t[1], x_0[1])


@pytest.mark.parametrize("process", [Uniform(50_257), Absorbing(50_257), Hybrid(50_257)], ids=str)
def test_closed_forms_need_no_matrix(process: Process) -> None:
    """Transition, rates, ratios and corruption of 4096 tokens at 50,257 states, each a vector of 4096."""
    x = torch.arange(4096).view(4, 1024)
    sigma = torch.full((4,), 0.3)
    y = process.corrupt(x, sigma, torch.Generator().manual_seed(0))
    assert process.transition(y, x, sigma[:, None]).shape == x.shape
    assert process.rate(y, x).shape == x.shape
    ratios = [part for part in process.ratios(y, x, sigma) if part is not None]  # None stands for 0
    if process.has_fused_forms:
        assert all(part.numel() <= x.numel() for part in ratios)


def test_stratified_times_are_spread_and_each_is_uniform() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([stratified(8, generator) for _ in range(20_000)])
    assert ((draws.sort().values * 8).floor() == torch.arange(8)).all()  # one in each eighth, every time
    assert ((draws > 0) & (draws < 1)).all()
    for row in draws.T:  # and row i is not tied to eighth i
        assert scipy.stats.kstest(row.numpy(), "uniform").pvalue > 1e-6


def test_the_same_seed_gives_the_same_noise() -> None:
    def noise() -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        t = stratified(4, generator)
        return Uniform(9).corrupt(torch.zeros(4, 20, dtype=torch.long), LogLinear().sigma(t), generator)

    assert torch.equal(noise(), noise())


@pytest.mark.parametrize("process", [Uniform(3), Absorbing(3), Hybrid(3), Frequency(3, (1, 2, 3))], ids=str)
def test_positions_that_cannot_change_are_never_read(process: Process) -> None:
    """Entries at x_t, and under absorbing noise whole unmasked positions, do not enter the loss or its gradient."""
    x_0 = exact.all_sequences(3, 2)
    x_t = process.corrupt(x_0, torch.full((9,), 0.8), torch.Generator().manual_seed(0))
    log_score = torch.randn(9, 2, process.num_states, dtype=torch.float64, requires_grad=True)
    loss = process.score_entropy(log_score, x_t, x_0, torch.full((9,), 0.8))
    (gradient,) = torch.autograd.grad(loss.sum(), log_score)
    assert (gradient.gather(-1, x_t[..., None]) == 0).all()
    assert (gradient[~process.is_noisy(x_t)] == 0).all()
    assert (loss[~process.is_noisy(x_t)] == 0).all()
    assert (gradient[process.is_noisy(x_t)].abs().sum(-1) > 0).all()


def test_the_ratio_of_the_mask_to_a_token_is_the_odds_of_replacement() -> None:
    sigma = torch.tensor([0.4], dtype=torch.float64)
    log_mean = torch.zeros(1, 2, 3, dtype=torch.float64).log_softmax(-1)
    log_score = Absorbing(3).mean_score(log_mean, torch.tensor([[1, 3]]), sigma)
    assert math.isclose(log_score[0, 0, 3].exp(), math.expm1(0.4), rel_tol=1e-12)
    assert log_score[0, 1, 3] == 0


def test_odds_far_below_rounding() -> None:
    assert math.isclose(log_odds(torch.tensor(1e-20)), math.log(1e-20), rel_tol=1e-6)


def test_weights_of_sampled_times_keep_integrals() -> None:
    u = (torch.arange(100_000).double() + 0.5) / 100_000
    for t_min in (0.0, 0.2):
        even = UniformTimes()(u, t_min)
        assert even.t.min() < t_min + 1e-4
        assert even.t.max() > 1 - 1e-4
        time_sampler = ImportanceTimes.fit(even.t, 1 / even.t, parts=8, t_min=t_min)
        early, fitted = LowNoiseTimes()(u, t_min), time_sampler(u, t_min)
        bell = bell_times()(u, t_min)
        assert bell.weight.max() < 3.3
        middle = (bell.t - t_min) / (1 - t_min)
        assert ((middle > 0.25) & (middle < 0.75)).double().mean() > 0.6
        for times in (even, early, fitted, bell):  # ∫ 3t² dt = 1 − t_min³
            assert math.isclose((times.weight * 3 * times.t**2).mean(), 1 - t_min**3, rel_tol=1e-4)
        for times in (early, fitted):  # more than its eighth: the loss is largest there
            assert (times.t < t_min + (1 - t_min) / 8).double().mean() > 0.15
        unweighed = early._replace(weight=torch.ones_like(u))
        assert not math.isclose((unweighed.weight * 3 * early.t**2).mean(), 1 - t_min**3, rel_tol=0.1)


def test_fitting_needs_no_graph_and_no_losses() -> None:
    t = torch.rand(64, dtype=torch.float64)
    time_sampler = ImportanceTimes.fit(t, torch.rand(64, requires_grad=True) * 2)
    assert not time_sampler.masses.requires_grad
    assert torch.equal(ImportanceTimes.fit(t, torch.zeros(64), parts=4).masses, torch.full((4,), 0.25).double())


@pytest.mark.parametrize(
    "schedule", [LogLinear(), LogLinear(0.3), Cosine(), Geometric(), Polynomial(3.5, 1e-4)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_times_come_back_inside_the_unit_interval(schedule: Schedule, dtype: torch.dtype, refuses: object) -> None:
    t = torch.linspace(0, 1, 101, dtype=dtype)
    back = schedule.t(schedule.sigma(t))
    assert ((back >= 0) & (back <= 1)).all()
    schedule.sigma(back)
    refuses(lambda: schedule.t(torch.tensor([1e3], dtype=dtype)), "sigma is 1000.0", "between")


@pytest.mark.parametrize(
    "time_sampler", [UniformTimes(), LowNoiseTimes(), bell_times()], ids=lambda s: type(s).__name__
)
def test_objectives_draw_times_from_t_min_on(time_sampler: TimeSampler) -> None:
    """∫ f dt from t_min to 1 by the times and weights of an objective, not of the sampler alone."""
    u = (torch.arange(20_000).double() + 0.5) / 20_000
    t, weight = DenoisingScoreEntropy(t_min=0.3, time_sampler=time_sampler).times(u)
    assert 0.3 <= t.min() < 0.3001
    for power in (0, 1, 4):
        expected = (1 - 0.3 ** (power + 1)) / (power + 1)
        assert math.isclose((weight * t**power).mean(), expected, rel_tol=1e-3)
