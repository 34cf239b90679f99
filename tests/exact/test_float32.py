"""Losses in float32 at vocabulary 50,257 are those of float64, gradients included, at every noise; long steps too."""

import pytest
import scipy.stats
import torch
from toys import random_distribution

from sedd import divergence, exact, samplers
from sedd.objectives import D3PM, DenoisingScoreEntropy, Objective
from sedd.parameterization import MeanModel, ScoreModel
from sedd.process import Absorbing, Process, Uniform
from sedd.samplers import grid
from sedd.samplers import model as models
from sedd.schedule import Geometric

N = 50_257
SIGMAS = torch.logspace(-6, 1.301, 12).clamp_max(20.0)


def tokens(process: Process) -> tuple[torch.Tensor, torch.Tensor]:
    """Three positions: kept, replaced, replaced by another; under absorbing noise the last two are masks."""
    x_0 = torch.tensor([17, 17, N - 1])
    x_t = torch.tensor([17, 5, 0]) if isinstance(process, Uniform) else torch.tensor([17, N, N])
    return x_t.expand(len(SIGMAS), -1), x_0.expand(len(SIGMAS), -1)


def outputs(kind: str, process: Process) -> torch.Tensor:
    z = torch.randn(len(SIGMAS), 3, process.num_states, generator=torch.Generator().manual_seed(0))
    if kind == "zero":
        return torch.zeros_like(z)
    if kind == "sharp":  # a trained model: nearly sure, and right
        return z + 15 * torch.nn.functional.one_hot(tokens(process)[1], process.num_states)
    return z


