"""Samplers: from noise to data.  [§9]

A sampler fills the open positions of a `Prompt` and yields a `State` per step. The same seed gives the same samples in
any batch. Each sampler declares its order of convergence to the model's distribution and what it assumes; the
distribution of its samples can be enumerated on small spaces by `exact.sample_distribution`.
"""

from sedd.samplers import template
from sedd.samplers.confidence import Confident, EntropyBounded
from sedd.samplers.first_hitting import FirstHitting, LeftToRight, Ordered
from sedd.samplers.gibbs import Gibbs
from sedd.samplers.grid import Ancestral, Euler, FactorizedSampler, Tweedie
from sedd.samplers.guidance import Guided
from sedd.samplers.loop import (
    GridSampler,
    Plan,
    Prompt,
    Rows,
    Sampler,
    State,
    StepContext,
    Steps,
    cosine_grid,
    draw_clean_tokens,
    empty,
    given_grid,
    sigma_of_masked_fraction,
    uniform_grid,
)
from sedd.samplers.model import SamplingModel, Wrapper, base_model, networks_per_call
from sedd.samplers.remasking import Remask
from sedd.samplers.run import (
    GeneratedSequence,
    SamplingRun,
    SamplingStats,
    blank_prompt,
    build_grid,
    build_guided_model,
    build_sampler,
    decode_greedy,
    default_sampler,
    default_sampler_name,
    final_sequences,
)
from sedd.samplers.theta import Theta
from sedd.samplers.warping import Warped, Warping
from sedd.sampling_settings import SamplingSettings

__all__ = [
    "Ancestral",
    "Confident",
    "EntropyBounded",
    "Euler",
    "FactorizedSampler",
    "FirstHitting",
    "GeneratedSequence",
    "Gibbs",
    "GridSampler",
    "Guided",
    "LeftToRight",
    "Ordered",
    "Plan",
    "Prompt",
    "Remask",
    "Rows",
    "Sampler",
    "SamplingModel",
    "SamplingRun",
    "SamplingSettings",
    "SamplingStats",
    "State",
    "StepContext",
    "Steps",
    "Theta",
    "Tweedie",
    "Warped",
    "Warping",
    "Wrapper",
    "base_model",
    "blank_prompt",
    "build_grid",
    "build_guided_model",
    "build_sampler",
    "cosine_grid",
    "decode_greedy",
    "default_sampler",
    "default_sampler_name",
    "draw_clean_tokens",
    "empty",
    "final_sequences",
    "given_grid",
    "networks_per_call",
    "sigma_of_masked_fraction",
    "template",
    "uniform_grid",
]
