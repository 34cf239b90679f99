"""How far a score s is from a ratio a, entry by entry, both given as logarithms."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], Tensor]
"""A function of (log s, log a), differentiable in log s; log a broadcasts to the shape of log s."""

_ZERO = -70.0  # a ratio of e^−70 or less is 0: far below any rounding, and 0·∞ stays away
_NEAR = 0.5  # |log s − log a| below which the series of e^d − 1 − d is used


def K(a: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """K(a) = a(log a − 1), K(0) = 0: what makes the score entropy of s = a zero.  [§4]"""
    return torch.xlogy(a, a) - a


def _remainder(d: Tensor) -> Tensor:
    """e^d − 1 − d for |d| ≤ ½, to full precision: d²/2·(1 + d/3·(1 + d/4·(…)))."""
    total = torch.ones_like(d)
    for n in range(14, 2, -1):  # ½^15/15! < 1e-16
        total = 1 + d / n * total
    return d * d / 2 * total


class _ScoreEntropy(torch.autograd.Function):
    """A function of its own because autograd would keep ten tensors of the size of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, log_score: Tensor, log_ratio: Tensor) -> Tensor:
        ctx.save_for_backward(log_score, log_ratio)
        d, a = _difference(log_score, log_ratio)
        far = log_score.exp() - torch.where(a > 0, a * (1 + d), 0)  # where: s = a = 0 is no error
        return torch.where(d.abs() < _NEAR, a * _remainder(d.clamp(-_NEAR, _NEAR)), far)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """∂/∂log s = s − a = a(e^d − 1)."""
        log_score, log_ratio = ctx.saved_tensors
        d, a = _difference(log_score, log_ratio)
        return grad * torch.where(d.abs() < 1, a * torch.expm1(d.clamp(-1, 1)), log_score.exp() - a), None


def _difference(log_score: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """d = log s − log a, kept finite where a is 0, and a."""
    return log_score - log_ratio.clamp_min(_ZERO), torch.where(log_ratio > _ZERO, log_ratio.exp(), 0)


def score_entropy(log_score: Float[Tensor, "*#s"], log_ratio: Float[Tensor, "*#s"]) -> Float[Tensor, "*#s"]:
    """s − a log s + K(a) = a(e^d − 1 − d) with d = log s − log a: never negative, 0 exactly at s = a.  [§4]

    The second form is the one computed: the first cancels to noise in float32 once the model is good.
    """
    value: Tensor = _ScoreEntropy.apply(log_score, log_ratio)  # type: ignore[no-untyped-call]
    return value


def square(log_score: Float[Tensor, "*#s"], log_ratio: Float[Tensor, "*#s"]) -> Float[Tensor, "*#s"]:
    """½(s − a)²: concrete score matching.  [§6]"""
    return (log_score.exp() - log_ratio.exp()) ** 2 / 2


def linear(log_score: Float[Tensor, "*#s"], log_ratio: Float[Tensor, "*#s"]) -> Float[Tensor, "*#s"]:
    """s − a·s + K(a): what `softmax-linear` puts where score entropy has its logarithm. No divergence.  [§6]"""
    ratio = log_ratio.exp()
    return log_score.exp() * (1 - ratio) + K(ratio)
