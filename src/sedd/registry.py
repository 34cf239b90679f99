"""Names of schedules, processes, objectives, samplers, tokenizers and networks, and the classes they stand for.

A class is imported when its name is first used: to list the names imports nothing, not even torch. Another package adds
names through the entry-point groups ``sedd.schedules``, ``sedd.processes``, ``sedd.objectives``, ``sedd.samplers``,
``sedd.tokenizers`` and ``sedd.networks``:

    [project.entry-points."sedd.samplers"]
    my-sampler = "my_package.samplers:MySampler"

Such names are accepted wherever the built-in ones are.
"""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, final

from sedd.schema import check_choice
from sedd.terminal import warn


@final
@dataclass(frozen=True, eq=False)
class Registry:
    """Names of one kind, and the classes or functions that they stand for."""

    kind: str
    """What the names are names of, for messages: ``schedule``, ``sampler`` …"""
    built_in: Mapping[str, str]
    """The names of this package, each with ``module:attribute``."""
    group: str | None = None
    """The entry-point group in which other packages add names; None: they cannot."""
    base: str | None = None
    """The class, as ``module:attribute``, that all others must be subclasses of."""

    @cached_property
    def plugins(self) -> Mapping[str, list[EntryPoint]]:
        """The entry points of other packages by their names."""
        found: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=self.group) if self.group else ():
            found.setdefault(entry.name, []).append(entry)
        return found

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names, the built-in ones first."""
        return (*self.built_in, *(name for name in self.plugins if name not in self.built_in))

    @cache  # noqa: B019  registries live as long as the process
    def load(self, name: str) -> Any:
        """Import the class or function that ``name`` stands for."""
        check_choice(self.kind, name, self.names)
        plugins = self.plugins.get(name, [])
        packages = " and ".join(_package(entry) for entry in plugins)
        if name in self.built_in:
            if plugins:
                warn(f"{self.kind} {name} is built in; that of {packages} is ignored")
            return _import(self.built_in[name])
        if len(plugins) > 1:
            raise ValueError(f"{self.kind} {name} is defined by {packages}; uninstall all but one of them")
        try:
            found = plugins[0].load()
        except Exception as error:  # whatever goes wrong while another package is imported
            raise ValueError(
                f"{self.kind} {name} cannot be imported from {packages} ({plugins[0].value}): "
                f"{type(error).__name__}: {error}; repair that package or uninstall it"
            ) from error
        base = _import(self.base) if self.base else object
        if not (inspect.isclass(found) and issubclass(found, base)):
            raise ValueError(
                f"{self.kind} {name} is {found!r}; it must be a subclass of {base.__name__}: repair the package it is "
                "from"
            )
        return found

    def build(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Instantiate the class that ``name`` stands for; reject unknown and missing options."""
        found = self.load(name)
        parameters = dict(list(inspect.signature(found).parameters.items())[len(arguments) :])
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if not takes_any and (unknown := [option for option in options if option not in parameters]):
            raise ValueError(
                f"{self.kind} {name} has no option {', '.join(unknown)}; it takes {', '.join(parameters) or 'none'}"
            )
        required = [n for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if missing := [name for name in required if name not in options]:
            raise ValueError(f"{self.kind} {name} needs {', '.join(missing)}, which was not given")
        return found(*arguments, **options)


def _package(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist else "a package without a name"


def _import(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


TOKENIZERS = Registry(
    "tokenizer",
    {
        "bytes": "sedd.tokenizer.base:Bytes",
        "chars": "sedd.tokenizer.base:Characters",
        "ints": "sedd.tokenizer.base:Integers",
        "bpe": "sedd.tokenizer.bpe:BPE",
    },
    "sedd.tokenizers",
)
