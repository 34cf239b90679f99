"""Guidance: a model pushed from what it says without a label towards, and beyond, what it says with one.  [§9]

What a model says is what is mixed: log-scores of a score model, log p(x_0 | x) of a denoiser. Under absorbing noise
that is the same; under uniform noise it is not, and each has a law of its own.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.diffusion.parameterization import HiddenStateDenoiser, HiddenStateModel
from sedd.diffusion.process import Process, between
from sedd.sampling.warping import Tempered, everywhere


@dataclass(frozen=True)
class Guided(ABC):
    """Two models asked as one; `guided` makes the one that fits them.

    At weight γ = 1 it says what ``given`` says, towards 0 what ``free`` says, beyond 1 it goes on in that direction.
    """

    free: HiddenStateModel
    """The model that is told no label."""
    given: HiddenStateModel
    """The same, told one."""
    process: Process
    weight: float

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"guidance is {self.weight}; it must be above 0, where 1 is the law of the label itself")

    @property
    def depends_on_sigma(self) -> bool:
        """As the models'."""
        return self.free.depends_on_sigma or self.given.depends_on_sigma

    def hidden(
        self, x_t: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b L h"]:
        """What both heads read, side by side."""
        return torch.cat([model.hidden(x_t, sigma, valid) for model in (self.free, self.given)], -1)

    @abstractmethod
    def log_score_at(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n"]:
        """The guided log-score."""

    def __call__(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """The guided log-score, everywhere: for proofs."""
        return everywhere(self.hidden, self.log_score_at, x_t, sigma)


@final
class GuidedScore(Guided):
    """Of scores."""

    def log_score_at(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n"]:
        """(1 − γ)·log s(x) + γ·log s(x | label), normalised as the process has it."""
        free, given = hidden.chunk(2, -1)
        scores = self.free.log_score_at(free, x_t, sigma), self.given.log_score_at(given, x_t, sigma)
        return self.process.guided(*scores, self.weight)


@final
@dataclass(frozen=True)
class GuidedMean(Guided):
    """Of denoisers."""

    free: HiddenStateDenoiser
    given: HiddenStateDenoiser

    def log_mean_at(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k N"]:
        """log p(x_0 | x)^(1−γ)·p(x_0 | x, label)^γ, normalised."""
        free, given = hidden.chunk(2, -1)
        means = self.free.log_mean_at(free, x_t, sigma), self.given.log_mean_at(given, x_t, sigma)
        return between(*means, self.weight).log_softmax(-1)

    def log_score_at(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n"]:
        """The score of that law."""
        log_mean = self.log_mean_at(hidden, x_t, sigma)
        return self.process.mean_score(log_mean[:, None], x_t[:, None], sigma)[:, 0]

    def log_mean(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L N"]:
        """The guided law of the clean token, everywhere: for proofs."""
        return everywhere(self.hidden, self.log_mean_at, x_t, sigma)


def guided(free: HiddenStateModel, given: HiddenStateModel, process: Process, weight: float) -> Guided:
    """A model guided from what ``free`` says towards what ``given`` says, and beyond it for weights above 1."""
    if isinstance(free, HiddenStateDenoiser) and isinstance(given, HiddenStateDenoiser):
        return GuidedMean(free, given, process, weight)
    return GuidedScore(free, given, process, weight)


def passes(model: object) -> int:
    """How often the network runs for one question to ``model``."""
    match model:
        case Guided():
            return passes(model.free) + passes(model.given)
        case Tempered():
            return passes(model.model)
    return 1
