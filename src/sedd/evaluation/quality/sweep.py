"""Ways to sample that differ in named settings: ``steps=16,32,64``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import final

from sedd import registry
from sedd.generate.settings import SETTINGS, SamplingSettings, parse_setting, parse_value


@final
@dataclass(frozen=True)
class Way:
    """How to sample, and how long texts."""

    settings: SamplingSettings
    length: int | None = None


def ways(base: Way, sweeps: Sequence[str]) -> list[Way]:
    """``base`` with every choice of the values that each ``name=value,value`` gives; the first name varies slowest."""
    axes = [_axis(spec) for spec in sweeps]
    found = []
    for chosen in product(*(words for _, words in axes)):
        way = base
        for (name, _), word in zip(axes, chosen, strict=True):
            way = _varied(way, name, word)
        found.append(way)
    return found


def names(sweeps: Sequence[str]) -> list[str]:
    """What is varied."""
    return [_axis(spec)[0] for spec in sweeps]


def _axis(spec: str) -> tuple[str, list[str]]:
    name, equals, values = spec.partition("=")
    name, words = name.replace("-", "_"), values.split(",")
    options = sorted(set(_options()))
    if name not in (known := [*SETTINGS, "length", *options]):
        raise ValueError(f"sweep is {spec!r}; what can be varied is {', '.join(known)}")
    if not equals or not all(words):
        raise ValueError(f"sweep is {spec!r}; write it as name=value,value, as in steps=16,32,64")
    return name, words


def _options() -> Iterator[str]:
    """The options that samplers have of their own; a plugin that cannot be imported has none."""
    own = {"model", "process", "schedule"}
    for name in registry.SAMPLERS.names:
        try:
            kind = registry.SAMPLERS.load(name)
        except ValueError:
            continue
        yield from (f.name for f in fields(kind) if f.name not in own)


def _varied(way: Way, name: str, word: str) -> Way:
    try:
        settings = way.settings
        if name == "length":
            return replace(way, length=int(word))
        if name in SETTINGS:
            return replace(way, settings=replace(settings, **{name: parse_setting(name, word)}))
        return replace(way, settings=replace(settings, options={**settings.options, name: parse_value(word)}))
    except ValueError as error:
        raise ValueError(f"sweep of {name} cannot take {word!r}: {error}") from None
