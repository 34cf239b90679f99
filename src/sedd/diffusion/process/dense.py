"""Noise processes given by a rate matrix alone: the base class of third-party processes.  [§2]"""

import math
from abc import ABC
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NoReturn

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.diffusion import validate
from sedd.diffusion.categorical import AffineWeights
from sedd.diffusion.divergence import Divergence
from sedd.diffusion.precision import upcast
from sedd.diffusion.process.base import Process, Ratio, interpolate_log


@dataclass(frozen=True)
class DenseProcess(Process, ABC):
    """A process whose transitions, ratios and posteriors are computed from its rate matrix Q by dense linear algebra.

    A subclass defines `rate`, and `num_states` where there are states that are not tokens. Q must have one stationary
    distribution π: sampling starts from it, and it is the prior of the likelihood bound, which is finite only if π has
    no zeros. Memory grows with num_states² per noise level and time with its cube, so this is for vocabularies of at
    most a few hundred tokens.
    """

    has_closed_forms: ClassVar[bool] = False

    @property
    def num_states(self) -> int:
        """The size of the vocabulary: there is no mask."""
        return self.vocab_size

    # Transitions -------------------------------------------------------------------------------------------

    @cached_property
    def _rates(self) -> Float[Tensor, "n n"]:
        return self.rate_matrix(torch.float64)

    @cached_property
    def _stationary(self) -> Float[Tensor, " n"]:
        """π with Qπ = 0 and Σπ = 1."""
        n = self.num_states
        equations = torch.cat([self._rates, torch.ones(1, n, dtype=torch.float64)])
        target = torch.cat([torch.zeros(n, dtype=torch.float64), torch.ones(1, dtype=torch.float64)])
        solution: Tensor = torch.linalg.lstsq(equations, target[:, None]).solution
        return solution[:, 0].clamp_min(0)

    def _exponential(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b n n"]:
        """exp(σQ), computed once for each value of σ."""
        values, index = sigma.double().unique(return_inverse=True)
        return _matrix_exp(values[:, None, None] * self._rates.to(sigma.device))[index]

    def transition(
        self, y: Int[Tensor, "*#s"], x: Int[Tensor, "*#s"], sigma: Float[Tensor, "*#s"]
    ) -> Float[Tensor, "*#s"]:
        """The entry at (y, x) of exp(σQ)."""
        validate.sigma(sigma)
        values, index = sigma.double().unique(return_inverse=True)
        y, x, index = torch.broadcast_tensors(y, x, index)
        p = _matrix_exp(values[:, None, None] * self._rates.to(sigma.device))[index, y, x]
        return p.clamp(0, 1).to(sigma.dtype)

    def _likelihood(self, sigma: Tensor, x: Tensor) -> Float[Tensor, "*b L n"]:
        """P_σ(x, ·): the probability of x given each state."""
        p = self._exponential(sigma).clamp_min(0)
        return p.gather(-2, x[..., None].expand(*x.shape, self.num_states))

    # Forward: from data to noise ---------------------------------------------------------------------------

    def corrupt(
        self, x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], generator: torch.Generator
    ) -> Int[Tensor, "*b L"]:
        """Draw x_t given x_0 at total noise σ."""
        validate.sigma(sigma)
        u = torch.rand(*x_0.shape, 2, dtype=torch.float64, generator=generator, device=generator.device)
        return self.corrupt_by(x_0, sigma, u)

    def corrupt_by(
        self, x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], u: Float[Tensor, "*b L 2"]
    ) -> Int[Tensor, "*b L"]:
        """Draw x_t given x_0 by the inverse of its distribution function."""
        validate.clean_tokens(x_0, self.vocab_size)
        columns = self._exponential(sigma).transpose(-1, -2)
        p = columns.gather(-2, x_0[..., None].expand(*x_0.shape, self.num_states))
        return _inverse_cdf(p, u[..., 1])

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return self.prior_sample(torch.rand(shape, dtype=torch.float64, generator=generator, device=generator.device))

    def prior_sample(self, u: Float[Tensor, "*s"]) -> Int[Tensor, "*s"]:
        """Draw from the stationary distribution by the inverse of its distribution function."""
        return _inverse_cdf(self._stationary.to(u.device).expand(*u.shape, -1), u)

    def log_prior(self, x: Int[Tensor, "*#s"], sigma: Float[Tensor, "*#s"]) -> Float[Tensor, "*#s"]:
        """log π(x)."""
        validate.states(x, self.num_states)
        validate.sigma(sigma)
        return self._stationary.log().to(sigma)[x] + torch.zeros_like(sigma)

    def prior_kl(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """The largest KL(P_σ(·|x_0) ‖ π) of any token x_0, so that the sum of the terms is an upper bound.  [§8]"""
        validate.sigma(sigma)
        p = self._exponential(sigma).clamp_min(0)[..., : self.vocab_size]
        prior = self._stationary.to(p)[:, None]
        return (torch.xlogy(p, p) - torch.xlogy(p, prior)).sum(-2).amax(-1).to(sigma.dtype)

    # Scores and ratios -------------------------------------------------------------------------------------

    def is_noisy(self, x_t: Int[Tensor, "*s"]) -> Bool[Tensor, "*s"]:
        """Return True everywhere: noise may have changed any token."""
        return torch.ones_like(x_t, dtype=torch.bool)

    def log_score_shift(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """0: the network's output is the log-score."""
        return torch.zeros_like(sigma)

    def denoising(
        self,
        divergence: Divergence,
        log_score: Float[Tensor, "*b L n"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """Σ_{y≠x_t} Q(x_t, y)·D(s_y, a_y) with the ratios a_y = P_σ(y, x_0)/P_σ(x_t, x_0) of every y.  [§4]"""
        validate.sigma(sigma)
        validate.clean_tokens(x_0, self.vocab_size)
        columns = self._exponential(sigma).clamp_min(1e-300).log().transpose(-1, -2)
        log_p = columns.gather(-2, x_0[..., None].expand(*x_0.shape, self.num_states))
        log_ratio = log_p - log_p.gather(-1, x_t[..., None])
        log_score = upcast(log_score)
        return self.explicit(divergence, log_score, log_ratio.to(log_score.dtype), x_t)

    def add_log_likelihood(
        self, logits: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L N"]:
        """Add log P_σ(x_t, x_0)."""
        self._check_mean(logits, x_t)
        validate.sigma(sigma)
        likelihood = self._likelihood(sigma, x_t)[..., : self.vocab_size].clamp_min(1e-300)
        return logits + likelihood.log().to(logits.dtype)

    def log_marginal(self, log_p: Float[Tensor, "*b L N"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """log Σ_{x_0} P_σ(y, x_0)·p(x_0)."""
        validate.sigma(sigma)
        columns = self._exponential(sigma)[..., : self.vocab_size].clamp_min(0).transpose(-1, -2)
        return (log_p.double().exp() @ columns).clamp_min(1e-300).log().to(log_p.dtype)

    def mean_score(
        self, log_mean: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """s_y = Σ_{x_0} P_σ(y, x_0)·p(x_0 | x_t)/P_σ(x_t, x_0).  [§5]"""
        self._check_mean(log_mean, x_t)
        validate.sigma(sigma)
        weight = self._weight(log_mean, x_t, sigma)
        score = weight @ self._exponential(sigma)[..., : self.vocab_size].clamp_min(0).transpose(-1, -2)
        log_score = score.clamp_min(1e-300).log().to(log_mean.dtype)
        return log_score.scatter(-1, x_t[..., None], 0)

    def marginal_score(
        self, log_p: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """s_y = p_σ(y)/p_σ(x_t)."""
        self._check_mean(log_p, x_t)
        log_marginal = self.log_marginal(log_p, sigma)
        return log_marginal - log_marginal.gather(-1, x_t[..., None])

    def _weight(self, log_mean: Tensor, x_t: Tensor, sigma: Tensor) -> Float[Tensor, "*b L N"]:
        """p(x_0 | x_t)/P_σ(x_t, x_0)."""
        return log_mean.double().exp() / self._likelihood(sigma, x_t)[..., : self.vocab_size].clamp_min(1e-300)

    def rescore(
        self,
        log_score: Float[Tensor, "*b L n"],
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L n"]:
        """Return the score of the denoiser, which determines all of it."""
        return self.mean_score(log_mean, x_t, sigma)

    def mix_log_scores(
        self, free: Float[Tensor, "*s n"], given: Float[Tensor, "*s n"], weight: float
    ) -> Float[Tensor, "*s n"]:
        """The score of p_t(x)^(1−γ)·p_t(x | label)^γ."""
        return interpolate_log(free, given, weight)

    def staggered_score(self, score: Float[Tensor, "*b L n"], dsigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """exp(−Δσ Q) s; of a long step it is ill-conditioned, so prefer denoisers and ancestral sampling."""
        validate.sigma(dsigma)
        return (score.double() @ self._exponential(-dsigma).transpose(-1, -2)).to(score.dtype)

    def amplifies_rounding(self, dsigma: Float[Tensor, "*s"]) -> bool:
        """True: exp(−Δσ Q) has large entries of both signs."""
        return True

    def log_posterior(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L n"]:
        """log P_Δ(x_t, y) + log Σ_{x_0} P_s(y, x_0)·p(x_0 | x_t)/P_t(x_t, x_0).  [§6]"""
        self._check_mean(log_mean, x_t)
        validate.decreasing_sigma(sigma_s, sigma_t)
        weight = self._weight(log_mean, x_t, sigma_t)
        down = weight @ self._exponential(sigma_s)[..., : self.vocab_size].clamp_min(0).transpose(-1, -2)
        step = self._likelihood(sigma_t - sigma_s, x_t)
        return (step.log() + down.log()).to(log_mean.dtype)

    def posterior_kl(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """Σ_y q(y | x_t, x_0)·log(q(y | x_t, x_0)/p(y | x_t)).  [§6]"""
        validate.clean_tokens(x_0, self.vocab_size)
        certain = torch.nn.functional.one_hot(x_0, self.vocab_size).to(log_mean.dtype).log()
        log_q = self.log_posterior(certain, x_t, sigma_s, sigma_t)
        log_p = self.log_posterior(log_mean, x_t, sigma_s, sigma_t)
        return torch.where(log_q.isneginf(), 0, log_q.exp() * (log_q - log_p)).sum(-1)

    # Closed forms that a dense process does not have -------------------------------------------------------

    def ratios(self, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Ratio:
        """Raise ValueError: the ratios take more than two values."""
        self._raise_no_closed_form()

    @property
    def incoming_rate(self) -> float:
        """Raise ValueError: the rates into a state differ."""
        self._raise_no_closed_form()

    def own_log_likelihood(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Raise ValueError: it differs between tokens."""
        self._raise_no_closed_form()

    def tweedie_weights(self, dsigma: Float[Tensor, "*s"]) -> AffineWeights:
        """Raise ValueError: the weights are not affine in the score."""
        self._raise_no_closed_form()

    def denoising_weights(self, sigma: Float[Tensor, "*s"]) -> AffineWeights:
        """Raise ValueError: the weights are not affine in the score."""
        self._raise_no_closed_form()

    def posterior_weights(self, sigma_s: Float[Tensor, "*s"], sigma_t: Float[Tensor, "*s"]) -> AffineWeights:
        """Raise ValueError: the weights are not affine in the score."""
        self._raise_no_closed_form()

    def _raise_no_closed_form(self) -> NoReturn:
        raise ValueError(
            f"this sampler or objective needs the closed forms of absorbing or uniform noise; {type(self).__name__} "
            "has none, being given by its rate matrix: use ancestral or tweedie, and score-entropy, mean or d3pm"
        )


def _matrix_exp(A: Float[Tensor, "b n n"]) -> Float[Tensor, "b n n"]:
    """exp(A) by uniformization, e^−λ·exp(A + λI) with λ the largest rate of leaving a state, and repeated squaring.

    If A is a rate matrix, no term is below 0, so small probabilities have full relative precision, which their ratios
    need. `torch.matrix_exp` has an absolute error of 2e-12 where the norm of A is near 0.03.
    """
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    shift = (-A.diagonal(dim1=-2, dim2=-1)).amax(-1).clamp_min(0)[:, None, None]  # 0 for exp(−σQ)
    A = A + shift * eye
    norm = A.abs().sum(-2).amax().item()
    halvings = max(0, math.ceil(math.log2(norm)) + 1) if norm > 0 else 0
    A = A / 2**halvings  # norm ≤ ½: 14 terms leave ½^15/15! < 1e-16
    total = eye.expand_as(A)
    for n in range(14, 0, -1):
        total = eye + A @ total / n
    total = total * torch.exp(-shift / 2**halvings)
    for _ in range(halvings):
        total = total @ total
    return total


def _inverse_cdf(p: Float[Tensor, "*s n"], u: Float[Tensor, "*s"]) -> Int[Tensor, "*s"]:
    """Return the first state at which the cumulative probability exceeds u times the total."""
    total = p.clamp_min(0).cumsum(-1)
    return (total <= u[..., None] * total[..., -1:]).sum(-1).clamp_max(p.shape[-1] - 1)
