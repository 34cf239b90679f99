"""Ladder step 0 for the guide's `DenseProcess`: with the rates of a closed-form process it equals that process.

With rates that have no closed form, its bound at the exact score is the entropy.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import definitions
import pytest
import torch
from dense_process import DenseProcess
from toys import KINDS, expected_loss, random_distribution, random_model, tensor

from sedd import divergence, exact, reverse
from sedd.exact import Distribution
from sedd.likelihood.estimators import BoundEstimator
from sedd.objectives import DenoisingScoreEntropy
from sedd.parameterization import MeanModel
from sedd.process import Process, Uniform, at_token
from sedd.reverse import analytic_weights, denoised_probs
from sedd.schedule import Geometric, LogLinear, Schedule, Times

N = 4
SIGMAS = [1e-4, 0.01, 0.03, 0.4, 2.0, 6.0]


@final
@dataclass(frozen=True)
class Dense(DenseProcess):
    """The rates of another process, and nothing else of it."""

    like: Process

    def rate(self, y: torch.Tensor, x: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return self.like.rate(y, x, dtype)


@dataclass(frozen=True)
class BiasedWalk(DenseProcess):
    """A walk to the neighbouring token, upwards at rate 1 and downwards at rate ½: ergodic, and Q is not symmetric."""

    def rate(self, y: torch.Tensor, x: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        up, down = (x < self.vocab_size - 1).to(dtype), (x > 0).to(dtype) / 2
        return (y == x + 1).to(dtype) * up + (y == x - 1).to(dtype) * down - (y == x).to(dtype) * (up + down)


@final
@dataclass(frozen=True)
class Transposed(BiasedWalk):
    """The mutant: transitions by Qᵀ, the row convention."""

    @cached_property
    def rates(self) -> torch.Tensor:
        return self.rate_matrix().T


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.fixture(params=[kind(N) for kind in KINDS], ids=str)
def process(request: pytest.FixtureRequest) -> Process:
    return request.param


def possible_pairs(process: Process, sigma: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every x_t that noise leads into, in a sequence of one token, with every x_0; and σ of each."""
    x_t, x_0 = (x.reshape(-1, 1) for x in torch.meshgrid(*map(torch.arange, (process.num_states, N)), indexing="ij"))
    noisy = process.is_noisy(x_t).squeeze(-1)
    return x_t[noisy], x_0[noisy], tensor(sigma).expand(int(noisy.sum()))


