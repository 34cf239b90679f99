"""Score entropy discrete diffusion: learn the ratios of a distribution over discrete sequences, and sample from them.

``sedd.train`` and ``sedd.load`` return a `Model` that samples, fills gaps and bounds the likelihood of a text. The
packages below it are imported by name, as in ``from sedd.diffusion import process, schedule``. ``import sedd`` alone
loads neither torch nor numpy.
"""

TYPE_CHECKING = False  # as type checkers read it; the module `typing` takes 10 ms, in which Ctrl-C is not handled yet
if TYPE_CHECKING:
    from sedd.api import Bound, Bounds, Model, Text, Texts, load, train

__version__ = "0.1.0"
__all__ = ["Bound", "Bounds", "Model", "Text", "Texts", "__version__", "load", "train"]
"""The public names, defined in `sedd.api`."""


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'sedd' has no attribute {name!r}; its names are {', '.join(__all__)}")
    from sedd import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
