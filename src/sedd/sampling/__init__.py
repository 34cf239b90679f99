"""Samplers: from noise to data.  [§9]

A sampler fills the open positions of a `Prompt` and yields a `State` per step. The same seed gives the same samples in
any batch. Each sampler declares its order of convergence to the model's distribution and what it assumes; the
distribution of its samples can be enumerated on small spaces by `exact.sample_distribution`.
"""

from sedd.sampling.autoregressive import LeftToRight
from sedd.sampling.base import (
    GridSampler,
    Plan,
    Prompt,
    Sampler,
    State,
    StepContext,
    Steps,
    cosine_grid,
    draw_clean_tokens,
    empty,
    given_grid,
    sigma_of_masked_fraction,
    time_grid,
    uniform_grid,
)
from sedd.sampling.caching import SamplingModel
from sedd.sampling.confidence import Confident, EntropyBounded
from sedd.sampling.default import default_sampler
from sedd.sampling.first_hitting import FirstHitting, Ordered
from sedd.sampling.gibbs import Gibbs
from sedd.sampling.grid import Ancestral, Euler, FactorizedSampler, Tweedie
from sedd.sampling.guidance import Guided
from sedd.sampling.remasking import Remask
from sedd.sampling.theta import Theta
from sedd.sampling.warping import Warped, Warping
from sedd.sampling.wrapper import Wrapper, base_model, networks_per_call

__all__ = [
    "Ancestral",
    "Confident",
    "EntropyBounded",
    "Euler",
    "FactorizedSampler",
    "FirstHitting",
    "Gibbs",
    "GridSampler",
    "Guided",
    "LeftToRight",
    "Ordered",
    "Plan",
    "Prompt",
    "Remask",
    "Sampler",
    "SamplingModel",
    "State",
    "StepContext",
    "Steps",
    "Theta",
    "Tweedie",
    "Warped",
    "Warping",
    "Wrapper",
    "base_model",
    "cosine_grid",
    "default_sampler",
    "draw_clean_tokens",
    "empty",
    "given_grid",
    "networks_per_call",
    "sigma_of_masked_fraction",
    "time_grid",
    "uniform_grid",
]
