"""§7.5 and §8: with the exact score the bound is the entropy, and mutants of the loss are caught by it."""

import math

import definitions
import pytest
import torch
from toys import (
    KINDS,
    Kind,
    expected_loss,
    frequency,
    hybrid,
    masks_and_frequency,
    random_distribution,
    random_model,
    tensor,
)

from sedd import exact
from sedd.divergence import Divergence, score_entropy
from sedd.exact import Distribution
from sedd.objectives import DenoisingScoreEntropy
from sedd.parameterization import ConditionalModel, MeanModel, ScoreModel, SignedScoreModel
from sedd.process import Absorbing, Process, Ratio, Uniform
from sedd.schedule import Cosine, Geometric, LogLinear, Polynomial, Schedule

DISTRIBUTIONS = [(length, seed) for length in (3, 4) for seed in range(3)]


def bound_of_training_code(
    distribution: Distribution, process: Process, schedule: Schedule, nodes: int
) -> torch.Tensor:
    """The bound at the exact score, its integral made of the loss that trains models."""
    score, objective = exact.Score(distribution, process), DenoisingScoreEntropy()
    diffusion = exact.integrate(lambda t: expected_loss(objective, score, distribution, schedule, t), nodes=nodes)
    terms = exact.bound(score, distribution, process, schedule, true_base=True, nodes=1)
    return diffusion + terms.prior + terms.reconstruction


@pytest.mark.parametrize(("length", "seed"), DISTRIBUTIONS)
@pytest.mark.parametrize(
    ("schedule", "nodes"), [(LogLinear(), 16), (LogLinear(0.1), 16), (Cosine(), 48), (Polynomial(), 24)], ids=str
)
def test_absorbing_bound_is_the_entropy(schedule: Schedule, nodes: int, length: int, seed: int) -> None:
    distribution, process = random_distribution(3, length, seed), Absorbing(3)
    assert abs(bound_of_training_code(distribution, process, schedule, nodes) - distribution.entropy()) <= 1e-10
    terms = exact.bound(
        exact.Score(distribution, process), distribution, process, schedule, true_base=True, nodes=nodes
    )
    assert terms.reconstruction == 0
    assert abs(terms.total - distribution.entropy()) <= 1e-10


@pytest.mark.parametrize(("length", "seed"), DISTRIBUTIONS)
@pytest.mark.parametrize("schedule", [Geometric(), LogLinear()], ids=str)
def test_uniform_bound_is_the_entropy(schedule: Schedule, length: int, seed: int) -> None:
    distribution, process = random_distribution(3, length, seed), Uniform(3)
    assert abs(bound_of_training_code(distribution, process, schedule, nodes=200) - distribution.entropy()) <= 1e-4


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("schedule", [Geometric(), LogLinear()], ids=str)
@pytest.mark.parametrize("kind", [hybrid, frequency, masks_and_frequency])
def test_the_bound_under_mixed_noise_is_the_entropy(kind: Kind, schedule: Schedule, seed: int) -> None:
    distribution, process = random_distribution(3, 2, seed), kind(3)
    assert abs(bound_of_training_code(distribution, process, schedule, nodes=200) - distribution.entropy()) <= 1e-4


def test_reconstruction_is_needed() -> None:
    """Geometric starts at noise 1e-4, where a token in ten thousand is unknown: 0.002 nats of 3."""
    distribution, process = random_distribution(3, 3, 0), Uniform(3)
    terms = exact.bound(
        exact.Score(distribution, process), distribution, process, Geometric(), true_base=True, nodes=200
    )
    assert abs(terms.total - distribution.entropy()) <= 1e-4
    assert terms.reconstruction > 1e-3


