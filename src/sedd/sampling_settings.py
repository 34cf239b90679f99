"""Sampling settings, declared once: the command line, the Python API and sweeps all derive their options from here."""

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, TypeVar, final

from sedd.registry import Registry
from sedd.schema import MAX_VOCABULARY, check_choice, check_count, check_seed

F = TypeVar("F", bound=Callable[..., Any])

GRIDS = Registry("grid", {"uniform": "sedd.samplers:uniform_grid", "cosine": "sedd.samplers:cosine_grid"})
SAMPLERS = Registry(
    "sampler",
    {
        "first-hitting": "FirstHitting",
        "tweedie": "Tweedie",
        "euler": "Euler",
        "ancestral": "Ancestral",
        "theta": "Theta",
        "gibbs": "Gibbs",
        "remask": "Remask",
        "ordered": "Ordered",
        "confidence": "Confident",
        "entropy": "EntropyBounded",
    },
    "sedd.samplers",
    "sedd.samplers:Sampler",
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
            raise ValueError(f"option {option} of sampler {sampler} is {value!r}, not a {types[option].__name__}")


def parse_steps(text: str) -> int | None:
    """Read a number of steps, or None from ``inf``."""
    if text != "inf" and not text.isdecimal():
        raise ValueError(f"steps is {text!r}; give a number of 1 or more, or inf")
    return None if text == "inf" else int(text)


def parse_value(text: str) -> int | float | str:
    """Read the value of a sampler's option: a number where the text is one."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _setting(default: Any, parse: Callable[[str], Any], help: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": help})


@final
@dataclass(frozen=True)
class SamplingSettings:
    """How to sample from a model.

    Values that depend on the model are checked when a `samplers.SamplingRun` is built, before anything is sampled.
    """

    sampler: str | None = _setting(
        None,
        str,
        f"Sampler: {', '.join(SAMPLERS.names)}. confidence and entropy sample the model's distribution only "
        "with one token per step and exact conditionals. Default: first-hitting for denoisers under absorbing noise, "
        "ancestral for denoisers under other noise, tweedie for scores.",
    )
    steps: int | None = _setting(
        128, parse_steps, "Sampling steps; inf (None in Python) reveals one token at a time, without a time grid."
    )
    grid: str = _setting("uniform", str, "Time grid: uniform, cosine, or times from 1 down to 0, as in 1,0.6,0.2,0.")
    seed: int = _setting(0, int, "Random seed. A sample depends on the seed and its own index only, not on the batch.")
    temperature: float = _setting(
        1.0, float, "Temperature of the distribution of the clean token; below 1 sharpens it."
    )
    top_p: float = _setting(
        1.0, float, "Nucleus sampling: draw from the fewest tokens whose probabilities reach this sum."
    )
    top_k: int | None = _setting(None, int, "Draw from the k most probable tokens only.")
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the sampler itself, such as theta=0.5."""
    label: str | None = _setting(None, str, "Label to condition on, for a model trained with labels.")
    guidance: float = _setting(
        1.0,
        float,
        "Classifier-free guidance weight: 0 ignores the label, 1 samples given the label, above 1 strengthens it.",
    )

    def __post_init__(self) -> None:
        if self.sampler is not None:
            check_choice("sampler", self.sampler, SAMPLERS.names)
            if self.options:
                check_sampler_options(self.sampler, self.options)
        if self.steps is not None:
            check_count("steps", self.steps)
        if "," not in self.grid:
            check_choice("grid", self.grid, GRIDS.names)
        check_seed(self.seed)
        check_warping(self.temperature, self.top_p, self.top_k)
        if not 0 <= self.guidance < math.inf:
            raise ValueError(f"guidance is {self.guidance}; it must be 0 or more, where 1 samples given the label")
        if self.label is None and self.guidance != 1:
            raise ValueError(f"guidance is {self.guidance}, and there is no label; give one, or leave guidance out")

    @staticmethod
    def of(**values: Any) -> "SamplingSettings":
        """Build settings from keyword arguments; those that are not fields are options of the sampler."""
        known = {name: values.pop(name) for name in SETTINGS if name in values}
        return SamplingSettings(**known, options=values)


def check_warping(temperature: float, top_p: float, top_k: int | None) -> None:
    """Reject a temperature, top-p or top-k that leaves nothing to draw."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (near 0 is the likeliest token)")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it is a probability and must lie in (0, 1]")
    if top_k is not None:
        check_count("top_k", top_k, most=MAX_VOCABULARY)


def check_length(length: int | None, longest: int) -> None:
    """Reject a number of tokens that a model of sequences of ``longest`` tokens does not generate."""
    if length is not None and not 1 <= length <= longest:
        raise ValueError(f"length is {length}; this model generates 1 to {longest} tokens")


SETTINGS = {f.name: f for f in fields(SamplingSettings) if "help" in f.metadata}  # all but ``options``


def parse_options(texts: list[str] | None) -> dict[str, int | float | str]:
    """Read options of a sampler from texts of the form ``name=value``."""
    options = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"option is {text!r}; write it as name=value, as in theta=0.5")
        options[name] = parse_value(value)
    return options


def shows_settings(function: F) -> F:
    """Show the fields of `SamplingSettings` in the signature of a function that takes them as ``**settings``."""
    signature = inspect.signature(function)
    *own, rest = signature.parameters.values()
    new = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    shown = [new(name, default=setting.default, annotation=setting.type) for name, setting in SETTINGS.items()]
    parameters = [*own, *shown, rest.replace(name="options")]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function
