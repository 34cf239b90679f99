"""Score entropy discrete diffusion: learn the ratios of a distribution over discrete sequences, and sample from them.

`Diffusion` makes a model of any network: it trains, samples, infills and bounds. `train` and `load` return a `Model`,
which does the same with text. The parts of both are here too: processes, schedules, objectives, parameterizations,
samplers and wrappers of models. ``import sedd`` alone loads neither torch nor numpy.
"""

__version__ = "0.1.0"
with open(f"{__file__}i", encoding="utf-8") as _stub:  # its imports are those that type checkers read
    _MODULES = {line.split()[-1]: line.split()[1] for line in _stub if line.startswith("from ")}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'sedd' has no attribute {name!r}; its names are {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
