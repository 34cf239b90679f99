"""Exact computation on small spaces by enumeration: the oracle of the tests.

`Distribution` has its entropy and noisy marginals, `Score` its ratios at every noise level, `objectives` the expected
value of every objective, `bound` that of the likelihood bound, `sample_distribution` the distribution of every
sampler, `reverse_distribution` that of a model's reverse process.
All of it is float64, from matrix exponentials and Bayes' rule; none of it uses the closed forms that it checks.
"""

from sedd.exact.distribution import (
    Distribution,
    Score,
    Table,
    all_sequences,
    expect,
    expm,
    index_of,
    pairs,
    propagate,
    transition_matrix,
)
from sedd.exact.objectives import ExactBound, bound, integrate
from sedd.exact.sampler_distribution import (
    reverse_distribution,
    sample_distribution,
    step_distribution,
    transition_table,
)

__all__ = [
    "Distribution",
    "ExactBound",
    "Score",
    "Table",
    "all_sequences",
    "bound",
    "expect",
    "expm",
    "index_of",
    "integrate",
    "pairs",
    "propagate",
    "reverse_distribution",
    "sample_distribution",
    "step_distribution",
    "transition_matrix",
    "transition_table",
]
