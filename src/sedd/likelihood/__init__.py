"""The likelihood of sequences: the variational bound (ELBO), any-order, fixed-order, autoregressive.  [§6, §8]

`bound` bounds each row of a tensor, with a standard error each. Below it, `bound_terms` is the bound at one time per
sequence, and an `Estimator` averages draws of a sequence. `estimate_likelihood` does so for a data set, on one process
or many.
"""

from sedd.likelihood.estimate import (
    LikelihoodEstimate,
    bound,
    build_estimator,
    estimate_difference,
    estimate_likelihood,
)
from sedd.likelihood.estimators import (
    AnyOrderEstimator,
    AutoregressiveEstimator,
    BoundEstimator,
    BoundTerms,
    DiffusionTermEstimator,
    Draw,
    Estimator,
    FixedOrderEstimator,
    bound_terms,
    default_estimator,
    times_by_noise,
)
from sedd.likelihood.orders import (
    AllOrdersEstimator,
    ImportanceWeightedEstimator,
    Orders,
    OwnSampleBounds,
    own_sample_bounds,
)
from sedd.likelihood.precision_check import PrecisionCheck, check_precision
from sedd.likelihood.variance_reduction import StratifiedTimes

__all__ = [
    "AllOrdersEstimator",
    "AnyOrderEstimator",
    "AutoregressiveEstimator",
    "BoundEstimator",
    "BoundTerms",
    "DiffusionTermEstimator",
    "Draw",
    "Estimator",
    "FixedOrderEstimator",
    "ImportanceWeightedEstimator",
    "LikelihoodEstimate",
    "Orders",
    "OwnSampleBounds",
    "PrecisionCheck",
    "StratifiedTimes",
    "bound",
    "bound_terms",
    "build_estimator",
    "check_precision",
    "default_estimator",
    "estimate_difference",
    "estimate_likelihood",
    "own_sample_bounds",
    "times_by_noise",
]
