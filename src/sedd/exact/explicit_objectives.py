"""Explicit objectives: losses against the true ratios of a known distribution.  [§6]"""

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float, Int
from torch import Tensor

from sedd import divergence
from sedd.exact.distribution import Distribution, Score
from sedd.objectives.base import Integral
from sedd.objectives.coefficients import weighted
from sedd.parameterization import LogScoreModel
from sedd.process import Process


@dataclass(frozen=True)
class ExplicitObjective(Integral[LogScoreModel], ABC):
    """A loss against the true ratios of ``distribution``; x_0 serves to draw x_t only."""

    is_bound: ClassVar[bool] = False
    distribution: Distribution

    def check_process(self, process: Process) -> None:
        """Raise ValueError for a distribution over another vocabulary."""
        Score(self.distribution, process)

    def _log_ratio(self, process: Process, x_t: Tensor, sigma: Tensor) -> Tensor:
        ratio: Tensor = Score(self.distribution, process)(x_t, sigma)
        return ratio


@final
@dataclass(frozen=True)
class ExplicitScoreEntropy(ExplicitObjective):
    """Explicit score entropy: 0 exactly at the true ratios.  [§6]"""

    def loss(
        self, model: LogScoreModel, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """σ'·Σ_{y≠x_i} Q(x_i, y)·[s_y − a_y log s_y + K(a_y)], a the true ratios."""
        sigma, rate = model.schedule(t)
        log_ratio = self._log_ratio(model.process, x_t, sigma)
        loss = model.process.explicit(divergence.score_entropy, model(x_t, sigma), log_ratio, x_t)
        return weighted(rate, loss)


@final
@dataclass(frozen=True)
class ExplicitConcreteScore(ExplicitObjective):
    """Explicit concrete score matching, against the true ratios.  [§6]"""

    def loss(
        self, model: LogScoreModel, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """σ'·½ Σ_{y≠x_i} Q(x_i, y)·(s_y − a_y)², a the true ratios."""
        sigma, rate = model.schedule(t)
        log_ratio = self._log_ratio(model.process, x_t, sigma)
        loss = model.process.explicit(divergence.square, model(x_t, sigma), log_ratio, x_t)
        return weighted(rate, loss)
