"""The three terms of the bound, at one time a sequence, and the times to look at.  [§8]"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.diffusion import check
from sedd.diffusion.objective import DenoisingScoreEntropy
from sedd.diffusion.parameterization import LogScoreModel
from sedd.diffusion.process import Process, at_token
from sedd.diffusion.schedule import LowNoiseTimes, Schedule, Times
from sedd.sampling import last_step


def early_times(u: Float[Tensor, "*b"]) -> Times:
    """t = u²: see `schedule.LowNoiseTimes`."""
    return LowNoiseTimes()(u)


def early_noise(u: Float[Tensor, "*b"], schedule: Schedule, t_min: float = 0.0) -> Times:
    """σ/(1 + σ) grows as u³ from t_min to 1: the same noise whatever the schedule, and more often little of it.

    At little noise one unknown token weighs 1/σ: with u² the variance would be least, but so much of it in rare large
    losses that few draws do not see it. At much noise a score that is wrong costs the same at every σ, and 1 − e^−σ
    in place of σ/(1 + σ) would hardly ever look there.
    """
    check.times(u)
    check.t_min(t_min)
    ends = schedule.sigma(torch.tensor([t_min, 1.0], dtype=u.dtype, device=u.device))
    first, last = ends / (1 + ends)
    share = first + (last - first) * u**3
    sigma = (share / (1 - share)).clamp(*ends)  # rounding may step over an end
    t = schedule.t(sigma)
    return Times(t=t, weight=3 * (last - first) * u**2 * (1 + sigma) ** 2 / schedule.rate(t))


class Terms(NamedTuple):
    """Nats a sequence; their sum estimates an upper bound on −log p(x_0)."""

    diffusion: Float[Tensor, "*b"]
    prior: Float[Tensor, "*b"]
    reconstruction: Float[Tensor, "*b"]

    @property
    def total(self) -> Float[Tensor, "*b"]:
        """The bound."""
        return self.diffusion + self.prior + self.reconstruction


def terms(
    model: LogScoreModel,
    process: Process,
    schedule: Schedule,
    x_0: Int[Tensor, "*b L"],
    x_t: Int[Tensor, "*b L"],
    x_first: Int[Tensor, "*b L"],
    times: Times,
    valid: Bool[Tensor, "*b L"],
) -> Terms:
    """The terms at one time a sequence: ``x_t`` is noised to that time, ``x_first`` to the schedule's first noise."""
    count = valid.sum(-1)
    ends = schedule.sigma(torch.tensor([0.0, 1.0], dtype=torch.float64, device=x_0.device))
    diffusion = DenoisingScoreEntropy(process, schedule).loss(model, x_t, x_0, times.t)
    diffusion = times.weight.to(diffusion.dtype)[..., None] * diffusion
    reconstruction = torch.zeros_like(diffusion)
    if ends[0] > 0:
        first = ends[0].to(diffusion.dtype).expand(x_0.shape[:-1])
        reconstruction = -at_token(last_step(model, process, x_first, first), x_0).clamp_min(1e-30).log()
    return Terms(
        diffusion=torch.where(valid, diffusion, 0).sum(-1),
        prior=(count * process.prior_kl(ends[1])).to(diffusion.dtype),
        reconstruction=torch.where(valid, reconstruction, 0).sum(-1),
    )
