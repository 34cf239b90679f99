"""Ways to sample that differ in named settings: ``steps=16,32,64``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, final

from sedd import factory
from sedd.generate import SamplingSettings, steps_of, value_of


@final
@dataclass(frozen=True)
class Way:
    """How to sample, and how long texts."""

    settings: SamplingSettings
    length: int | None = None


def _setting(name: str, of: Callable[[str], Any]) -> Callable[[Way, str], Way]:
    return lambda way, word: replace(way, settings=replace(way.settings, **{name: of(word)}))


def _sharpness(name: str, of: Callable[[str], Any]) -> Callable[[Way, str], Way]:
    def vary(way: Way, word: str) -> Way:
        return replace(way, settings=replace(way.settings, warping=replace(way.settings.warping, **{name: of(word)})))

    return vary


KEYS: Mapping[str, Callable[[Way, str], Way]] = {
    "steps": _setting("steps", steps_of),
    "sampler": _setting("sampler", str),
    "grid": _setting("grid", str),
    "seed": _setting("seed", int),
    "temperature": _sharpness("temperature", float),
    "top_p": _sharpness("top_p", float),
    "top_k": _sharpness("top_k", int),
    "label": _setting("label", str),
    "guidance": _setting("guidance", float),
    "length": lambda way, word: replace(way, length=int(word)),
}


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
    if name not in (*KEYS, *options):
        raise ValueError(f"sweep is {spec!r}; what can be varied is {', '.join([*KEYS, *options])}")
    if not equals or not all(words):
        raise ValueError(f"sweep is {spec!r}; write it as name=value,value, as in steps=16,32,64")
    return name, words


def _options() -> Iterator[str]:
    """The options that samplers have of their own."""
    own = {"model", "process", "schedule"}
    yield from (f.name for kind in factory.SAMPLERS.values() for f in fields(kind) if f.name not in own)


def _varied(way: Way, name: str, word: str) -> Way:
    try:
        if name in KEYS:
            return KEYS[name](way, word)
        settings = way.settings
        return replace(way, settings=replace(settings, options={**settings.options, name: value_of(word)}))
    except ValueError as error:
        raise ValueError(f"sweep of {name} cannot take {word!r}: {error}") from None
