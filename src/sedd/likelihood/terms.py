"""The variational bound (ELBO) of discrete diffusion: its three terms at one time per sequence.  [§8]

−log p(x_0) ≤ diffusion + prior + reconstruction, each an expectation over noise; see Lou et al. 2024, "Discrete
Diffusion Modeling by Estimating the Ratios of the Data Distribution", arXiv 2310.16834.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd import tensors
from sedd.objectives import weighted
from sedd.parameterization import LogScoreModel
from sedd.process import Process, at_token
from sedd.reverse import denoising_table
from sedd.schedule import Schedule, Times


def times_by_noise(u: Float[Tensor, "*b"], schedule: Schedule, t_min: float = 0.0) -> Times:
    """Map uniform u to times at which σ/(1 + σ) grows as u³, from t_min to 1; the weights are 1/density.

    The noise levels are then the same for every schedule, low noise being the most frequent. At low noise one changed
    token has a loss of about 1/σ. With u² the variance would be smallest, but so much of it would lie in rare large
    losses that a small number of draws misses it. At high noise a wrong score costs the same at every σ, and 1 − e^−σ
    in place of σ/(1 + σ) would hardly ever draw a time there.

    Args:
        u: Uniforms in (0, 1).
        schedule: The noise schedule.
        t_min: The first time.
    """
    tensors.check_times(u)
    tensors.check_t_min(t_min)
    ends = schedule.sigma(torch.tensor([t_min, 1.0], dtype=u.dtype, device=u.device))
    first, last = ends / (1 + ends)
    share = first + (last - first) * u**3
    sigma = (share / (1 - share)).clamp(*ends)  # rounding may pass an end
    t = schedule.t(sigma)
    return Times(t=t, weight=3 * (last - first) * u**2 * (1 + sigma) ** 2 / schedule.rate(t))


class BoundTerms(NamedTuple):
    """The terms of the variational bound, in nats per sequence; their sum estimates an upper bound on −log p(x_0)."""

    diffusion: Float[Tensor, "*b"]
    prior: Float[Tensor, "*b"]
    reconstruction: Float[Tensor, "*b"]

    @property
    def total(self) -> Float[Tensor, "*b"]:
        """The bound itself: the sum of the terms."""
        return self.diffusion + self.prior + self.reconstruction


def diffusion_nats(
    model: LogScoreModel,
    process: Process,
    schedule: Schedule,
    x_0: Int[Tensor, "*b L"],
    x_t: Int[Tensor, "*b L"],
    t: Float[Tensor, "*b"],
) -> Float[Tensor, "*b L"]:
    """Return σ'·(score entropy) at every position, the integrand of the diffusion term."""
    sigma, rate = schedule(t)
    return weighted(rate, process.score_entropy(model(x_t, sigma), x_t, x_0, sigma))


def bound_terms(
    model: LogScoreModel,
    process: Process,
    schedule: Schedule,
    x_0: Int[Tensor, "*b L"],
    x_t: Int[Tensor, "*b L"],
    x_first: Int[Tensor, "*b L"],
    times: Times,
    valid: Bool[Tensor, "*b L"],
) -> BoundTerms:
    """Estimate the terms of the bound from one noisy copy of each sequence.  [§8]

    Args:
        model: A model of log-scores.
        process: Its noise process.
        schedule: Its noise schedule.
        x_0: The sequences.
        x_t: The sequences with the noise of ``times``, for the diffusion term.
        x_first: The sequences with the schedule's noise at t = 0, for the reconstruction term.
        times: One time per sequence, weighted by 1/density.
        valid: False where a position is padding, which is not counted.
    """
    ends = schedule.sigma(torch.tensor([0.0, 1.0], dtype=torch.float64, device=x_0.device))
    diffusion = diffusion_nats(model, process, schedule, x_0, x_t, times.t)
    diffusion = times.weight.to(diffusion.dtype)[..., None] * diffusion
    reconstruction = torch.zeros_like(diffusion)
    if ends[0] > 0:
        first = ends[0].to(diffusion.dtype).expand(x_0.shape[:-1])
        reconstruction = -at_token(denoising_table(model, process, x_first, first), x_0).clamp_min(1e-30).log()
    return BoundTerms(
        diffusion=torch.where(valid, diffusion, 0).sum(-1),
        prior=torch.where(valid, process.prior_kl(x_0, ends[1].expand(x_0.shape[:-1])), 0).sum(-1).to(diffusion.dtype),
        reconstruction=torch.where(valid, reconstruction, 0).sum(-1),
    )
