"""The likelihood bound and the expected value of objectives, as sums over all data and noise.  [§4, §6, §8]"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from sedd.divergence import Divergence, score_entropy, square
from sedd.exact.distribution import (
    Distribution,
    Scalar,
    Score,
    all_sequences,
    expect,
    index_of,
    pairs,
    transition_matrix,
)
from sedd.likelihood.estimators import BoundTerms
from sedd.objectives import Integral, Objective, weighted
from sedd.process import Process, at_token
from sedd.schedule import Schedule
from sedd.tensors import PerPosition, PerSequence, Tokens


def expected_loss(objective: Objective, model: Any, p_data: Distribution, t: Scalar) -> Scalar:
    """Return the expected loss of the training code at time t, in nats per sequence; noise is the model's."""

    def loss(x_t: Tensor, x_0: Tensor) -> Tensor:
        return objective.loss(model, x_t, x_0, t.expand(len(x_t))).sum(-1)

    return expect(loss, p_data, model.process, objective.sigma(model, t))


def denoising_score_entropy(model: Any, p_data: Distribution, process: Process, sigma: Scalar) -> Scalar:
    """E Σ_i Σ_{y≠x_i} Q(x_i, y)·[s_y − a_y log s_y + K(a_y)], a_y = P_σ(y, x_0)/P_σ(x_t, x_0), by its definition."""
    x_t, x_0, weight = pairs(p_data, process, sigma)
    x, P, Q = all_sequences(process.num_states, p_data.length), transition_matrix(process, sigma), process.rate_matrix()
    log_s = model(x, sigma.expand(len(x)))[index_of(x_t, process.num_states)]
    a = P[:, x_0].permute(1, 2, 0) / P[x_t, x_0][..., None]
    rates = (Q - Q.diagonal().diag())[x_t]
    each = log_s.exp() - torch.where(a > 0, a * log_s, 0) + torch.xlogy(a, a) - a
    return torch.einsum("p,piy->", weight, torch.where(rates > 0, rates * each, 0))


def integrate(f: Callable[[Tensor], Tensor], lo: float = 0.0, hi: float = 1.0, nodes: int = 64) -> Tensor:
    """Return ∫ f(t) dt by Gauss–Legendre quadrature."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    t = torch.as_tensor(lo + (hi - lo) * (points + 1) / 2)
    w = torch.as_tensor((hi - lo) / 2 * weights)
    return torch.stack([a * f(x) for a, x in zip(w, t, strict=True)]).sum()


def bound(
    model: Any,
    p_data: Distribution,
    process: Process,
    schedule: Schedule,
    *,
    t_min: float = 0.0,
    true_base: bool = False,
    nodes: int = 64,
) -> BoundTerms:
    """Return the expected bound of ``model``, or `exact.Score`, on sequences of ``p_data``, in nats per sequence.

    With ``true_base`` generation starts from the true marginal at t = 1, so that the exact score's bound is the
    entropy; otherwise from the process's prior, and the excess is KL(p_1 ‖ prior).

    Args:
        t_min: The time at which the diffusion term begins; the reconstruction term is that of the noise there.
        nodes: Nodes of the quadrature over time.
    """
    ends = schedule.sigma(torch.tensor([t_min, 1.0], dtype=torch.float64))

    def integrand(u: Tensor) -> Tensor:
        noise = schedule(u**3)  # t = u³: under uniform noise the loss grows like −log t towards t = 0
        return 3 * u**2 * noise.rate * denoising_score_entropy(model, p_data, process, noise.sigma)

    return BoundTerms(
        diffusion=integrate(integrand, lo=t_min ** (1 / 3), nodes=nodes),
        prior=_prior(p_data, process, ends[1], true_base),
        reconstruction=_reconstruction(model, p_data, process, ends[0]),
    )


def _prior(p_data: Distribution, process: Process, sigma: Tensor, true_base: bool) -> Tensor:
    """E KL(p_{1|0}(·|x_0) ‖ base)."""
    x, P = all_sequences(process.num_states, p_data.length), transition_matrix(process, sigma)
    p_1 = P[x[:, None], p_data.sequences].prod(-1)  # x, x_0
    base = p_data.at(process, sigma) if true_base else process.log_prior(x, sigma).sum(-1).exp()
    joint = p_data.probabilities * p_1
    ratio = torch.where(joint > 0, p_1 / base[:, None], 1)  # pairs of probability 0 do not count
    return (joint * ratio.log()).sum()


def _reconstruction(model: Any, p_data: Distribution, process: Process, sigma: Tensor) -> Tensor:
    """−E Σ_i log p(x_0 at i | x_t) of the last denoising step: p(y) ∝ [exp(−σQ) s]_y · P_σ(x_t, y)."""
    if not sigma > 0:
        return torch.zeros((), dtype=torch.float64)
    x_t, x_0, weight = pairs(p_data, process, sigma)
    score = model(x_t, sigma.expand(len(x_t))).exp()
    p = (score @ transition_matrix(process, -sigma).T) * transition_matrix(process, sigma)[x_t]
    p = p[..., : p_data.vocab_size].clamp_min(0)  # a wrong score may give values below 0: they are never drawn
    p = p / p.sum(-1, keepdim=True)
    return -(weight * at_token(p, x_0).log().sum(-1)).sum()


@dataclass(frozen=True)
class ExplicitScoreEntropy(Integral):
    """Explicit score entropy, against the true ratios of ``distribution``, where it is 0.  [§6]

    x_0 serves to draw x_t only.
    """

    divergence: ClassVar[Divergence] = score_entropy
    distribution: Distribution

    def check_process(self, process: Process) -> None:
        """Raise ValueError for a distribution over another vocabulary."""
        Score(self.distribution, process)

    def loss(self, model: Any, x_t: Tokens, x_0: Tokens, t: PerSequence) -> PerPosition:
        """σ'·Σ_{y≠x_i} Q(x_i, y)·D(s_y, a_y), a the true ratios."""
        sigma, rate = model.schedule(t)
        log_ratio = Score(self.distribution, model.process)(x_t, sigma)
        loss = self.divergence(model(x_t, sigma), log_ratio)
        rates = model.process.rate(x_t[..., None], torch.arange(model.process.num_states), loss.dtype)
        rates = rates.scatter(-1, x_t[..., None], 0)
        return weighted(rate, torch.where(rates > 0, rates * loss, 0).sum(-1))


@final
@dataclass(frozen=True)
class ExplicitConcreteScore(ExplicitScoreEntropy):
    """Explicit concrete score matching: the same with squared errors.  [§6]"""

    divergence: ClassVar[Divergence] = square
