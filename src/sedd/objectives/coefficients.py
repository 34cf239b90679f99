"""The coefficients of a loss: everything in it but the network's output.

An objective computes them once per batch. Its plain loss applies them to log-probabilities or log-scores, and
`ops.fused_loss` applies the same ones to the logits, inside the head.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.parameterization import Denoiser, DiscreteModel
from sedd.process import Process, at_token, log_odds


def weighted(weight: Tensor, loss: Tensor) -> Tensor:
    """Multiply the loss of every position by the weight of its row."""
    return weight.to(loss.dtype)[..., None] * loss


@dataclass(frozen=True)
class Coefficients(ABC):
    """A loss per position, as a function of what a model returns."""

    x_t: Int[Tensor, "*b L"]
    """The noisy tokens, on which the network is called."""
    x_0: Int[Tensor, "*b L"]
    """The clean tokens."""
    sigma: Float[Tensor, "*b"]
    """The noise level at which it is called."""
    weight: Float[Tensor, "*b"]
    """The weight of each sequence's loss."""
    counts: Bool[Tensor, "*b L"] | None
    """False where the loss is 0 whatever the model returns; None: no position is."""

    @abstractmethod
    def output(self, model: Any) -> Tensor:
        """Return what the loss of this model is computed from."""

    @abstractmethod
    def loss(self, output: Tensor) -> Float[Tensor, "*b L"]:
        """Return the loss of every position, in nats."""

    @abstractmethod
    def of_logits(self, model: DiscreteModel) -> "Coefficients | None":
        """Return the coefficients of the same loss of the model's logits; None: logits alone do not determine it."""


@final
@dataclass(frozen=True)
class CrossEntropyTerms(Coefficients):
    """−weight·log p(x_0): what every objective on the clean token is, each with a weight of its own.  [§6]"""

    def output(self, model: Any) -> Float[Tensor, "*b L N"]:
        """log p(x_0 | x_t)."""
        log_p: Tensor = model.log_mean(self.x_t, self.sigma)
        return log_p

    def loss(self, output: Float[Tensor, "*b L N"]) -> Float[Tensor, "*b L"]:
        """−weight·log p(x_0) where it counts."""
        loss = -at_token(output, self.x_0)
        return weighted(self.weight, loss if self.counts is None else torch.where(self.counts, loss, 0))

    def of_logits(self, model: DiscreteModel) -> "CrossEntropyTerms | None":
        """Return these coefficients if log p is the log-softmax of the logits."""
        return self if model.logits_are_log_p else None


@final
@dataclass(frozen=True)
class ScoreEntropyTerms(Coefficients):
    """weight·Σ_{y≠x_t} Q(x_t, y)·[s_y − a_y log s_y + K(a_y)]: the denoising score entropy.  [§4]"""

    process: Process

    def output(self, model: Any) -> Float[Tensor, "*b L n"]:
        """log s."""
        log_score: Tensor = model(self.x_t, self.sigma)
        return log_score

    def loss(self, output: Float[Tensor, "*b L n"]) -> Float[Tensor, "*b L"]:
        """Score entropy against the denoising ratios."""
        return weighted(self.weight, self.process.score_entropy(output, self.x_t, self.x_0, self.sigma))

    def of_logits(self, model: DiscreteModel) -> Coefficients | None:
        """For a denoiser of masks, return a cross entropy: score entropy is then −log p(x_0)/(e^σ − 1).  [§7]"""
        if isinstance(model, Denoiser) and model.logits_are_log_p:
            weight = self.weight * torch.exp(-log_odds(self.sigma))
            return CrossEntropyTerms(self.x_t, self.x_0, self.sigma, weight, self.counts)
        return self if model.logits_are_scores and self.process.has_fused_forms else None
