"""One step from noise towards data, as unnormalised laws of every position's next token.  [§9]"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.diffusion.parameterization import LogScoreModel
from sedd.diffusion.process import Process


def normalize(p: Float[Tensor, "*s n"]) -> Float[Tensor, "*s n"]:
    """A law made of ``p``: an imperfect score or a long step may leave entries below 0."""
    p = p.clamp_min(0)
    return p / p.sum(-1, keepdim=True)


def forward_likelihood(
    process: Process, x: Int[Tensor, "*b L"], dsigma: Float[Tensor, "*b"], dtype: torch.dtype
) -> Float[Tensor, "*b L n"]:
    """P_Δσ(x, y) for every y."""
    states = torch.arange(process.num_states, device=x.device)
    return process.transition(x[..., None], states, dsigma.to(dtype)[..., None, None])


def analytic_weights(
    process: Process,
    log_score: Float[Tensor, "*b L n"],
    x: Int[Tensor, "*b L"],
    sigma_t: Float[Tensor, "*b"],
    sigma_s: Float[Tensor, "*b"],
) -> Float[Tensor, "*b L n"]:
    """[exp(−Δσ Q) s]_y · P_Δσ(x, y): what a step would do if only one position could move."""
    dsigma = (sigma_t - sigma_s).to(log_score.dtype)
    return process.staggered_score(log_score.exp(), dsigma) * forward_likelihood(process, x, dsigma, log_score.dtype)


def analytic_table(
    model: LogScoreModel,
    process: Process,
    x: Int[Tensor, "*b L"],
    sigma_t: Float[Tensor, "*b"],
    sigma_s: Float[Tensor, "*b"],
) -> Float[Tensor, "*b L n"]:
    """The law of the analytic step, exact for a sequence of one token."""
    return normalize(analytic_weights(process, model(x, sigma_t), x, sigma_t, sigma_s))


def denoised_probs(
    process: Process, log_score: Float[Tensor, "*b L n"], x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
) -> Float[Tensor, "*b L N"]:
    """p(x_0 | x) position by position, as the score has it: the step to no noise at all, in which no mask is left."""
    p = analytic_weights(process, log_score, x, sigma, torch.zeros_like(sigma))
    return normalize(p[..., : process.vocab_size])


def denoising_table(
    model: LogScoreModel, process: Process, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
) -> Float[Tensor, "*b L n"]:
    """The table of the step to no noise at all."""
    p = denoised_probs(process, model(x, sigma), x, sigma)
    return torch.nn.functional.pad(p, (0, process.num_states - process.vocab_size))
