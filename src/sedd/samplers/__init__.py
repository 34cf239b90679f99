"""Samplers: from noise to data.  [§9]

A sampler fills the open positions of a `Prompt` and yields a `State` per step. The same seed gives the same samples in
any batch. Each sampler declares its order of convergence to the model's distribution and what it assumes; the
distribution of its samples can be enumerated on small spaces by `exact.sample_distribution`.
"""

from sedd.samplers import template as template
from sedd.samplers.confidence import Confident as Confident
from sedd.samplers.confidence import EntropyBounded as EntropyBounded
from sedd.samplers.correction import Gibbs as Gibbs
from sedd.samplers.correction import Remask as Remask
from sedd.samplers.first_hitting import FirstHitting as FirstHitting
from sedd.samplers.first_hitting import LeftToRight as LeftToRight
from sedd.samplers.first_hitting import Ordered as Ordered
from sedd.samplers.grid import Ancestral as Ancestral
from sedd.samplers.grid import Euler as Euler
from sedd.samplers.grid import FactorizedSampler as FactorizedSampler
from sedd.samplers.grid import Theta as Theta
from sedd.samplers.grid import Tweedie as Tweedie
from sedd.samplers.guidance import Guided as Guided
from sedd.samplers.loop import GridSampler as GridSampler
from sedd.samplers.loop import Prompt as Prompt
from sedd.samplers.loop import Rows as Rows
from sedd.samplers.loop import Sampler as Sampler
from sedd.samplers.loop import State as State
from sedd.samplers.loop import Steps as Steps
from sedd.samplers.loop import cosine_grid as cosine_grid
from sedd.samplers.loop import draw_clean_tokens as draw_clean_tokens
from sedd.samplers.loop import empty as empty
from sedd.samplers.loop import uniform_grid as uniform_grid
from sedd.samplers.model import SamplingModel as SamplingModel
from sedd.samplers.model import SamplingStats as SamplingStats
from sedd.samplers.run import GeneratedSequence as GeneratedSequence
from sedd.samplers.run import SamplingRun as SamplingRun
from sedd.samplers.run import blank_prompt as blank_prompt
from sedd.samplers.run import build_grid as build_grid
from sedd.samplers.run import build_sampler as build_sampler
from sedd.samplers.run import decode_greedy as decode_greedy
from sedd.samplers.run import default_sampler_name as default_sampler_name
from sedd.samplers.run import final_sequences as final_sequences
from sedd.samplers.warping import Warped as Warped
from sedd.samplers.warping import Warping as Warping
from sedd.sampling_settings import SamplingSettings as SamplingSettings