def random_log_probs(count: int, states: int) -> torch.Tensor:
    x = torch.randn(count, 1, states, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x.log_softmax(-1)


@pytest.mark.parametrize("sigma", [0.0, *SIGMAS])
def test_transitions_are_the_closed_form(process: Process, sigma: float) -> None:
    dense = Dense(N, process, mask_share=process.mask_share)
    close(dense.transition_matrix(tensor(sigma)), process.transition_matrix(tensor(sigma)))
    assert torch.equal(dense.rate_matrix(), process.rate_matrix())


@pytest.mark.parametrize("sigma", SIGMAS)
def test_ratios_and_scores_are_the_closed_form(process: Process, sigma: float) -> None:
    """A denoiser that is certain of x_0 has the denoising ratios as its score; another one their mean."""
    dense, (x_t, x_0, noise) = Dense(N, process, mask_share=process.mask_share), possible_pairs(process, sigma)
    certain = torch.nn.functional.one_hot(x_0, N).double().log()
    ratio, found = process.ratios(x_t, x_0, noise), dense.mean_score(certain, x_t, noise)
    changed = (x_t != x_0).squeeze(-1)
    close(at_token(found, x_0)[changed], ratio.log_data[changed])
    for log_mean in (certain, random_log_probs(len(x_t), N)):
        close(dense.mean_score(log_mean, x_t, noise).exp(), process.mean_score(log_mean, x_t, noise).exp())


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("kind", [divergence.score_entropy, divergence.square], ids=["score entropy", "square"])
def test_denoising_losses_are_the_closed_form(process: Process, kind: divergence.Divergence, sigma: float) -> None:
    """Value and gradient at every x_t that noise leads into; the loss of all others is 0."""
    dense, (x_t, x_0, noise) = Dense(N, process, mask_share=process.mask_share), possible_pairs(process, sigma)
    losses, gradients = [], []
    for one in (dense, process):
        log_score = random_log_probs(len(x_t), process.num_states).requires_grad_()
        losses.append(one.denoising(kind, log_score, x_t, x_0, noise))
        gradients.append(torch.autograd.grad(losses[-1].sum(), log_score)[0])
    close(losses[0], losses[1])
    close(gradients[0], gradients[1])
    if process.only_masks:
        tokens = exact.all_sequences(N, 1)
        log_score = random_log_probs(N, N + 1)
        assert (dense.denoising(kind, log_score, tokens, tokens, tensor(sigma).expand(N)) == 0).all()


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("share", [0.25, 0.9])
def test_reverse_steps_are_the_closed_form(process: Process, share: float, sigma: float) -> None:
    """Tweedie's weights, the posterior of a denoiser and its KL, and p(x_0 | x) of a score."""
    dense, (x_t, x_0, noise) = Dense(N, process, mask_share=process.mask_share), possible_pairs(process, sigma)
    log_mean, lower = random_log_probs(len(x_t), N), share * noise
    log_score = process.mean_score(log_mean, x_t, noise)
    for weights in (
        lambda one: one.staggered_score(log_score.exp(), noise - lower),
        lambda one: analytic_weights(one, log_score, x_t, noise, lower),
        lambda one: denoised_probs(one, log_score, x_t, noise),
        lambda one: one.log_posterior(log_mean, x_t, lower, noise).exp(),
        lambda one: one.posterior_kl(log_mean, x_t, x_0, lower, noise),
    ):
        close(weights(dense), weights(process))
    close(denoised_probs(dense, log_score, x_t, noise), log_mean.exp())


@pytest.mark.parametrize("sigma", SIGMAS)
def test_bayes_rule_is_the_closed_form(process: Process, sigma: float) -> None:
    """p(x_0 | x_t) ∝ P_σ(x_t, x_0)·p(x_0), the noisy distribution of p, and the score, which both determine."""
    dense, (x_t, _, noise) = Dense(N, process, mask_share=process.mask_share), possible_pairs(process, sigma)
    log_p = random_log_probs(len(x_t), N)
    posteriors = [one.add_log_likelihood(log_p, x_t, noise).log_softmax(-1) for one in (dense, process)]
    close(*posteriors)
    close(dense.log_marginal(log_p, noise), process.log_marginal(log_p, noise))
    score = process.marginal_score(log_p, x_t, noise)
    close(dense.marginal_score(log_p, x_t, noise), score)
    close(process.mean_score(posteriors[1], x_t, noise), score)
    if process == Uniform(N):
        own = posteriors[1].gather(-1, x_t[..., None]) - log_p.gather(-1, x_t[..., None])
        other = posteriors[1].gather(-1, (x_t[..., None] + 1) % N) - log_p.gather(-1, (x_t[..., None] + 1) % N)
        close((own - other)[..., 0, 0], reverse.own_log_likelihood(process, noise))


@pytest.mark.parametrize("schedule", [LogLinear(), Geometric(1e-3, 8.0)], ids=str)
def test_the_bound_is_the_closed_form(process: Process, schedule: Schedule) -> None:
    """All three terms of `BoundEstimator`; absorbing noise has a prior of its own, since π has no tokens."""
    dense, p_data = Dense(N, process, mask_share=process.mask_share), random_distribution(N, 2, 0)
    model = random_model(MeanModel, process, 2).requires_grad_(False)
    sigma, noise = schedule(tensor(0.4))
    x_t, x_0, _ = exact.pairs(p_data, process, sigma)
    times = Times(tensor(0.4).expand(len(x_t)), noise.expand(len(x_t)))
    found, expected = (
        BoundEstimator(one, schedule).nats(model, x_0, x_t, x_t, *times, torch.ones_like(x_0, dtype=torch.bool))
        for one in (dense, process)
    )
    close(found.diffusion, expected.diffusion)
    close(found.reconstruction, expected.reconstruction)
    if not process.has_mask:
        close(found.prior, expected.prior)
        close(dense.log_prior(x_t, sigma.expand(x_t.shape)), process.log_prior(x_t, sigma.expand(x_t.shape)))
    elif process.only_masks:
        assert (dense.prior_sample(torch.linspace(0.01, 0.99, 50).double()) == process.mask).all()


# A process without closed forms ----------------------------------------------------------------------------


def gap_to_entropy(process: Process, p_data: Distribution, schedule: Schedule) -> float:
    """The bound at the exact score, its integral made of the loss that trains models, less the entropy."""
    score, objective = exact.Score(p_data, process), DenoisingScoreEntropy()

    def integrand(u: torch.Tensor) -> torch.Tensor:
        return 3 * u**2 * expected_loss(objective, score, p_data, schedule, u**3)  # t = u³, as in `exact.bound`

    terms = exact.bound(score, p_data, process, schedule, true_base=True, nodes=1)
    total = exact.integrate(integrand, nodes=100) + terms.prior + terms.reconstruction
    return abs((total - p_data.entropy()).item())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("schedule", [LogLinear(), Geometric(1e-3, 8.0)], ids=str)
def test_the_bound_of_a_walk_is_the_entropy(schedule: Schedule, seed: int) -> None:
    assert gap_to_entropy(BiasedWalk(3), random_distribution(3, 2, seed), schedule) <= 2e-5


def test_transposed_rates_are_caught() -> None:
    assert gap_to_entropy(Transposed(3), random_distribution(3, 2, 0), LogLinear()) > 0.1


@pytest.mark.parametrize("sigma", [0.03, 0.7])
def test_a_walk_agrees_with_enumeration(sigma: float) -> None:
    """Noise, scores, losses and posteriors of the walk, from the definitions in `exact`."""
    process, p_data, noise = BiasedWalk(3), random_distribution(3, 2, 0), tensor(sigma)
    close(process.transition_matrix(noise), exact.transition_matrix(process, noise))
    score, x = exact.Score(p_data, process), exact.all_sequences(3, 2)
    levels = noise.expand(len(x))
    close(process.mean_score(score.log_mean(x, levels), x, levels), score(x, levels))
    close(denoised_probs(process, score(x, levels), x, levels), score.log_mean(x, levels).exp())
    model = random_model(MeanModel, process, 2).requires_grad_(False)
    loss = exact.expect(
        lambda x_t, x_0: process.score_entropy(model(x_t, noise.expand(len(x_t))), x_t, x_0, noise.expand(len(x_t)))
        .sum(-1), p_data, process, noise
    )  # fmt: skip
    close(loss, exact.objectives.denoising_score_entropy(model, p_data, process, noise))
    kl = exact.expect(
        lambda x_t, x_0: process.posterior_kl(
            model.log_mean(x_t, noise.expand(len(x_t))), x_t, x_0, noise.expand(len(x_t)) / 3, noise.expand(len(x_t))
        ).sum(-1), p_data, process, noise
    )  # fmt: skip
    close(kl, definitions.d3pm(model, p_data, process, noise / 3, noise))


def test_the_prior_of_a_walk_is_stationary() -> None:
    """π_{x+1}/π_x = 2 by detailed balance; the prior term is the largest KL of any token, and 0 in the limit."""
    process = BiasedWalk(3)
    prior = process.log_prior(torch.arange(3), torch.zeros(3, dtype=torch.float64)).exp()
    close(prior, torch.tensor([1.0, 2.0, 4.0]).double() / 7)
    sigma = tensor(0.9)
    P = exact.transition_matrix(process, sigma)
    x_0 = torch.arange(3)[:, None]
    close(process.prior_kl(x_0, sigma.expand(3))[:, 0], (P * (P / prior[:, None]).log()).sum(0))
    assert (process.prior_kl(x_0, tensor(80.0).expand(3)) < 1e-12).all()
    u = (torch.arange(7_000).double() + 0.5) / 7_000
    assert torch.equal(process.prior_sample(u).bincount(), torch.tensor([1000, 2000, 4000]))
    x_t = process.corrupt_by(torch.ones(1, 7_000, dtype=torch.long), sigma.view(1), u[None, :, None].expand(1, -1, 2))
    frequencies = x_t.flatten().bincount(minlength=3) / 7_000
    torch.testing.assert_close(frequencies.double(), P[:, 1], rtol=0, atol=3 / 7_000)