@pytest.mark.parametrize("t_min", [0.01, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_starting_late_costs_what_one_factorised_step_costs(kind: Kind, t_min: float) -> None:
    """From t_min > 0 the bound stays a bound; its excess is the dependence that one step to 0 ignores."""
    distribution, process = random_distribution(3, 3, 0), kind(3)
    terms = exact.bound(
        exact.Score(distribution, process), distribution, process, LogLinear(), t_min=t_min, true_base=True, nodes=100
    )
    excess = terms.total - distribution.entropy()
    assert 0 < excess < 10 * t_min**2


@pytest.mark.parametrize(("length", "seed"), DISTRIBUTIONS)
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [(Absorbing, LogLinear(0.01)), *((kind, Geometric(1e-4, 2.0)) for kind in (Uniform, hybrid, frequency))],
)
def test_the_practical_base_costs_its_divergence(kind: Kind, schedule: Schedule, length: int, seed: int) -> None:
    distribution, process = random_distribution(3, length, seed), kind(3)
    true, base = (
        exact.bound(exact.Score(distribution, process), distribution, process, schedule, true_base=wanted, nodes=4)
        for wanted in (True, False)
    )
    sigma = schedule.sigma(tensor(1.0))
    p_1 = distribution.at(process, sigma)
    log_base = process.log_prior(exact.all_sequences(process.num_states, length), sigma).sum(-1)
    assert abs(log_base.exp().sum() - 1) < 1e-12
    excess = (p_1 * (p_1.log() - log_base)).sum()
    torch.testing.assert_close(base.total - true.total, excess, rtol=0, atol=1e-12)
    of_token = process.prior_kl(distribution.sequences, sigma.expand(3**length))
    torch.testing.assert_close(base.prior, (distribution.probabilities * of_token.sum(-1)).sum(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("wrapper", [ScoreModel, MeanModel])
@pytest.mark.parametrize(("kind", "schedule"), [(Absorbing, LogLinear()), (Uniform, Geometric())])
def test_a_wrong_model_has_a_worse_bound(kind: Kind, schedule: Schedule, wrapper: type) -> None:
    distribution, process = random_distribution(3, 3, 0), kind(3)
    terms = exact.bound(random_model(wrapper, process, 3), distribution, process, schedule, nodes=60)
    assert terms.total > distribution.entropy() + 0.1


@pytest.mark.parametrize("schedule", [LogLinear(), Geometric()], ids=str)
@pytest.mark.parametrize("kind", [Absorbing, Uniform, hybrid])
@pytest.mark.parametrize("wrapper", [ScoreModel, MeanModel, ConditionalModel])
def test_a_network_of_zeros_has_the_bound_of_uniform_tokens(wrapper: type, kind: Kind, schedule: Schedule) -> None:
    """log N per token, whatever the data: an untrained network is never worse than a guess."""
    distribution, process = random_distribution(3, 2, 0), kind(3)
    zeros = wrapper(exact.Table(process.num_states, 2).requires_grad_(False), process)
    total = exact.bound(zeros, distribution, process, schedule, nodes=150).total
    torch.testing.assert_close(total, tensor(2 * math.log(3)), rtol=0, atol=1e-3)


@pytest.mark.parametrize("wrapper", [ScoreModel, SignedScoreModel])
@pytest.mark.parametrize("kind", [frequency, masks_and_frequency])
def test_a_score_network_of_zeros_under_noise_by_frequency_is_a_unigram_model(kind: Kind, wrapper: type) -> None:
    """Its bound is the cross-entropy of the data and the frequencies of the noise."""
    distribution, process = random_distribution(3, 2, 0), kind(3)
    zeros = wrapper(exact.Table(process.num_states, 2).requires_grad_(False), process)
    total = exact.bound(zeros, distribution, process, LogLinear(), nodes=150).total
    unigram = torch.tensor(process.frequencies).double().log()[distribution.sequences].sum(-1)
    torch.testing.assert_close(total, -(distribution.probabilities * unigram).sum(), rtol=0, atol=1e-3)


def test_a_denoiser_without_the_likelihood_of_its_token_is_far_worse_than_a_guess() -> None:
    """A test of the test above: p(x_0 | x_t) = softmax(z) does not contain that little noise leaves most tokens."""
    distribution, process = random_distribution(3, 2, 0), Uniform(3)
    model = lambda x, sigma: process.mean_score(torch.zeros(*x.shape, 3).double().log_softmax(-1), x, sigma)  # noqa: E731
    assert exact.bound(model, distribution, process, Geometric(), nodes=150).total > 2 * math.log(3) + 5


@pytest.mark.parametrize("kind", KINDS)
def test_distributions_with_sequences_that_never_happen(kind: Kind) -> None:
    distribution, process, schedule = Distribution(torch.eye(2).double() / 2), kind(2), LogLinear()
    score = exact.Score(distribution, process)
    true = exact.bound(score, distribution, process, schedule, true_base=True, nodes=150)
    torch.testing.assert_close(true.total, distribution.entropy(), rtol=0, atol=1e-4)
    sigma = tensor(0.4)
    for define in (definitions.implicit_score_entropy, definitions.explicit_score_entropy, definitions.ratio_matching):
        assert define(score, distribution, process, sigma).isfinite()


def test_a_score_that_undoes_too_much_has_an_infinite_reconstruction() -> None:
    """A wrong score may imply negative probabilities; such tokens are never drawn, so the bound is not finite."""
    distribution, process = random_distribution(3, 2, 0), Uniform(3)
    low = lambda x, sigma: torch.full((*x.shape, 3), -12.0).double().scatter(-1, x[..., None], 0)  # noqa: E731
    assert exact.bound(low, distribution, process, Geometric(), nodes=4).reconstruction == torch.inf


# Tests of the test: the bound must reveal each of these mistakes, which have been made in practice.


class NoConstant(Divergence):
    def value(self, log_s: torch.Tensor, log_a: torch.Tensor | None) -> torch.Tensor:
        return log_s.exp() if log_a is None else log_s.exp() - log_a.exp() * log_s

    def slope(self, log_s: torch.Tensor, log_a: torch.Tensor | None) -> torch.Tensor:
        return score_entropy.slope(log_s, log_a)


def inverted(ratios: object) -> object:
    def mutant(self: Process, x_t: torch.Tensor, x_0: torch.Tensor, sigma: torch.Tensor) -> Ratio:
        ratio = ratios(self, x_t, x_0, sigma)
        return Ratio(-ratio.log_data, None if ratio.log_rest is None else -ratio.log_rest)

    return mutant


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [(Absorbing, LogLinear()), *((kind, Geometric()) for kind in (Uniform, hybrid, frequency))],
)
@pytest.mark.parametrize("mutant", ["none", "constant dropped", "ratio inverted", "Q transposed", "sigma for rate"])
def test_mutants_are_caught(kind: Kind, schedule: Schedule, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant == "constant dropped":
        monkeypatch.setattr("sedd.divergence.score_entropy", NoConstant())
    if mutant == "ratio inverted":
        monkeypatch.setattr(Process, "ratios", inverted(Process.ratios))
    if mutant == "Q transposed" and kind is Uniform:
        return  # Q is symmetric: not a mistake there
    if mutant == "Q transposed" and kind is Absorbing:  # tokens, not masks, would move backwards
        is_noisy = kind.is_noisy
        monkeypatch.setattr(kind, "is_noisy", lambda self, x_t: ~is_noisy(self, x_t))
    elif mutant == "Q transposed":  # the rate into x_t would not be the share of x_t, but of the others together
        pi = Process._pi
        monkeypatch.setattr(Process, "_pi", lambda self, y: (1 - pi(self, y)) / (self.num_states - 1))
    if mutant == "sigma for rate":
        monkeypatch.setattr(type(schedule), "rate", type(schedule).sigma)
    distribution = random_distribution(3, 3, 0)
    gap = abs(bound_of_training_code(distribution, kind(3), schedule, nodes=100) - distribution.entropy())
    if mutant == "none":
        assert gap <= 1e-4
    else:
        assert gap > 0.1
