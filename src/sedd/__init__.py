"""Score entropy discrete diffusion: learn the ratios of a law over discrete sequences, and follow them.

``sedd.train`` and ``sedd.load`` give a `Model` that samples, fills gaps and says how likely a text is. What they are
made of are the rooms: ``from sedd import exact, objective, process, schedule``. Importing ``sedd`` alone costs nothing;
torch is loaded by what needs it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sedd.api import Bound, Bounds, Model, Text, Texts, load, train

__version__ = "0.1.0"
__all__ = ["Bound", "Bounds", "Model", "Text", "Texts", "__version__", "load", "train"]
"""The names that stay; `sedd.api` has them."""


def __getattr__(name: str) -> object:
    """A public name, when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'sedd' has no attribute {name!r}; its names are {', '.join(__all__)}")
    from sedd import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
