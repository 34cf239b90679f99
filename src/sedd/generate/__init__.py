"""From a model to texts: noise, around whatever is given, followed back to tokens."""

from sedd.generate import template, trace
from sedd.generate.greedy import greedy
from sedd.generate.run import (
    GeneratedSequence,
    SamplingRun,
    SamplingSettings,
    SamplingStats,
    blank,
    finished,
    sample,
    steps_of,
    value_of,
)

__all__ = [
    "GeneratedSequence",
    "SamplingRun",
    "SamplingSettings",
    "SamplingStats",
    "blank",
    "finished",
    "greedy",
    "sample",
    "steps_of",
    "template",
    "trace",
    "value_of",
]
