"""Names of schedules, processes, objectives, samplers, tokenizers and networks, and the classes they stand for.

A class is imported when its name is first used: to list the names imports nothing, not even torch. Another package adds
names by entry points, as in

    [project.entry-points."sedd.samplers"]
    my-sampler = "my_package.samplers:MySampler"
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, final

from sedd.schema import check_choice
from sedd.terminal import warn


@final
@dataclass(frozen=True, eq=False)
class Registry:
    """Names of one kind, and the classes or functions that they stand for."""

    kind: str  # for messages: ``schedule``, ``sampler`` …
    built_in: Mapping[str, str]  # each with ``module:attribute``, or an attribute of the module of ``base``
    group: str | None = None  # the entry points in which other packages add names; None: they cannot
    base: str = "builtins:object"  # of which classes of other packages must be subclasses

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
        return tuple(dict.fromkeys([*self.built_in, *self.plugins]))

    @cache  # noqa: B019  registries live as long as the process
    def load(self, name: str) -> Any:
        """Import the class or function that ``name`` stands for."""
        check_choice(self.kind, name, self.names)
        plugins = self.plugins.get(name, [])
        packages = " and ".join(f"the package {entry.dist and entry.dist.name}" for entry in plugins)
        if name in self.built_in:
            if plugins:
                warn(f"{self.kind} {name} is built in; that of {packages} is ignored")
            found, module = self.built_in[name], self.base.partition(":")[0]
            return resolve_name(found if ":" in found else f"{module}:{found}")
        if len(plugins) > 1:
            raise ValueError(f"{self.kind} {name} is defined by {packages}; uninstall all but one of them")
        try:
            found, base = plugins[0].load(), resolve_name(self.base)
        except Exception as error:  # whatever goes wrong while another package is imported
            raise ValueError(
                f"{self.kind} {name} cannot be imported from {packages} ({plugins[0].value}): "
                f"{type(error).__name__}: {error}; repair that package or uninstall it"
            ) from error
        if not (inspect.isclass(found) and issubclass(found, base)):
            raise ValueError(f"{self.kind} {name} of {packages} is {found!r}; it must be a subclass of {base.__name__}")
        return found

    def build(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Instantiate the class that ``name`` stands for; reject unknown and missing options."""
        found = self.load(name)
        parameters = list(inspect.signature(found).parameters.values())[len(arguments) :]
        named = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}
        if len(named) == len(parameters) and (unknown := ", ".join(sorted(options.keys() - named.keys()))):
            raise ValueError(f"{self.kind} {name} has no option {unknown}; it takes {', '.join(named) or 'none'}")
        if missing := [option for option, p in named.items() if p.default is p.empty and option not in options]:
            raise ValueError(f"{self.kind} {name} needs {', '.join(missing)}, which was not given")
        return found(*arguments, **options)


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
PARAMETERIZATIONS = Registry(
    "parameterization",
    {
        "score": "sedd.parameterization:ScoreModel",
        "signed-score": "sedd.parameterization:SignedScoreModel",
        "mean": "sedd.parameterization:MeanModel",
        "conditional": "sedd.parameterization:ConditionalModel",
        "causal": "sedd.parameterization:CausalModel",
    },
)
