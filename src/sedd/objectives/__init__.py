"""Training objectives.  [§4, §6]

An objective samples times (`times`), corrupts the data (`corrupt`) and computes the loss of the model (`loss`);
calling it does the three in turn, with the process and the schedule of the model:

    loss = LambdaDCE()(model, x_0, generator=generator)    # nats, (*b, L)

Sum it over positions and average it over the batch. Where ``is_bound`` is true, that sum is in expectation the
diffusion term of an upper bound on −log p(x_0), with any schedule.  [§8]
"""

from sedd.objectives.base import Integral, Masked, Objective
from sedd.objectives.coefficients import Coefficients, CrossEntropyTerms, ScoreEntropyTerms
from sedd.objectives.score_matching import (
    DenoisingConcreteScore,
    DenoisingScoreEntropy,
    ImplicitScoreEntropy,
    RatioMatching,
    SoftmaxLinear,
)
from sedd.objectives.x0_prediction import D3PM, AnyOrder, Autoregressive, LambdaDCE, MeanCrossEntropy, TimeDCE

__all__ = [
    "D3PM",
    "AnyOrder",
    "Autoregressive",
    "Coefficients",
    "CrossEntropyTerms",
    "DenoisingConcreteScore",
    "DenoisingScoreEntropy",
    "ImplicitScoreEntropy",
    "Integral",
    "LambdaDCE",
    "Masked",
    "MeanCrossEntropy",
    "Objective",
    "RatioMatching",
    "ScoreEntropyTerms",
    "SoftmaxLinear",
    "TimeDCE",
]
