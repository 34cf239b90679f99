"""The likelihood of sequences: the bound of diffusion in three terms, any order, one order, left to right.  [§8]

`terms` is the bound at one time a sequence. An `Estimator` makes a likelihood of looks at a sequence, `estimate` looks
at many sequences, on one process or many, and says how far its mean may be off.
"""

from sedd.likelihood.bound import Terms, early_noise, early_times, terms
from sedd.likelihood.estimate import Estimate, estimate
from sedd.likelihood.estimators import AnyOrder, Bound, Drawn, Estimator, LeftToRight, OneOrder, Published
from sedd.likelihood.variance_reduction import Design

__all__ = [
    "AnyOrder",
    "Bound",
    "Design",
    "Drawn",
    "Estimate",
    "Estimator",
    "LeftToRight",
    "OneOrder",
    "Published",
    "Terms",
    "early_noise",
    "early_times",
    "estimate",
    "terms",
]
