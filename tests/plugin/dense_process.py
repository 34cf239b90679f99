"""Noise that is given by its rate matrix, for at most a few hundred tokens."""

import math
from abc import ABC
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sedd import draws
from sedd.divergence import Divergence
from sedd.process import Process, at_token


@dataclass(frozen=True)
class DenseProcess(Process, ABC):
    """A process whose subclass writes `rate`: the rest is linear algebra on Q.

    It replaces every closed form of `Process`. Q must have one stationary distribution.
    Sampling starts from it, and it is the prior of the bound, which is finite only if
    no probability is 0.
    """

    @cached_property
    def rates(self) -> Tensor:
        """Q."""
        return self.rate_matrix()

    @cached_property
    def stationary(self) -> Tensor:
        """π with Qπ = 0 and Σπ = 1."""
        ones = torch.ones(1, self.num_states, dtype=torch.float64)
        target = torch.zeros(self.num_states + 1, 1, dtype=torch.float64)
        target[-1] = 1
        equations = torch.cat([self.rates, ones])
        return torch.linalg.lstsq(equations, target).solution[:, 0].clamp_min(0)

    def exponential(self, sigma: Tensor) -> Tensor:
        """exp(σQ), computed once for each value of σ."""
        values, index = sigma.double().unique(return_inverse=True)
        return matrix_exp(values[:, None, None] * self.rates.to(sigma.device))[index]

    def transition(self, y: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        """The entry at (y, x) of exp(σQ)."""
        values, index = sigma.double().unique(return_inverse=True)
        y, x, index = torch.broadcast_tensors(y, x, index)
        P = self.exponential(values)
        return P[index, y, x].clamp(0, 1).to(sigma.dtype)

    def columns(self, x_0: Tensor, sigma: Tensor) -> Tensor:
        """P_σ(y, x_0) of every y."""
        levels = sigma.double()[..., None, None]
        return self.transition(self._states(x_0.device), x_0[..., None], levels)

    def incoming_rates(self, x: Tensor) -> Tensor:
        """The row Q(x, ·)."""
        return self.rate(x[..., None], self._states(x.device))

    def corrupt(self, x_0: Tensor, sigma: Tensor, generator: torch.Generator) -> Tensor:
        """Draw x_t."""
        u = draws.uniforms((*x_0.shape, 2), generator)
        return self.corrupt_by(x_0, sigma, u)

    def corrupt_by(self, x_0: Tensor, sigma: Tensor, u: Tensor) -> Tensor:
        """Invert the distribution function of the column of x_0."""
        return inverse_cdf(self.columns(x_0, sigma), u[..., 1])

    def prior_sample(self, u: Tensor) -> Tensor:
        """Draw from the stationary distribution."""
        return inverse_cdf(self.stationary.to(u.device).expand(*u.shape, -1), u)

    def log_prior(self, x: Tensor, sigma: Tensor) -> Tensor:
        """log π(x)."""
        return self.stationary.log().to(sigma)[x] + torch.zeros_like(sigma)

    def prior_kl(self, x_0: Tensor, sigma: Tensor) -> Tensor:
        """KL(P_σ(·|x_0) ‖ π)."""
        p = self.columns(x_0, sigma)
        terms = torch.xlogy(p, p) - torch.xlogy(p, self.stationary.to(p))
        return terms.sum(-1).to(sigma.dtype)

    def denoising(self, divergence: Divergence, log_score: Tensor, x_t: Tensor, x_0: Tensor, sigma: Tensor) -> Tensor:
        """Σ_{y≠x_t} Q(x_t, y)·D(s_y, P_σ(y, x_0)/P_σ(x_t, x_0))."""
        log_p = self.columns(x_0, sigma).clamp_min(1e-300).log()
        log_ratio = (log_p - at_token(log_p, x_t)[..., None]).to(log_score.dtype)
        rates = self.incoming_rates(x_t).scatter(-1, x_t[..., None], 0)
        terms = rates.to(log_score.dtype) * divergence(log_score, log_ratio)
        return torch.where(rates > 0, terms, 0).sum(-1)

    def base_log_score(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        """log π(y) − log π(x_t)."""
        log_prior = self.log_prior(self._states(x_t.device), sigma[..., None])
        return log_prior[..., None, :] - log_prior.gather(-1, x_t)[..., None]

    def add_log_likelihood(self, logits: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
        """Add log P_σ(x_t, x_0)."""
        tokens = self._states(logits.device)[: self.vocab_size]
        levels = sigma.double()[..., None, None]
        p = self.transition(x_t[..., None], tokens, levels)
        return logits + p.clamp_min(1e-300).log().to(logits.dtype)

    def log_marginal(self, log_p: Tensor, sigma: Tensor) -> Tensor:
        """log Σ_{x_0} P_σ(y, x_0)·p(x_0)."""
        columns = self.exponential(sigma)[..., : self.vocab_size].clamp_min(0)
        p = log_p.double().exp() @ columns.transpose(-1, -2)
        return p.clamp_min(1e-300).log().to(log_p.dtype)

    def marginal_score(self, log_p: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
        """log p_σ(y) − log p_σ(x_t)."""
        log_marginal = self.log_marginal(log_p, sigma)
        return log_marginal - at_token(log_marginal, x_t)[..., None]

    def staggered_score(self, score: Tensor, dsigma: Tensor) -> Tensor:
        """exp(−Δσ Q) s: ill-conditioned for long steps, so prefer denoisers."""
        back = self.exponential(-dsigma).transpose(-1, -2)
        return (score.double() @ back).to(score.dtype)


def matrix_exp(A: Tensor) -> Tensor:
    """exp(A) by uniformization, e^−λ·exp(A + λI), and repeated squaring.

    With λ the largest rate of leaving a state no term is below 0, so that small
    probabilities keep their digits, which ratios of them need.
    """
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    shift = (-A.diagonal(dim1=-2, dim2=-1)).amax(-1).clamp_min(0)[:, None, None]
    A = A + shift * eye
    norm = A.abs().sum(-2).amax().item()
    halvings = max(0, math.ceil(math.log2(norm)) + 1) if norm > 0 else 0
    A, shift = A / 2**halvings, shift / 2**halvings
    total = eye.expand_as(A)
    for n in range(14, 0, -1):  # norm ≤ ½: 14 terms leave ½^15/15! < 1e-16
        total = eye + A @ total / n
    total = total * torch.exp(-shift)
    for _ in range(halvings):
        total = total @ total
    return total


def inverse_cdf(p: Tensor, u: Tensor) -> Tensor:
    """Return the first state at which the cumulative probability exceeds u."""
    total = p.clamp_min(0).cumsum(-1)
    above = total <= u[..., None] * total[..., -1:]
    return above.sum(-1).clamp_max(p.shape[-1] - 1)
