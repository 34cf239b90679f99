"""The expected likelihood bound: its three terms by their definitions.  [§8]"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sedd import tensors
from sedd.exact import objectives
from sedd.exact.distribution import Distribution, all_sequences, transition_matrix
from sedd.exact.propagation import pairs
from sedd.process import Process, at_token
from sedd.schedule import Schedule


class ExactBound(NamedTuple):
    """The terms of the bound on −log p(x_0) in expectation, in nats per sequence."""

    diffusion: Float[Tensor, ""]
    prior: Float[Tensor, ""]
    reconstruction: Float[Tensor, ""]

    @property
    def total(self) -> Float[Tensor, ""]:
        """The bound."""
        return self.diffusion + self.prior + self.reconstruction


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
) -> ExactBound:
    """Return the expected bound of ``model`` on sequences of ``p_data``.

    With ``true_base`` generation starts from the true marginal at t = 1, so that the exact score's bound is the
    entropy; otherwise from the process's prior, and the excess is KL(p_1 ‖ prior).

    Args:
        model: A model, or `exact.Score`.
        p_data: The distribution of the data.
        process: The noise process.
        schedule: The noise schedule.
        t_min: The time at which the diffusion term begins; the reconstruction term is that of the noise there.
        true_base: Whether generation starts from the true marginal at t = 1.
        nodes: Nodes of the quadrature over time.
    """
    tensors.check_t_min(t_min)
    ends = schedule.sigma(torch.tensor([t_min, 1.0], dtype=torch.float64))

    def integrand(u: Tensor) -> Tensor:
        noise = schedule(u**3)  # t = u³: under uniform noise the loss grows like −log t towards t = 0
        return 3 * u**2 * noise.rate * objectives.denoising_score_entropy(model, p_data, process, noise.sigma)

    return ExactBound(
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
