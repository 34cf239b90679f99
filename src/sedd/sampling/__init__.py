"""Samplers: from noise to data.  [§9]

A sampler takes a `Prompt` with blanks through `State`s that the same seed repeats, whatever the batch. Each declares
the order at which the law of its samples approaches the model's, and what it assumes. Those that move every position by
itself have a ``table``, the law of one step: `exact.propagate` makes of it the law of the samples, without drawing any.
"""

from sedd.diffusion.reverse import analytic_step, denoised, last_step, law_of
from sedd.sampling.autoregressive import LeftToRight
from sedd.sampling.base import (
    Prompt,
    Sampler,
    State,
    StepContext,
    Stepper,
    cosine_grid,
    empty,
    given_grid,
    noise_of,
    uniform_grid,
)
from sedd.sampling.caching import Asked
from sedd.sampling.confidence import Confident, EntropyBounded
from sedd.sampling.first_hitting import FirstHitting, Ordered, Plan
from sedd.sampling.grid import Ancestral, Euler, Gibbs, Remask, Theta, Tweedie
from sedd.sampling.guidance import Guided, GuidedMean, GuidedScore, guided, passes
from sedd.sampling.warping import Tempered, Warping

__all__ = [
    "Ancestral",
    "Asked",
    "Confident",
    "EntropyBounded",
    "Euler",
    "FirstHitting",
    "Gibbs",
    "Guided",
    "GuidedMean",
    "GuidedScore",
    "LeftToRight",
    "Ordered",
    "Plan",
    "Prompt",
    "Remask",
    "Sampler",
    "State",
    "StepContext",
    "Stepper",
    "Tempered",
    "Theta",
    "Tweedie",
    "Warping",
    "analytic_step",
    "cosine_grid",
    "denoised",
    "empty",
    "given_grid",
    "guided",
    "last_step",
    "law_of",
    "noise_of",
    "passes",
    "uniform_grid",
]
