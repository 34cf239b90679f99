"""Sweeps over sampling settings: ``steps=16,32,64``."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import final

from sedd import sampling_settings
from sedd.sampling_settings import SETTINGS, SamplingSettings, parse_setting, parse_value


@final
@dataclass(frozen=True)
class SweepPoint:
    """Sampling settings and the length of the samples."""

    settings: SamplingSettings
    length: int | None = None


def sweep_points(base: SweepPoint, sweeps: Sequence[str]) -> list[SweepPoint]:
    """Return ``base`` with every combination of the values in ``sweeps``; the first name varies slowest.

    Args:
        sweeps: Specifications of the form ``name=value,value``.
    """
    axes = [_parse_axis(spec) for spec in sweeps]
    points = []
    for values in product(*(values for _, values in axes)):
        point = base
        for (name, _), value in zip(axes, values, strict=True):
            point = _replace(point, name, value)
        points.append(point)
    return points


def swept_names(sweeps: Sequence[str]) -> list[str]:
    """Return the names of the swept settings."""
    return [_parse_axis(spec)[0] for spec in sweeps]


def _parse_axis(spec: str) -> tuple[str, list[str]]:
    name, equals, values = spec.partition("=")
    name, words = name.replace("-", "_"), values.split(",")
    if name not in (known := [*SETTINGS, "length", *sorted(set(_sampler_options()))]):
        raise ValueError(f"sweep is {spec!r}; choose one of {', '.join(known)}")
    if not equals or not all(words):
        raise ValueError(f"sweep is {spec!r}; write it as name=value,value, as in steps=16,32,64")
    return name, words


def _sampler_options() -> Iterator[str]:
    """Yield the names of all samplers' own options; a plugin that cannot be imported has none."""
    for name in sampling_settings.SAMPLERS.names:
        with suppress(ValueError):
            yield from sampling_settings.sampler_options(name)


def _replace(point: SweepPoint, name: str, text: str) -> SweepPoint:
    settings = point.settings
    try:
        if name == "length":
            return replace(point, length=int(text))
        if name in SETTINGS:
            return replace(point, settings=replace(settings, **{name: parse_setting(name, text)}))
        return replace(point, settings=replace(settings, options={**settings.options, name: parse_value(text)}))
    except ValueError as error:
        raise ValueError(f"sweep of {name} cannot take {text!r}: {error}") from None
