"""Models that change what another model returns; each can be used wherever a model can."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd.parameterization import HiddenStateDenoiser
from sedd.process import Process
from sedd.reverse import denoised_probs
from sedd.schedule import Schedule


def is_denoiser(model: Any) -> bool:
    """Return whether a model predicts the clean token; of any other model the score implies p(x_0 | x)."""
    return model.is_denoiser if isinstance(model, Wrapper) else isinstance(model, HiddenStateDenoiser)


def base_model(model: Any) -> Any:
    """Return the model inside all wrappers."""
    return base_model(model.model) if isinstance(model, Wrapper) else model


def log_score_at(
    model: Any, hidden: Float[Tensor, "k h"], x: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
) -> Float[Tensor, "k n"]:
    """Return the log-score in float64, since long steps under uniform noise multiply rounding errors by e^Δσ."""
    log_score: Tensor = model.log_score_at(hidden, x, sigma)
    return log_score.double()


def implied_probs_at(
    model: Any, hidden: Float[Tensor, "k h"], x: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
) -> Float[Tensor, "k N"]:
    """Return the p(x_0 | x) that the score implies."""
    log_score = log_score_at(model, hidden, x, sigma)
    return denoised_probs(model.process, log_score[:, None], x[:, None], sigma)[:, 0]


def clean_probs_at(
    model: Any, hidden: Float[Tensor, "k h"], x: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
) -> Float[Tensor, "k N"]:
    """Return p(x_0 | x): a denoiser's own, or the one that the score implies."""
    if not is_denoiser(model):
        return implied_probs_at(model, hidden, x, sigma)
    log_mean: Tensor = model.log_mean_at(hidden, x, sigma)
    return log_mean.exp()


class Wrapper(nn.Module, ABC):
    """A model on top of another, with its process and schedule.

    Calling it returns log-scores, as for every model. A subclass says how it changes the log-score and p(x_0 | x) at
    some positions.

    Args:
        model: The model that is wrapped.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def process(self) -> Process:
        """The noise process."""
        process: Process = self.model.process
        return process

    @property
    def schedule(self) -> Schedule:
        """The noise schedule."""
        schedule: Schedule = self.model.schedule
        return schedule

    @property
    def depends_on_sigma(self) -> bool:
        """Whether `hidden` depends on the noise level."""
        return bool(self.model.depends_on_sigma)

    @property
    def networks_per_call(self) -> int:
        """Network calls per call of this model."""
        return networks_per_call(self.model)

    @property
    @abstractmethod
    def is_denoiser(self) -> bool:
        """Whether it predicts the clean token, rather than by its score."""

    def hidden(
        self, x_t: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b L h"]:
        """Return what `log_score_at` and `log_mean_at` are computed from, at every position."""
        hidden: Tensor = self.model.hidden(x_t, sigma, valid)
        return hidden

    @abstractmethod
    def log_score_at(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n"]:
        """Return the log-score at k positions."""

    @abstractmethod
    def log_mean_at(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k N"]:
        """Return log p(x_0 | x_t) at k positions."""

    def forward(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """Return the log-score at every position."""
        return self._everywhere(self.log_score_at, x_t, sigma)

    @final
    def log_mean(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L N"]:
        """Return log p(x_0 | x_t) at every position."""
        return self._everywhere(self.log_mean_at, x_t, sigma)

    def _everywhere(self, function_at: Callable[..., Tensor], x_t: Tensor, sigma: Tensor) -> Tensor:
        rows, length = x_t.reshape(-1, x_t.shape[-1]), x_t.shape[-1]
        hidden = self.hidden(rows, sigma.reshape(-1)).flatten(0, 1)
        found = function_at(hidden, rows.flatten(), sigma.reshape(-1).repeat_interleave(length))
        return found.view(*x_t.shape, -1)


def networks_per_call(model: Any) -> int:
    """Return the network calls per call of a model: two with guidance."""
    return model.networks_per_call if isinstance(model, Wrapper) else 1
