"""Reverse steps: unnormalised probabilities of every position's next token, from the score.  [§9]"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.parameterization import LogScoreModel
from sedd.process import Process


def normalize_probs(p: Float[Tensor, "*s n"]) -> Float[Tensor, "*s n"]:
    """Clamp at 0 and normalise: an imperfect score or a long step may give entries below 0."""
    p = p.clamp_min(0)
    return p / p.sum(-1, keepdim=True)


def forward_likelihood(
    process: Process, x: Int[Tensor, "*b L"], dsigma: Float[Tensor, "*b"], dtype: torch.dtype
) -> Float[Tensor, "*b L n"]:
    """Return P_Δσ(x, y) for every y."""
    states = torch.arange(process.num_states, device=x.device)
    return process.transition(x[..., None], states, dsigma.to(dtype)[..., None, None])


def analytic_weights(
    process: Process,
    log_score: Float[Tensor, "*b L n"],
    x: Int[Tensor, "*b L"],
    sigma_t: Float[Tensor, "*b"],
    sigma_s: Float[Tensor, "*b"],
) -> Float[Tensor, "*b L n"]:
    """[exp(−Δσ Q) s]_y · P_Δσ(x, y): the reverse step of one position while the others stay.

    Args:
        process: The noise process.
        log_score: log s_y at noise σ_t.
        x: Sequences at noise σ_t.
        sigma_t: Total noise before the step.
        sigma_s: Total noise after it.
    """
    dsigma = (sigma_t - sigma_s).to(log_score.dtype)
    return process.staggered_score(log_score.exp(), dsigma) * forward_likelihood(process, x, dsigma, log_score.dtype)


def denoised_probs(
    process: Process, log_score: Float[Tensor, "*b L n"], x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
) -> Float[Tensor, "*b L N"]:
    """Return p(x_0 | x) per position as the score implies it: the analytic step to σ = 0, in which no mask is left."""
    p = analytic_weights(process, log_score, x, sigma, torch.zeros_like(sigma))
    return normalize_probs(p[..., : process.vocab_size])


def denoising_table(
    model: LogScoreModel, process: Process, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
) -> Float[Tensor, "*b L n"]:
    """Return the probabilities of the step to σ = 0, over all states."""
    p = denoised_probs(process, model(x, sigma), x, sigma)
    return torch.nn.functional.pad(p, (0, process.num_states - process.vocab_size))
