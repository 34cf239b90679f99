"""The slow truth: laws written down in full, and everything about them by definition.

On a space small enough to enumerate there is nothing to estimate: `Distribution` knows its entropy, `Score` its ratios
at every noise, `definition` the expected value of every objective, `propagate` the law of any sampler. All of
it is float64, from matrix exponentials and Bayes' rule; none of it uses the closed forms it is there to check.
"""

from sedd.exact.bound import Bound, bound, integrate
from sedd.exact.distribution import Distribution, Score, Table, every, expm, index_of, transition_matrix
from sedd.exact.propagation import expect, propagate
from sedd.exact.sampler_distribution import sample_distribution, step_distribution, transition_table

__all__ = [
    "Bound",
    "Distribution",
    "Score",
    "Table",
    "bound",
    "every",
    "expect",
    "expm",
    "index_of",
    "integrate",
    "propagate",
    "sample_distribution",
    "step_distribution",
    "transition_matrix",
    "transition_table",
]
