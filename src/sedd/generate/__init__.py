"""From a model to texts: noise, around whatever is given, followed back to tokens."""

from sedd.generate import picture, template
from sedd.generate.greedy import greedy
from sedd.generate.job import Filled, Job, Settings, Tally, blank, finished, sample, steps_of, value_of

__all__ = [
    "Filled",
    "Job",
    "Settings",
    "Tally",
    "blank",
    "finished",
    "greedy",
    "picture",
    "sample",
    "steps_of",
    "template",
    "value_of",
]
