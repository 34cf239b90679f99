"""Packages that import a submodule when one of its names is first used."""

import importlib
from collections.abc import Callable, Sequence


def lazy_names(package: str, modules: dict[str, Sequence[str]]) -> Callable[[str], object]:
    """Make the ``__getattr__`` of a package (PEP 562).

    Args:
        package: Its ``__name__``.
        modules: The names that the package exports from each submodule; submodules themselves are exported too.
    """
    source = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> object:  # noqa: N807
        if name in source:
            return getattr(importlib.import_module(f"{package}.{source[name]}"), name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
