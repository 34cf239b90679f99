"""Classifier-free guidance: a model with a label, extrapolated away from the model without one.  [§9]

Score models mix log-scores, denoisers mix log p(x_0 | x). Under absorbing noise the two agree; under uniform noise they
define different distributions. Weight γ = 1 is the model of the label, towards 0 it becomes the model without a label,
and above 1 it moves further towards the label. Guidance does not define a trained distribution.

References: Ho and Salimans 2022, "Classifier-Free Diffusion Guidance", arXiv 2207.12598; of rates, Nisonoff et al.
2024, "Unlocking Guidance for Discrete State-Space Diffusion and Flow Models", arXiv 2406.01572; of denoisers, Schiff
et al. 2024, "Simple Guidance Mechanisms for Discrete Diffusion Models", arXiv 2412.10193.
"""

import math
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from sedd.parameterization import PerRow
from sedd.samplers.model import Hidden, TableAt, TokenAt, Wrapper, implied_probs_at, is_denoiser, log_score_at


def _interpolate(a: Float[Tensor, "*s"], b: Float[Tensor, "*s"], weight: float) -> Float[Tensor, "*s"]:
    """Return (1 − γ)·a + γ·b of log-probabilities, γ > 0; −∞ where b is −∞."""
    return torch.where(b.isneginf(), b, torch.lerp(a, b, weight))


@final
class Guided(Wrapper):
    """A model with a label, guided away from the model without one: ``Guided(model, unconditional, 2.0)``.

    Args:
        model: The model with the label.
        unconditional: The same model without it.
        weight: γ, above 0; 1 is the model with the label.
    """

    def __init__(self, model: Any, unconditional: Any, weight: float) -> None:
        if not 0 < weight < math.inf:
            raise ValueError(f"guidance is {weight}; it must be above 0, where 1 is the label's distribution")
        super().__init__(model, unconditional)
        self.weight = weight
        self.is_denoiser = is_denoiser(model) and is_denoiser(unconditional)  # then p(x_0 | x) is mixed, not the scores

    def log_score_at(self, hidden: Hidden, x_t: TokenAt, sigma: PerRow) -> TableAt:
        """Return (1 − γ)·log s(x) + γ·log s(x | label), the score of p_t(x)^(1−γ)·p_t(x | label)^γ.

        Ratios of probabilities need no normaliser. Where only masks are noise, the score of a mask is S·p_y with p_y
        normalised, and S is the same mixture of the two Σ_y s_y. Not normalised, Σ_y would exceed 1/ω for γ > 1: masks
        would be revealed faster than noise makes them. Of two denoisers it is the score of the mixture.
        """
        if self.is_denoiser:
            log_mean = self.log_mean_at(hidden, x_t, sigma)
            return self.process.mean_score(log_mean[:, None], x_t[:, None], sigma)[:, 0]
        unconditional, conditional = hidden.chunk(2, -1)
        free = log_score_at(self.unconditional, unconditional, x_t, sigma)
        given = log_score_at(self.model, conditional, x_t, sigma)
        if not self.process.only_masks:
            return _interpolate(free, given, self.weight)
        free, given, mask = free[..., :-1], given[..., :-1], given[..., -1:]
        log_sum = _interpolate(free.logsumexp(-1, keepdim=True), given.logsumexp(-1, keepdim=True), self.weight)
        return torch.cat([_interpolate(free, given, self.weight).log_softmax(-1) + log_sum, mask], -1)

    def log_mean_at(self, hidden: Hidden, x_t: TokenAt, sigma: PerRow) -> TableAt:
        """Return log p(x_0 | x)^(1−γ)·p(x_0 | x, label)^γ, normalised, or what the mixture of the scores implies."""
        if not self.is_denoiser:
            return implied_probs_at(self, hidden, x_t, sigma).log()
        unconditional, conditional = hidden.chunk(2, -1)
        free = self.unconditional.log_mean_at(unconditional, x_t, sigma)
        given = self.model.log_mean_at(conditional, x_t, sigma)
        return _interpolate(free, given, self.weight).log_softmax(-1)
