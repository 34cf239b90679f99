"""Ladder step 5: draws at vocabulary 50,257, and the published float32 draw, which fails the same test."""

import math

import pytest
import scipy.stats
import torch

from sedd import draws
from sedd.process import reveal_probability
from sedd.schedule import LogLinear

N = 50_257
FALSE_ALARM = 1e-6


def nine_decades(dtype: torch.dtype) -> torch.Tensor:
    """Weights from 1 down to 1e-9, in random order, with some zeros between."""
    generator = torch.Generator().manual_seed(0)
    weights = 10 ** (-9 * torch.rand(N, generator=generator, dtype=torch.float64))
    weights[torch.randperm(N, generator=generator)[:100]] = 0
    return weights.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_token_is_drawn_from_the_middle_of_its_own_interval(dtype: torch.dtype) -> None:
    """The distribution without drawing: token i has an interval of u that is as long as its probability."""
    weights = nine_decades(dtype)
    ends = weights.double().cumsum(0)
    middle = (ends - weights.double() / 2) / ends[-1]
    tokens = torch.arange(N)[weights > 0][::7]  # every seventh: prime to the size of a block
    found = torch.cat([draws.sample_inverse_cdf(weights.expand(len(t), -1), middle[t]) for t in tokens.split(500)])
    assert torch.equal(found, tokens)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_ends_of_the_unit_interval_and_zero_weights(n: int) -> None:
    weights = torch.ones(2, n)
    u = torch.tensor([2.0**-54, 1 - 2.0**-53], dtype=torch.float64)
    assert draws.sample_inverse_cdf(weights, u).tolist() == [0, n - 1]
    weights = torch.zeros(2, n + 2)
    weights[:, n // 2 + 1] = 1e-30  # everything else has weight 0 and is never drawn
    assert draws.sample_inverse_cdf(weights, u).tolist() == [n // 2 + 1] * 2


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities / probabilities.sum() * counts.sum()
    assert (expected >= 5).all()
    return float(scipy.stats.chisquare(counts.numpy(), expected.numpy()).pvalue)


def test_draws_follow_the_weights(generator: torch.Generator) -> None:
    """Chi-square over 12 outcomes, 200,000 draws; an error of 3 % in each is detected with power > 0.999."""
    count, weights = 200_000, torch.rand(12, generator=generator, dtype=torch.float64) + 0.2
    counts = torch.bincount(draws.sample(weights.expand(count, -1), generator), minlength=12)
    assert chi_square(counts, weights) > FALSE_ALARM
    seen = scipy.stats.chi2.isf(FALSE_ALARM, 11)
    assert scipy.stats.ncx2.sf(seen, 11, count * 0.03**2) > 0.999


def test_rare_events_happen_at_their_rate(generator: torch.Generator) -> None:
    """Step probability 1e-4, 40 million trials; a rate off by 15 % is detected with power > 0.999."""
    trials, rate = 40_000_000, 1e-4
    count = (draws.uniforms((trials,), generator) < rate).sum().item()
    assert scipy.stats.binomtest(count, trials, rate).pvalue > FALSE_ALARM
    spread = math.sqrt(trials * rate)
    assert scipy.stats.norm.sf(scipy.stats.norm.isf(FALSE_ALARM / 2) - 0.15 * trials * rate / spread) > 0.999


# Reveal one of 50,256 tokens with probability 1e-3 in all, 2e-8 each; state 0 is "not yet".
STEP, ROWS = 1e-3, 50_000
STEP_DISTRIBUTION = torch.full((N,), STEP / (N - 1), dtype=torch.float64).index_fill(0, torch.tensor(0), 1 - STEP)


def reveals(draw: object, seed: int) -> int:
    generator = torch.Generator().manual_seed(seed)
    rows = STEP_DISTRIBUTION.float().expand(50, -1)
    return sum(int((draw(rows, generator) != 0).sum()) for _ in range(ROWS // 50))


def p_value(count: int) -> float:
    return float(scipy.stats.binomtest(count, ROWS, STEP).pvalue)


def legacy_rate() -> float:
    """Return the rate of the float32 race, whose exponentials are multiples of δ = 2^−24: its uniforms have 24 bits.

    A token wins against "not yet" if its exponential is below p·m, m ~ Exp(1); the lattice rounds p·m down.
    """
    m = torch.linspace(0, 40, 4_000_001, dtype=torch.float64)
    below = torch.floor(STEP_DISTRIBUTION[1] / STEP_DISTRIBUTION[0] * m * 2**24) / 2**24
    integrand = torch.exp(-m) * -torch.expm1((N - 1) * torch.log1p(-below))
    return float(torch.trapezoid(integrand, m))


def test_the_step_test_passes_for_sample_next() -> None:
    def step(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        x, u = torch.zeros(len(rows), dtype=torch.long), draws.uniforms((len(rows), 2), generator)
        return draws.sample_next(x, rows, u)

    assert p_value(reveals(step, seed=0)) > FALSE_ALARM


@pytest.mark.verify
def test_the_step_test_catches_legacy_fp32() -> None:
    """Power: the legacy rate is 1/6 of the right one, and 50,000 rows show that with probability > 0.999."""
    rate = legacy_rate()
    assert rate < STEP / 4
    alarm = max(k for k in range(ROWS) if k < ROWS * STEP and p_value(k) <= FALSE_ALARM)
    assert scipy.stats.binom.cdf(alarm, ROWS, rate) > 0.999
    count = reveals(draws.legacy_fp32, seed=0)
    assert p_value(count) <= FALSE_ALARM
    assert scipy.stats.binomtest(count, ROWS, rate).pvalue > FALSE_ALARM  # and it is wrong for the reason given


def test_steps_have_the_given_weights(generator: torch.Generator) -> None:
    """Steps from x go to each token, x among them, in proportion to unnormalised weights.

    Chi-square over 4 outcomes; 10 % too many of the rarest are detected with power > 0.9.
    """
    count = 400_000
    x, u = torch.full((count,), 2), draws.uniforms((count, 2), generator)
    weights = 7 * torch.tensor([0.1, 0.02, 0.68, 0.2, 0.0])
    counts = torch.bincount(draws.sample_next(x, weights.expand(count, -1), u), minlength=5)
    assert counts[4] == 0
    assert chi_square(counts[:4], torch.tensor([0.1, 0.02, 0.68, 0.2], dtype=torch.float64)) > FALSE_ALARM
    assert scipy.stats.ncx2.sf(scipy.stats.chi2.isf(FALSE_ALARM, 3), 3, count * 0.02 * 0.1**2) > 0.9


@pytest.mark.parametrize("n", [16, 128])
@pytest.mark.parametrize("length", [1, 10, 1024])
def test_steps_that_reveal_something(n: int, length: int) -> None:
    """A mask is revealed at each of n equal steps equally often, so n(1 − (1−1/n)^L) steps reveal something."""
    sigma = LogLinear(1e-9).sigma(torch.linspace(0, 1, n + 1, dtype=torch.float64))
    rho = reveal_probability(sigma[:-1], sigma[1:]).flip(0)  # from t = 1 down
    at = rho * torch.cat([torch.ones(1), (1 - rho)[:-1]]).cumprod(0)
    torch.testing.assert_close(at, torch.full((n,), 1 / n).double(), rtol=1e-6, atol=0)
    assert math.isclose((1 - (1 - at) ** length).sum(), n * (1 - (1 - 1 / n) ** length), rel_tol=1e-6)


def test_bad_weights_are_refused(refuses: object, generator: torch.Generator) -> None:
    refuses(lambda: draws.sample(torch.tensor([[0.5, -0.1]]), generator), "0 or more")
    refuses(lambda: draws.sample(torch.tensor([[0.5, math.nan]]), generator), "finite")
    refuses(lambda: draws.sample(torch.tensor([[0.0, 0.0]]), generator), "one above 0")


def test_uniforms_have_53_bits_and_stay_inside(generator: torch.Generator) -> None:
    u = draws.uniforms((100_000,), generator)
    assert ((u > 0) & (u < 1)).all()
    assert ((u * 2**24) % 1 != 0).float().mean() > 0.99  # not multiples of 2^−24
    assert ((u * 2**52) % 1 != 0).float().mean() > 0.2  # not even of 2^−52


def test_tokens_of_probability_1e_9_can_be_reached(generator: torch.Generator) -> None:
    """One heavy token and 50,256 of weight 1e-9: a 24-bit uniform could reach 843 of them."""
    weights = torch.full((N,), 1e-9).index_fill(0, torch.tensor(0), 1.0)
    light = 1 - draws.uniforms((400,), generator) * 5e-5
    found = draws.sample_inverse_cdf(weights.expand(400, -1), light)
    assert len(found.unique()) > 390


def test_no_float64_tensor_of_the_size_of_the_input() -> None:
    rows = torch.rand(512, N)
    with torch.profiler.profile(profile_memory=True) as profile:
        draws.sample(rows, torch.Generator().manual_seed(0))
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= 2**22 * 8 + 2**20 < rows.numel() * 8
