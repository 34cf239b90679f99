"""Classifier-free guidance: a model with a label, extrapolated away from the model without one.  [§9]

Score models mix log-scores, denoisers mix log p(x_0 | x). Under absorbing noise the two agree; under uniform noise they
define different distributions. Weight γ = 1 is the model of the label, towards 0 it becomes the model without a label,
and above 1 it moves further towards the label. Guidance does not define a trained distribution.

References: Ho and Salimans 2022, "Classifier-Free Diffusion Guidance", arXiv 2207.12598; of rates, Nisonoff et al.
2024, "Unlocking Guidance for Discrete State-Space Diffusion and Flow Models", arXiv 2406.01572; of denoisers, Schiff
et al. 2024, "Simple Guidance Mechanisms for Discrete Diffusion Models", arXiv 2412.10193.
"""

import math

from jaxtyping import Float
from torch import Tensor

from sedd.diffusion.process import Process, interpolate_log


def check_guidance(guidance: float) -> None:
    """Raise ValueError unless guidance is above 0 and finite."""
    if not 0 < guidance < math.inf:
        raise ValueError(f"guidance is {guidance}; it must be above 0, where 1 is the distribution of the label itself")


def guide_log_score(
    process: Process,
    unconditional: Float[Tensor, "k n"],
    conditional: Float[Tensor, "k n"],
    guidance: float,
) -> Float[Tensor, "k n"]:
    """Return (1 − γ)·log s(x) + γ·log s(x | label), normalised as the process requires."""
    return process.mix_log_scores(unconditional, conditional, guidance)


def guide_log_mean(
    unconditional: Float[Tensor, "k N"], conditional: Float[Tensor, "k N"], guidance: float
) -> Float[Tensor, "k N"]:
    """Return log p(x_0 | x)^(1−γ)·p(x_0 | x, label)^γ, normalised."""
    return interpolate_log(unconditional, conditional, guidance).log_softmax(-1)
