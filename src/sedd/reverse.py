"""Reverse steps: unnormalised probabilities of every position's next token, from the score.  [§9]

Total noise falls from ``sigma_t`` to ``sigma_s``, by ``dsigma``.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from sedd.draws import AffineWeights
from sedd.process import Process, log_odds, reveal_probability
from sedd.schedule import corruption_probability
from sedd.tensors import PerSequence, PerState, PerToken, Tokens


def normalize_probs(p: Float[Tensor, "*s n"]) -> Float[Tensor, "*s n"]:
    """Clamp at 0 and normalise: an imperfect score or a long step may give entries below 0."""
    p = p.clamp_min(0)
    return p / p.sum(-1, keepdim=True)


def forward_likelihood(process: Process, x: Tokens, dsigma: PerSequence, dtype: torch.dtype) -> PerState:
    """Return P_Δσ(x, y) for every y."""
    states = torch.arange(process.num_states, device=x.device)
    return process.transition(x[..., None], states, dsigma.to(dtype)[..., None, None])


def analytic_weights(
    process: Process, log_score: PerState, x: Tokens, sigma_t: PerSequence, sigma_s: PerSequence
) -> PerState:
    """[exp(−Δσ Q) s]_y · P_Δσ(x, y): the reverse step of one position while the others stay."""
    dsigma = (sigma_t - sigma_s).to(log_score.dtype)
    return process.staggered_score(log_score.exp(), dsigma) * forward_likelihood(process, x, dsigma, log_score.dtype)


def denoised_probs(process: Process, log_score: PerState, x: Tokens, sigma: PerSequence) -> PerToken:
    """Return p(x_0 | x) per position as the score implies it: the analytic step to σ = 0, in which no mask is left."""
    p = analytic_weights(process, log_score, x, sigma, torch.zeros_like(sigma))
    return normalize_probs(p[..., : process.vocab_size])


def denoising_table(model: Any, process: Process, x: Tokens, sigma: PerSequence) -> PerState:
    """Return the probabilities of the step to σ = 0, over all states."""
    p = denoised_probs(process, model(x, sigma), x, sigma)
    return pad(p, (0, process.num_states - process.vocab_size))


def incoming_rate(process: Process) -> float:
    """Q(x_t, y), the rate from y ≠ x_t into a noisy x_t: 1 into the mask, 1/N into a token."""
    return 1.0 if process.only_masks else 1 / process.vocab_size


def log_score_shift(process: Process, sigma: PerSequence) -> PerSequence:
    """Return `Process.base_log_score`, which is the same for all tokens: −log ω − log N (absorbing) or 0.  [§5]"""
    any_token = torch.zeros_like(sigma, dtype=torch.long)[..., None]
    return process.base_log_score(any_token, sigma)[..., 0, 0]


def own_log_likelihood(process: Process, sigma: PerSequence) -> PerSequence:
    """log P_σ(x, x) − log P_σ(x, y): 0 of a mask, log(1 + N/ω) of a token under uniform noise."""
    if process.only_masks:
        return torch.zeros_like(sigma)
    return -logsigmoid(log_odds(sigma) - math.log(process.vocab_size))


def tweedie_weights(process: Process, dsigma: PerSequence) -> AffineWeights:
    """[exp(−Δσ Q) s]_y · P_Δσ(x, y) as an affine function of a score with s_x = 1.  [§9]

    A mask becomes y with weight (e^Δσ − 1)·s_y and stays with 1 − (e^Δσ − 1)·S. Under uniform noise the weight of y is
    P_Δσ(x, y)·(e^Δσ·s_y − (e^Δσ − 1)/N·(S + s_x)).
    """
    odds = torch.expm1(dsigma)
    if process.only_masks:
        return AffineWeights(odds, torch.ones_like(odds), -odds)
    each, go = odds / process.vocab_size, corruption_probability(dsigma) / process.vocab_size
    stay, growth = torch.exp(-dsigma) + go, torch.exp(dsigma)
    return AffineWeights(go * growth, stay * (growth - each), -stay * each, -go * each, -go * each)


def denoising_weights(process: Process, sigma: PerSequence) -> AffineWeights:
    """The Tweedie weights of the step to σ = 0, after which no mask is left.  [§9]"""
    return AffineWeights(torch.ones_like(sigma)) if process.only_masks else tweedie_weights(process, sigma)


def posterior_weights(process: Process, sigma_s: PerSequence, sigma_t: PerSequence) -> AffineWeights:
    """Σ_{x_0} q(y | x, x_0)·p(x_0 | x) as an affine function of p(· | x), which is 0 at the mask.  [§6]

    A mask is revealed with probability ρ. Under uniform noise it is P_Δ(x, y)·Σ_{x_0} P_s(y, x_0)·s_{x_0}/P_t(x, x_0).
    """
    if process.only_masks:
        kept = corruption_probability(sigma_s) / corruption_probability(sigma_t)
        return AffineWeights(reveal_probability(sigma_s, sigma_t), torch.zeros_like(sigma_s), kept)
    here = torch.exp(-sigma_s)
    go_s, go_t, go = (corruption_probability(a) / process.vocab_size for a in (sigma_s, sigma_t, sigma_t - sigma_s))
    stay_s, stay_t, stay = here + go_s, torch.exp(-sigma_t) + go_t, torch.exp(sigma_s - sigma_t) + go
    return AffineWeights(
        go * here / go_t, stay * stay_s / stay_t, stay * go_s / go_t, go * go_s / go_t, go * go_s / stay_t
    )
