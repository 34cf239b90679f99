"""The likelihood of sequences: the variational bound (ELBO), any-order, fixed-order, autoregressive.  [§6, §8]

`bound` bounds each row of a tensor, with a standard error each, and `estimate_likelihood` a data set, on one process or
many. Both average the draws of an `Estimator`.
"""

from sedd.likelihood.estimate import LikelihoodEstimate as LikelihoodEstimate
from sedd.likelihood.estimate import bound as bound
from sedd.likelihood.estimate import estimate_likelihood as estimate_likelihood
from sedd.likelihood.orders import AllOrdersEstimator as AllOrdersEstimator
from sedd.likelihood.orders import ImportanceWeightedEstimator as ImportanceWeightedEstimator