def loss_and_gradient(f: object, z: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    z = z.to(dtype).requires_grad_()
    loss = f(z, SIGMAS.to(dtype))
    (gradient,) = torch.autograd.grad(loss.sum(), z)
    assert loss.dtype == dtype
    return loss.detach().double(), gradient.double()


def agree(f: object, z: torch.Tensor, atol: float = 1e-30, softmax: float = 0.0, rtol: float = 1e-4) -> None:
    """Within ``rtol`` of float64; ``atol`` nats for a loss that is next to nothing where it is computed.

    The gradient through a softmax is a difference of numbers as large as the loss, so it is known to
    ``softmax`` times the loss at best: a few units in the last place, as many as the CPU's vector width and library of
    elementary functions make of a sum over 50,257 tokens.
    """
    single, double = (loss_and_gradient(f, z, dtype) for dtype in (torch.float32, torch.float64))
    for a, b in zip(single, double, strict=True):
        assert a.isfinite().all()
        assert b.isfinite().all()
    assert (single[0] >= 0).all()
    torch.testing.assert_close(single[0], double[0], rtol=rtol, atol=atol)
    error, size = (single[1] - double[1]).norm(dim=-1), double[1].norm(dim=-1)
    assert (error <= rtol * size + softmax * (double[0] + 1e-3) + atol).all()


@pytest.mark.parametrize("kind", ["random", "zero", "sharp"])
@pytest.mark.parametrize("process", [Uniform(N), Absorbing(N)], ids=str)
def test_score_entropy(process: Process, kind: str) -> None:
    """On log-scores themselves: random, all 0, and near the ratios."""
    x_t, x_0 = tokens(process)
    log_score = outputs("zero" if kind == "zero" else "random", process)
    if kind == "sharp":
        ratio = process.ratios(x_t, x_0, SIGMAS)
        rest = torch.full((*x_t.shape, 1), -30.0) if ratio.log_rest is None else ratio.log_rest
        near = rest.expand(log_score.shape)
        near = near.scatter(-1, x_0[..., None], ratio.log_data[..., None].expand(*x_0.shape, 1))
        log_score = near + 0.1 * log_score
    agree(lambda z, sigma: process.score_entropy(z, x_t, x_0, sigma), log_score)


@pytest.mark.parametrize("kind", ["random", "zero", "sharp"])
@pytest.mark.parametrize("wrapper", [ScoreModel, MeanModel])
@pytest.mark.parametrize("process", [Uniform(N), Absorbing(N)], ids=str)
def test_score_entropy_of_a_network(process: Process, wrapper: type, kind: str) -> None:
    """From a network's output, through the parameterization."""
    x_t, x_0 = tokens(process)

    def loss(z: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return process.score_entropy(wrapper(Says(z), process)(x_t, sigma), x_t, x_0, sigma)

    mean = wrapper is MeanModel and isinstance(process, Uniform)
    # of a confident denoiser, 1 − p is the small difference of numbers near 1: log p is known to 1e-6, 1 − p to 2e-4
    atol, rtol = (1e-5, 2e-4) if mean and kind == "sharp" else (1e-30, 1e-4)
    agree(loss, outputs(kind, process), atol, 4 * torch.finfo(torch.float32).eps if mean else 0.0, rtol)


class Says(torch.nn.Module):
    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.output


@pytest.mark.parametrize("process", [Uniform(N), Absorbing(N)], ids=str)
def test_posterior_kl(process: Process) -> None:
    x_t, x_0 = tokens(process)
    agree(
        lambda z, sigma: process.posterior_kl(z[..., :N].log_softmax(-1), x_t, x_0, 0.9 * sigma, sigma),
        outputs("random", process),
        atol=1e-9,
    )


def test_no_noise_at_all_is_finite() -> None:
    """At t = 0 nothing is replaced; the ratios that do not happen must not make NaN of the others."""
    for process in (Uniform(5), Absorbing(5)):
        log_score = torch.randn(1, 2, process.num_states, requires_grad=True)
        x = torch.tensor([[0, 4]])
        loss = process.score_entropy(log_score, x, x, torch.zeros(1))
        loss.sum().backward()
        assert loss.isfinite().all()
        assert log_score.grad.isfinite().all()


@pytest.mark.parametrize(("process", "objective"), [(Absorbing(9), DenoisingScoreEntropy()), (Uniform(9), D3PM())])
def test_half_precision_networks_get_float32_losses(process: Process, objective: Objective) -> None:
    output = torch.randn(4, 6, process.num_states, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    x_0 = torch.randint(9, (4, 6), generator=generator)
    loss = objective(MeanModel(Says(output), process), x_0, generator=generator)
    assert loss.dtype == torch.float32
    assert loss.isfinite().all()


def test_the_naive_formula_would_fail_here() -> None:
    """A test of the test: s − a log s + K(a), as written, has no digits left near its minimum."""
    log_ratio = torch.tensor(-1e-4)
    truth = divergence.score_entropy(torch.tensor(0.0, dtype=torch.float64), log_ratio.double())
    assert abs(divergence.score_entropy(torch.tensor(0.0), log_ratio) / truth - 1) < 1e-4
    ratio = log_ratio.exp()
    naive = 1 - ratio * 0 + divergence.K(ratio)
    assert abs(naive / truth - 1) > 0.1


@pytest.mark.parametrize(
    "f", [divergence.score_entropy, divergence.square, divergence.linear], ids=lambda f: type(f).__name__
)
def test_gradients_by_finite_differences(f: divergence.Divergence) -> None:
    """Near s = a, far from it, and at a = 0; entry by entry and summed."""
    generator = torch.Generator().manual_seed(0)
    log_score = (2 * torch.randn(4, 10, generator=generator, dtype=torch.float64)).requires_grad_()
    log_ratio = torch.cat(
        [torch.full((4, 2), -torch.inf), log_score.detach()[:, 2:5] + 1e-3, torch.randn(4, 5)], -1
    ).double()
    assert torch.autograd.gradcheck(f, (log_score, log_ratio))
    excluded = torch.tensor([[0, 3], [1, 1], [9, 0], [2, 5]])
    for ratio in (log_ratio[:, 6:7], log_ratio, None):
        assert torch.autograd.gradcheck(lambda log_s, a=ratio: f.sum_except(excluded, log_s, a), log_score)


@pytest.mark.parametrize(
    "f", [divergence.score_entropy, divergence.square, divergence.linear], ids=lambda f: type(f).__name__
)
def test_a_sum_is_the_sum_of_its_entries(f: divergence.Divergence) -> None:
    log_score, ratio = torch.randn(3, 8).double(), torch.randn(3).double()
    kept = torch.tensor([[2, 3, 4, 5, 6, 7]]).expand(3, -1)
    excluded = torch.tensor([[0, 1]]).expand(3, -1)
    for log_a in (ratio, torch.full_like(ratio, -torch.inf)):
        each = f(log_score, log_a[:, None]).gather(-1, kept).sum(-1)
        torch.testing.assert_close(f.sum_except(excluded, log_score, log_a[:, None]), each)
    torch.testing.assert_close(f.sum_except(excluded, log_score, None), each)


def test_score_entropy_is_its_formula_across_the_seam_of_its_two_forms() -> None:
    d = torch.cat([torch.linspace(-0.03, 0.03, 601), torch.linspace(-9, 9, 100)]).double()
    s, a = torch.exp(d + 0.3), torch.full_like(d, 0.3).exp()
    expected = s - a * (d + 0.3) + divergence.K(a)
    torch.testing.assert_close(divergence.score_entropy(d + 0.3, a.log()), expected, rtol=0, atol=2e-15 * 1e4)
    small = torch.logspace(-9, -2.0001, 50, dtype=torch.float64)
    exact = small**2 / 2 + small**3 / 6 + small**4 / 24 + small**5 / 120 + small**6 / 720
    torch.testing.assert_close(divergence.score_entropy(small, torch.zeros_like(small)), exact, rtol=1e-12, atol=0)


def test_losses_stay_finite_next_to_no_noise() -> None:
    """At the first times a float32 schedule can tell from 0, a·e^d would overflow where s does not."""
    process = Uniform(N)
    x_t, x_0 = tokens(process)
    sigma = torch.logspace(-38, -8, len(SIGMAS))
    z = outputs("random", process).requires_grad_()
    loss = process.score_entropy(MeanModel(Says(z), process)(x_t, sigma), x_t, x_0, sigma)
    assert loss[:, 0].isfinite().all()  # kept tokens: replaced ones do not happen there
    loss[:, 0].sum().backward()
    assert z.grad.isfinite().all()


def test_half_precision_scores_are_raised() -> None:
    process, x = Absorbing(5), torch.tensor([[5, 5]])
    log_score = torch.randn(1, 2, 6).bfloat16()
    sigma = torch.tensor([0.3])
    half = process.score_entropy(log_score, x, x - 1, sigma)
    assert half.dtype == torch.float32
    assert torch.equal(half, process.score_entropy(log_score.float(), x, x - 1, sigma))


def test_positions_that_do_not_count_have_gradient_0_whatever_their_slope() -> None:
    log_s = torch.full((1, 2, 3), 400.0, requires_grad=True)  # e^400 overflows
    total = divergence.square.sum_except(torch.tensor([[[0, 0], [0, 0]]]), log_s, None)
    (total * 0).sum().nan_to_num().backward()
    assert (log_s.grad == 0).all()


class Float32Score(torch.nn.Module):
    """The true score of a distribution as a network in float32."""

    def __init__(self, truth: exact.Score) -> None:
        super().__init__()
        self.truth = truth

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.truth(x, sigma.double()).float()


def p_value_of_few_steps(steps: int, sampler: str) -> float:
    """Chi-square test of 20,000 samples of one token, of which Tweedie steps of any length are exact.

    The noise falls from 20 to 1e-4: e^Δσ is 5·10⁸, and all scores at the start are 1 ± 1e-8.
    """
    distribution, process = random_distribution(6, 1, 0), Uniform(6)
    model = ScoreModel(Float32Score(exact.Score(distribution, process)), process, Geometric())
    settings = samplers.SamplingSettings(sampler, steps=steps)
    run = samplers.SamplingRun(model, settings)
    *_, last = run.states(samplers.empty(20_000, 1))
    counts = torch.bincount(last.x.flatten(), minlength=6)
    return float(scipy.stats.chisquare(counts, 20_000 * distribution.probabilities).pvalue)


@pytest.mark.parametrize("sampler", ["tweedie", "gibbs"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_small_number_of_steps_under_uniform_noise(steps: int, sampler: str) -> None:
    """False alarm 1e-4 in all."""
    assert p_value_of_few_steps(steps, sampler) > 1e-5


@pytest.mark.parametrize("mutant", ["scores in float32", "terms that cancel in float32"])
@pytest.mark.parametrize("steps", [1, 4])
def test_long_steps_in_float32_are_caught(steps: int, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The score rounds to 1, or no weight is above 0 and tokens stay what the noise made them."""
    for module in (grid, models):
        monkeypatch.setattr(module, "log_score_at", lambda model, h, x, sigma: model.log_score_at(h, x, sigma))
    if mutant.startswith("terms"):
        monkeypatch.setattr(
            Uniform,
            "staggered_score",
            lambda self, score, dsigma: (
                dsigma.exp()[..., None, None] * score - dsigma.expm1()[..., None, None] * score.mean(-1, keepdim=True)
            ),
        )
    try:
        p_value = p_value_of_few_steps(steps, "tweedie")
    except ValueError as error:  # no weight was above 0, which a run notices
        p_value = 0.0 if "nothing can be drawn" in str(error) else 1.0
    assert not p_value > 1e-5
