"""Samplers: from noise to data.  [§9]

A sampler fills the open positions of a `Prompt` and yields a `State` per step. The same seed gives the same samples in
any batch. Each sampler declares its order of convergence to the model's distribution and what it assumes; the
distribution of its samples can be enumerated on small spaces by `exact.sample_distribution`.
"""

from sedd.samplers.autoregressive import LeftToRight
from sedd.samplers.base import (
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
from sedd.samplers.caching import SamplingModel
from sedd.samplers.confidence import Confident, EntropyBounded
from sedd.samplers.default import default_sampler
from sedd.samplers.first_hitting import FirstHitting, Ordered
from sedd.samplers.gibbs import Gibbs
from sedd.samplers.grid import Ancestral, Euler, FactorizedSampler, Tweedie
from sedd.samplers.guidance import Guided
from sedd.samplers.remasking import Remask
from sedd.samplers.theta import Theta
from sedd.samplers.warping import Warped, Warping
from sedd.samplers.wrapper import Wrapper, base_model, networks_per_call

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
