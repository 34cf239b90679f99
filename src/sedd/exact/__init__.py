"""Exact computation on small spaces by enumeration: the oracle of the tests.

`Distribution` has its entropy and noisy marginals, `Score` its ratios at every noise level, `bound` is the expected
value of the likelihood bound, `sample_distribution` the distribution of every sampler, `reverse_distribution` that of
a model's reverse process. They are float64, from matrix exponentials and Bayes' rule; none uses the closed forms that
it checks. `expected_loss` is the expected value of an objective, as training computes it.
"""

from sedd.exact.distribution import Distribution as Distribution
from sedd.exact.distribution import Score as Score
from sedd.exact.distribution import Table as Table
from sedd.exact.distribution import all_sequences as all_sequences
from sedd.exact.distribution import expect as expect
from sedd.exact.distribution import expm as expm
from sedd.exact.distribution import index_of as index_of
from sedd.exact.distribution import pairs as pairs
from sedd.exact.distribution import propagate as propagate
from sedd.exact.distribution import transition_matrix as transition_matrix
from sedd.exact.objectives import bound as bound
from sedd.exact.objectives import expected_loss as expected_loss
from sedd.exact.objectives import integrate as integrate
from sedd.exact.sampler_distribution import reverse_distribution as reverse_distribution
from sedd.exact.sampler_distribution import sample_distribution as sample_distribution
from sedd.exact.sampler_distribution import step_distribution as step_distribution
from sedd.exact.sampler_distribution import transition_table as transition_table
