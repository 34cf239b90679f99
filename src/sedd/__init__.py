"""Score entropy discrete diffusion: learn the ratios of a distribution over discrete sequences, and sample from them.

`Diffusion` makes a model of any network: it trains, samples, infills and bounds. `train` and `load` return a `Model`,
which does the same with text. The parts of both are here too: processes, schedules, objectives, parameterizations,
samplers and wrappers of models. ``import sedd`` alone loads neither torch nor numpy.
"""

TYPE_CHECKING = False  # as type checkers read it; the module `typing` takes 10 ms, in which Ctrl-C is not handled yet
if TYPE_CHECKING:
    from sedd.diffusion import Diffusion as Diffusion
    from sedd.likelihood import bound as bound
    from sedd.model import Bound as Bound
    from sedd.model import Bounds as Bounds
    from sedd.model import Model as Model
    from sedd.model import Text as Text
    from sedd.model import Texts as Texts
    from sedd.model import load as load
    from sedd.model import train as train
    from sedd.objectives import D3PM as D3PM
    from sedd.objectives import AnyOrder as AnyOrder
    from sedd.objectives import DenoisingScoreEntropy as DenoisingScoreEntropy
    from sedd.objectives import LambdaDCE as LambdaDCE
    from sedd.objectives import MeanCrossEntropy as MeanCrossEntropy
    from sedd.objectives import Objective as Objective
    from sedd.objectives import TimeDCE as TimeDCE
    from sedd.parameterization import MeanModel as MeanModel
    from sedd.parameterization import ScoreModel as ScoreModel
    from sedd.process import Absorbing as Absorbing
    from sedd.process import Frequency as Frequency
    from sedd.process import Hybrid as Hybrid
    from sedd.process import Process as Process
    from sedd.process import Uniform as Uniform
    from sedd.samplers import Ancestral as Ancestral
    from sedd.samplers import Confident as Confident
    from sedd.samplers import EntropyBounded as EntropyBounded
    from sedd.samplers import Euler as Euler
    from sedd.samplers import FirstHitting as FirstHitting
    from sedd.samplers import Gibbs as Gibbs
    from sedd.samplers import Guided as Guided
    from sedd.samplers import Ordered as Ordered
    from sedd.samplers import Remask as Remask
    from sedd.samplers import Sampler as Sampler
    from sedd.samplers import Theta as Theta
    from sedd.samplers import Tweedie as Tweedie
    from sedd.samplers import Warped as Warped
    from sedd.schedule import Cosine as Cosine
    from sedd.schedule import Geometric as Geometric
    from sedd.schedule import LogLinear as LogLinear
    from sedd.schedule import Polynomial as Polynomial
    from sedd.schedule import Schedule as Schedule

__version__ = "0.1.0"
_NAMES = {
    "model": "Bound Bounds Model Text Texts load train",
    "diffusion": "Diffusion",
    "process": "Absorbing Frequency Hybrid Process Uniform",
    "schedule": "Cosine Geometric LogLinear Polynomial Schedule",
    "objectives": "AnyOrder D3PM DenoisingScoreEntropy LambdaDCE MeanCrossEntropy Objective TimeDCE",
    "parameterization": "MeanModel ScoreModel",
    "samplers": "Ancestral Confident EntropyBounded Euler FirstHitting Gibbs Guided Ordered Remask Sampler "
    "Theta Tweedie Warped",
    "likelihood": "bound",
}
"""The public names, by the modules that define them."""
_MODULES = {name: f"sedd.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'sedd' has no attribute {name!r}; its names are {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
