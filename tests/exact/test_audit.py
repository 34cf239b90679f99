"""The audit of losses: ours are bounds, losses that are not are refuted, and so are mutants of ours.  [§8]"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from test_bound import NoConstant
from toys import random_distribution, random_model

from sedd import exact, objectives
from sedd.evaluation import audit
from sedd.evaluation import audit_losses as losses
from sedd.evaluation.audit_losses import TimeDependentTable, audit_models
from sedd.parameterization import MeanModel
from sedd.process import Absorbing, Process, Uniform
from sedd.samplers import FirstHitting
from sedd.schedule import LogLinear, Schedule
from sedd.training.config import OBJECTIVES

# What a model generates in continuous time -----------------------------------------------------------------


@pytest.mark.parametrize("process", [Absorbing(3), Uniform(3)], ids=str)
def test_the_reverse_process_of_an_exact_score_generates_its_distribution(process: Process) -> None:
    distribution = random_distribution(3, 2, 0)
    p = exact.reverse_distribution(exact.Score(distribution, process), process, 2)
    torch.testing.assert_close(p, distribution.probabilities, rtol=0, atol=5e-6)
    few = exact.reverse_distribution(exact.Score(distribution, process), process, 2, steps=60)
    error = (p - distribution.probabilities).abs().max(), (few - distribution.probabilities).abs().max()
    assert error[1] < 1e-14 or error[1] > 8 * error[0]  # fourth order; under absorbing noise it is exact


def test_the_reverse_process_of_a_time_free_denoiser_is_the_mixture_over_orders() -> None:
    process = Absorbing(2)
    model = random_model(MeanModel, process, 3).requires_grad_(False)
    mixture = torch.zeros(8, dtype=torch.float64)
    for order in itertools.permutations(range(3)):
        x = exact.all_sequences(2, 3)
        x_t, p = torch.full_like(x, 2), torch.ones(8, dtype=torch.float64)
        for i in order:
            p = p * model.log_mean(x_t, torch.ones(8))[torch.arange(8), i, x[:, i]].exp()
            x_t[:, i] = x[:, i]
        mixture += p / 6
    torch.testing.assert_close(exact.reverse_distribution(model, process, 3), mixture, rtol=0, atol=1e-7)


def test_the_reverse_process_of_a_denoiser_that_depends_on_time_is_the_limit_of_many_steps() -> None:
    """The error of a grid falls as 1/steps; the same model frozen at one noise level is far off."""
    process, table = Absorbing(3), TimeDependentTable(4, 2)
    for seed, parameter in enumerate(table.parameters()):
        parameter.requires_grad_(False).normal_(std=2, generator=torch.Generator().manual_seed(seed))
    model = MeanModel(table, process, losses.FULL_NOISE)
    p = exact.reverse_distribution(model, process, 2)
    clean = (exact.all_sequences(4, 2) < 3).all(-1)

    def error(steps: int) -> float:
        found = exact.sample_distribution(FirstHitting(), model, torch.tensor([-1, -1]), steps)
        return (found[clean] - p).abs().sum().item()

    assert error(256) < 5e-3
    assert 1.9 < error(128) / error(256) < 2.1
    frozen = MeanModel(table.noisy, process)
    assert (exact.reverse_distribution(frozen, process, 2) - p).abs().sum() > 0.5


# Verdicts --------------------------------------------------------------------------------------------------

OURS = [
    *(("score-entropy", process) for process in ("absorbing", "uniform")),
    *(("d3pm", process) for process in ("absorbing", "uniform")),
    *((name, "absorbing") for name in ("t-dce", "lambda-dce", "any-order", "autoregressive")),
]


@pytest.mark.parametrize(("name", "process"), OURS)
def test_our_bounds_are_bounds(name: str, process: str) -> None:
    """And tight on exact scores, but for a chain of four steps."""
    result = audit.audit_objective(name, process)
    assert result.verdict == "bound"
    assert result.is_claimed
    assert result.expectations == "exact"
    assert result.smallest_margin_nats > -1e-4
    assert result.gap_nats > 0.1 if name == "d3pm" else abs(result.gap_nats) < 1e-4


def test_all_objectives_that_claim_to_be_bounds_are_audited() -> None:
    claimed = {name for name in OBJECTIVES.built_in if OBJECTIVES.load(name).is_bound}
    assert claimed == {name for name, _ in OURS}


@pytest.mark.parametrize("name", ["mean", "softmax-linear", "implicit-score-entropy", "concrete-score"])
def test_objectives_that_are_no_bounds_are_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "audit_models", exact_scores_only)
    result = audit.audit_objective(name)
    assert result.verdict == "not a bound"
    assert not result.is_claimed
    found = result.counter_example
    assert found is not None
    assert found.expected_loss - found.entropy == pytest.approx(found.difference)
    assert found.difference < -0.3
    assert found.entropy == pytest.approx(-sum(p * math.log(p) for p in found.distribution.values()))


def exact_scores_only(process: str) -> list[object]:
    return [model for model in audit_models(process) if model.distribution is not None]


def test_a_substituted_model_has_another_likelihood_and_no_other_flaw() -> None:
    """λ-DCE at a fixed σ bounds some likelihood, so the entropy refutes nothing; the model's own does."""

    def at_one_noise_level(model: MeanModel, x_0: torch.Tensor, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        log_p = model.log_mean(x_t, torch.ones_like(t)).gather(-1, x_0[..., None]).squeeze(-1)
        return -torch.where(x_t != x_0, log_p, 0).sum(-1) / t

    assert audit.audit_function(at_one_noise_level, entropy_only=True).is_bound
    assert not audit.audit_function(at_one_noise_level).is_bound


def test_the_least_margin_is_that_of_the_kraft_sum() -> None:
    """E_q ℓ − H(q) ≥ −log Σ e^−ℓ for every q, with equality at q ∝ e^−ℓ."""
    generator = torch.Generator().manual_seed(0)
    nats = 3 * torch.rand(9, generator=generator, dtype=torch.float64)
    subject = next(audit_models("absorbing"))
    expected = losses.Expected(nats, torch.zeros(9).double(), nats, is_exact=True)
    least = audit._least_margin(subject, losses.FULL_NOISE, expected, None)[0].difference
    assert least == pytest.approx(-torch.logsumexp(-nats, 0).item(), abs=1e-12)
    for _ in range(50):
        q = torch.rand(9, generator=generator, dtype=torch.float64) ** 3
        q = q / q.sum()
        assert (q * nats).sum() + (q * q.log()).sum() >= least


@pytest.mark.parametrize("has_prior", [True, False])
def test_a_function_that_takes_the_schedule_must_have_the_prior_term(
    has_prior: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts with the schedule that leaves half of the tokens clean, and hardly with the one of full noise."""
    monkeypatch.setattr(audit, "audit_models", exact_scores_only)

    def loss(
        model: exact.Score,
        x_0: torch.Tensor,
        x_t: torch.Tensor,
        t: torch.Tensor,
        process: Process,
        schedule: Schedule,
    ) -> torch.Tensor:
        sigma, rate = schedule(t)
        diffusion = rate * process.score_entropy(model(x_t, sigma), x_t, x_0, sigma).sum(-1)
        prior = process.prior_kl(x_0, schedule.sigma(torch.ones_like(t))).sum(-1)
        return diffusion + prior if has_prior else diffusion

    result = audit.audit_function(loss)
    assert result.is_bound == has_prior
    if not has_prior:
        assert result.counter_example is not None
        assert result.counter_example.schedule == str(LogLinear(eps=0.5))


# Random draws ----------------------------------------------------------------------------------------------


def drawn_cross_entropy(factor: float) -> Callable[..., torch.Tensor]:
    """Return λ-DCE with its own noise, times ``factor``."""

    def loss(model: MeanModel, x_0: torch.Tensor, process: Process, generator: torch.Generator) -> torch.Tensor:
        u = torch.rand(len(x_0), generator=generator, dtype=torch.float64)
        t = u**2
        x_t = process.corrupt(x_0, -torch.log1p(-t), generator)
        log_p = model.log_mean(x_t, -torch.log1p(-t)).gather(-1, x_0[..., None]).squeeze(-1)
        return -factor * torch.where(x_t != x_0, log_p, 0).sum(-1) / t * 2 * u

    return loss


def test_random_draws_refute_what_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """False alarms of the bound: 1e-6 if means are normal. 0.8 of it is 6 standard errors or more below."""
    monkeypatch.setattr(audit, "audit_models", exact_scores_only)
    right, wrong = (audit.audit_function(drawn_cross_entropy(factor), draws=2000) for factor in (1.0, 0.8))
    assert right.verdict == "bound"
    assert right.expectations == "random draws"
    assert right.smallest_margin_nats < 0  # noise alone, which is no counter-example
    found = wrong.counter_example
    assert found is not None
    assert found.difference < -5 * found.stderr < 0


# Mutants of ours -------------------------------------------------------------------------------------------


def without_prior(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Absorbing, "prior_kl", lambda self, x_0, sigma: torch.zeros_like(x_0 * sigma[:, None]))


def without_reconstruction(patch: pytest.MonkeyPatch) -> None:
    table = losses.denoising_table
    patch.setattr(losses, "denoising_table", lambda *arguments: torch.ones_like(table(*arguments)))


def with_a_smaller_weight(patch: pytest.MonkeyPatch) -> None:
    weighted = objectives.weighted
    patch.setattr(objectives, "weighted", lambda weight, loss: 0.95 * weighted(weight, loss))


def without_constant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("sedd.divergence.score_entropy", NoConstant())


def from_a_later_time(patch: pytest.MonkeyPatch) -> None:
    noise = losses._by_schedule

    def late(*arguments: object) -> losses._Noise:
        every = noise(*arguments)
        return every._replace(weight=torch.where(every.t > 0.02, every.weight, 0))

    patch.setattr(losses, "_by_schedule", late)


MUTANTS = [without_prior, without_reconstruction, with_a_smaller_weight, without_constant, from_a_later_time]


@pytest.mark.parametrize("mutate", [None, *MUTANTS], ids=lambda mutant: getattr(mutant, "__name__", "none"))
def test_mutants_of_our_bound_are_refuted(
    mutate: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "audit_models", exact_scores_only)
    if mutate is not None:
        mutate(monkeypatch)
    assert audit.audit_objective("score-entropy").is_bound == (mutate is None)
