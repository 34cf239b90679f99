"""Names of schedules, processes, objectives, samplers, tokenizers and networks, and where their classes are defined.

A class is imported when its name is first used: listing the names imports nothing. Another package adds names through
entry points, whose groups are ``sedd.schedules``, ``sedd.processes``, ``sedd.objectives``, ``sedd.samplers``,
``sedd.tokenizers`` and ``sedd.networks``:

    [project.entry-points."sedd.samplers"]
    my-sampler = "my_package.samplers:MySampler"

Such names are accepted wherever the built-in ones are. This module does not import torch.
"""

import importlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, final

from sedd.terminal import warn


@final
@dataclass(frozen=True)
class Registry:
    """Names of one kind, and the classes or functions that they stand for."""

    kind: str
    """What the names are names of, for messages: ``schedule``, ``sampler`` …"""
    built_in: Mapping[str, str]
    """The names of this package, each with ``module:attribute``."""
    group: str | None = None
    """The entry-point group in which other packages add names; None: they cannot."""

    @cached_property
    def plugins(self) -> Mapping[str, list[EntryPoint]]:
        """The entry points of other packages by their names."""
        found: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=self.group) if self.group else ():
            found.setdefault(entry.name, []).append(entry)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the built-in ones first; nothing is imported."""
        return (*self.built_in, *(name for name in self.plugins if name not in self.built_in))

    def check(self, name: str, what: str | None = None) -> None:
        """Raise a ValueError for an unknown name.

        Args:
            name: The name.
            what: The option that was set, for the message; by default the kind.
        """
        if name not in self.names:
            raise ValueError(f"{what or self.kind} is {name!r}; choose one of {', '.join(self.names)}")

    def load(self, name: str, what: str | None = None) -> Any:
        """Import the class or function that ``name`` stands for; see `check` for ``what``."""
        self.check(name, what)
        plugins = self.plugins.get(name, [])
        packages = " and ".join(_package(entry) for entry in plugins)
        if name in self.built_in:
            if plugins:
                warn(f"{self.kind} {name} is built in; that of {packages} is ignored")
            module, _, attribute = self.built_in[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        if len(plugins) > 1:
            raise ValueError(f"{self.kind} {name} is defined by {packages}; uninstall all but one of them")
        try:
            return plugins[0].load()
        except Exception as error:  # whatever goes wrong while another package is imported
            raise ValueError(
                f"{self.kind} {name} cannot be imported from {packages} ({plugins[0].value}): "
                f"{type(error).__name__}: {error}; repair that package or uninstall it"
            ) from error


def _package(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist else "a package without a name"


SCHEDULES = Registry(
    "schedule",
    {
        "log-linear": "sedd.schedule:LogLinear",
        "geometric": "sedd.schedule:Geometric",
        "cosine": "sedd.schedule:Cosine",
        "polynomial": "sedd.schedule:Polynomial",
    },
    "sedd.schedules",
)
PROCESSES = Registry(
    "process",
    {
        "absorbing": "sedd.process:Absorbing",
        "uniform": "sedd.process:Uniform",
        "hybrid": "sedd.process:Hybrid",
        "frequency": "sedd.process:Frequency",
    },
    "sedd.processes",
)
OBJECTIVES = Registry(
    "objective",
    {
        "score-entropy": "sedd.objectives.score_matching:DenoisingScoreEntropy",
        "explicit-score-entropy": "sedd.exact.explicit_objectives:ExplicitScoreEntropy",
        "implicit-score-entropy": "sedd.objectives.score_matching:ImplicitScoreEntropy",
        "concrete-score": "sedd.objectives.score_matching:DenoisingConcreteScore",
        "explicit-concrete-score": "sedd.exact.explicit_objectives:ExplicitConcreteScore",
        "ratio-matching": "sedd.objectives.score_matching:RatioMatching",
        "mean": "sedd.objectives.x0_prediction:MeanCrossEntropy",
        "d3pm": "sedd.objectives.x0_prediction:D3PM",
        "t-dce": "sedd.objectives.x0_prediction:TimeDCE",
        "lambda-dce": "sedd.objectives.x0_prediction:LambdaDCE",
        "any-order": "sedd.objectives.x0_prediction:AnyOrder",
        "softmax-linear": "sedd.objectives.score_matching:SoftmaxLinear",
        "autoregressive": "sedd.objectives.x0_prediction:Autoregressive",
    },
    "sedd.objectives",
)
SAMPLERS = Registry(
    "sampler",
    {
        "first-hitting": "sedd.samplers.first_hitting:FirstHitting",
        "tweedie": "sedd.samplers.grid:Tweedie",
        "euler": "sedd.samplers.grid:Euler",
        "ancestral": "sedd.samplers.grid:Ancestral",
        "theta": "sedd.samplers.theta:Theta",
        "gibbs": "sedd.samplers.gibbs:Gibbs",
        "remask": "sedd.samplers.remasking:Remask",
        "ordered": "sedd.samplers.first_hitting:Ordered",
        "confidence": "sedd.samplers.confidence:Confident",
        "entropy": "sedd.samplers.confidence:EntropyBounded",
    },
    "sedd.samplers",
)


def sampler_options(sampler: str) -> dict[str, type]:
    """Return the options of a sampler, which are the fields of its class that have defaults, with their types."""
    return {f.name: type(f.default) for f in fields(SAMPLERS.load(sampler)) if f.default is not MISSING}


def check_sampler_options(sampler: str, options: Mapping[str, Any]) -> None:
    """Reject options that a sampler does not have, and values of the wrong type."""
    types = sampler_options(sampler)
    for option, value in options.items():
        if option not in types:
            raise ValueError(f"sampler {sampler} has no option {option}; it takes {', '.join(types) or 'none'}")
        if not isinstance(value, (int, float) if types[option] is float else types[option]):
            raise ValueError(
                f"option {option} of sampler {sampler} is {value!r}; it must be a {types[option].__name__}"
            )


TOKENIZERS = Registry(
    "tokenizer",
    {
        "bytes": "sedd.tokenizer.basic:Bytes",
        "chars": "sedd.tokenizer.basic:Characters",
        "ints": "sedd.tokenizer.basic:Integers",
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
NETWORKS = Registry("network", {}, "sedd.networks")
"""Networks of other packages, by name; `sedd.networks` finds those that are named by an import path."""
ARCHITECTURES = Registry(
    "network",
    {
        "reference": "sedd.nn.transformer:Reference",
        "modern": "sedd.nn.transformer:Modern",
    },
)
TIME_SAMPLERS = Registry(
    "train.time_sampling",
    {
        "uniform": "sedd.schedule:UniformTimes",
        "low-noise": "sedd.schedule:LowNoiseTimes",
        "bell": "sedd.schedule:bell_times",
    },
)
GRIDS = Registry(
    "grid",
    {
        "uniform": "sedd.samplers.base:uniform_grid",
        "cosine": "sedd.samplers.base:cosine_grid",
    },
)
ACTIVATION_CHECKPOINTING = Registry(
    "train.activation_checkpointing",
    {
        "none": "sedd.runtime.activation_checkpointing:none",
        "selective": "sedd.runtime.activation_checkpointing:selective",
        "full": "sedd.runtime.activation_checkpointing:full",
    },
)
