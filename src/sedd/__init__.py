"""Score entropy discrete diffusion: learn the ratios of a distribution over discrete sequences, and sample from them.

`Diffusion` makes a model of any network: it trains, samples, infills and bounds. `train` and `load` return a `Model`,
which does the same with text. The parts of both are here too: processes, schedules, objectives, parameterizations,
samplers and wrappers of models. ``import sedd`` alone loads neither torch nor numpy.
"""

TYPE_CHECKING = False  # as type checkers read it; the module `typing` takes 10 ms, in which Ctrl-C is not handled yet
if TYPE_CHECKING:
    from sedd.api import Bound as Bound
    from sedd.api import Bounds as Bounds
    from sedd.api import Model as Model
    from sedd.api import Text as Text
    from sedd.api import Texts as Texts
    from sedd.api import load as load
    from sedd.api import train as train
    from sedd.diffusion.objective import D3PM as D3PM
    from sedd.diffusion.objective import AnyOrder as AnyOrder
    from sedd.diffusion.objective import DenoisingScoreEntropy as DenoisingScoreEntropy
    from sedd.diffusion.objective import LambdaDCE as LambdaDCE
    from sedd.diffusion.objective import MeanCrossEntropy as MeanCrossEntropy
    from sedd.diffusion.objective import Objective as Objective
    from sedd.diffusion.objective import TimeDCE as TimeDCE
    from sedd.diffusion.parameterization import MeanModel as MeanModel
    from sedd.diffusion.parameterization import ScoreModel as ScoreModel
    from sedd.diffusion.process import Absorbing as Absorbing
    from sedd.diffusion.process import Frequency as Frequency
    from sedd.diffusion.process import Hybrid as Hybrid
    from sedd.diffusion.process import Process as Process
    from sedd.diffusion.process import Uniform as Uniform
    from sedd.diffusion.schedule import Cosine as Cosine
    from sedd.diffusion.schedule import Geometric as Geometric
    from sedd.diffusion.schedule import LogLinear as LogLinear
    from sedd.diffusion.schedule import Polynomial as Polynomial
    from sedd.diffusion.schedule import Schedule as Schedule
    from sedd.likelihood import bound as bound
    from sedd.module import Diffusion as Diffusion
    from sedd.sampling import Ancestral as Ancestral
    from sedd.sampling import Confident as Confident
    from sedd.sampling import EntropyBounded as EntropyBounded
    from sedd.sampling import Euler as Euler
    from sedd.sampling import FirstHitting as FirstHitting
    from sedd.sampling import Gibbs as Gibbs
    from sedd.sampling import Guided as Guided
    from sedd.sampling import Ordered as Ordered
    from sedd.sampling import Remask as Remask
    from sedd.sampling import Sampler as Sampler
    from sedd.sampling import Theta as Theta
    from sedd.sampling import Tweedie as Tweedie
    from sedd.sampling import Warped as Warped

__version__ = "0.1.0"
_MODULES = {
    "sedd.api": ("Bound", "Bounds", "Model", "Text", "Texts", "load", "train"),
    "sedd.module": ("Diffusion",),
    "sedd.diffusion.process": ("Absorbing", "Frequency", "Hybrid", "Process", "Uniform"),
    "sedd.diffusion.schedule": ("Cosine", "Geometric", "LogLinear", "Polynomial", "Schedule"),
    "sedd.diffusion.objective": (
        "AnyOrder",
        "D3PM",
        "DenoisingScoreEntropy",
        "LambdaDCE",
        "MeanCrossEntropy",
        "Objective",
        "TimeDCE",
    ),
    "sedd.diffusion.parameterization": ("MeanModel", "ScoreModel"),
    "sedd.sampling": (
        "Ancestral",
        "Confident",
        "EntropyBounded",
        "Euler",
        "FirstHitting",
        "Gibbs",
        "Guided",
        "Ordered",
        "Remask",
        "Sampler",
        "Theta",
        "Tweedie",
        "Warped",
    ),
    "sedd.likelihood": ("bound",),
}
"""The public names, by the modules that define them."""
__all__ = ["__version__", *(name for names in _MODULES.values() for name in names)]


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module 'sedd' has no attribute {name!r}; its names are {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
