"""Divergences between a score s and a ratio a, both given as logarithms, and their sums over a vocabulary.

References: score entropy is that of Lou et al. 2024, arXiv 2310.16834; squared error that of concrete score matching,
Meng et al. 2022, arXiv 2211.00802.
"""

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.tensors import PerPosition, PerState

_ZERO = -70.0  # a ratio of e^−70 or less counts as 0: it is far below rounding, and 0·∞ cannot occur
_FAR = 30.0  # above it e^d may overflow where a·e^d = s does not


def K(a: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return K(a) = a(log a − 1), K(0) = 0: the constant that makes the score entropy 0 at s = a.  [§4]"""
    return torch.xlogy(a, a) - a


class Divergence(ABC):
    """A function D(s, a) of a score and a ratio, and its derivative; ``log_a = None`` stands for a = 0.

    The derivative is written out because autograd would save ten tensors of the size of the vocabulary.
    """

    @abstractmethod
    def value(self, log_s: Tensor, log_a: Tensor | None) -> Tensor:
        """D(s, a)."""

    @abstractmethod
    def slope(self, log_s: Tensor, log_a: Tensor | None) -> Tensor:
        """∂D/∂log s."""

    def __call__(self, log_s: Float[Tensor, "*s"], log_a: Float[Tensor, "*#s"]) -> Float[Tensor, "*s"]:
        """Return D(s, a) elementwise; any a may be 0."""
        each: Tensor = _Divergence.apply(self, None, log_s, log_a)  # type: ignore[no-untyped-call]
        return each

    def sum_except(
        self, excluded: Int[Tensor, "*b L k"], log_s: PerState, log_a: Float[Tensor, "*b L #n"] | None
    ) -> PerPosition:
        """Σ_y D(s_y, a_y) over the states y of a position that are not ``excluded``."""
        log_a = None if log_a is None else log_a.clamp_min(_ZERO)
        total: Tensor = _Divergence.apply(self, excluded, log_s, log_a)  # type: ignore[no-untyped-call]
        return total


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, divergence: Divergence, excluded: Tensor | None, log_s: Tensor, log_a: Any) -> Tensor:
        ctx.divergence = divergence
        ctx.save_for_backward(excluded, log_s, log_a)
        if excluded is None:
            near = divergence.value(log_s, log_a.clamp_min(_ZERO))
            return torch.where(log_a > _ZERO, near, divergence.value(log_s, None))
        return divergence.value(log_s, log_a).scatter_(-1, excluded, 0).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, None]:
        (excluded, log_s, log_a), slope = ctx.saved_tensors, ctx.divergence.slope
        if excluded is None:
            slope = torch.where(log_a > _ZERO, slope(log_s, log_a.clamp_min(_ZERO)), slope(log_s, None))
        else:
            slope, grad = slope(log_s, log_a).scatter_(-1, excluded, 0), grad[..., None]
        # 0 where grad is, even if the slope is infinite
        return None, None, torch.where(grad == 0, 0, slope * grad), None


@final
class ScoreEntropy(Divergence):
    """s − a log s + K(a) = a(e^d − 1 − d) with d = log s − log a: never negative, 0 exactly at s = a.  [§4]

    The second form is computed: in float32 the first loses all its digits to cancellation where s is near a.
    """

    def value(self, log_s: Tensor, log_a: Tensor | None) -> Tensor:
        """a(e^d − 1 − d), by its series d²/2·(1 + d/3·(1 + d/4·(…))) where |d| < 0.01; s where a = 0."""
        if log_a is None:
            return log_s.exp()
        d = log_s - log_a
        series = torch.ones_like(d)
        for n in range(8 if d.dtype == torch.float64 else 4, 2, -1):  # to 1e-16 and 1e-8 of the value
            series = series.mul_(d).div_(n).add_(1)
        series = series.mul_(d).mul_(d).div_(2)
        a = log_a.exp()
        near = torch.where(d.abs() < 0.01, series, torch.expm1(d).sub_(d)).mul_(a)
        return torch.where(d > _FAR, log_s.exp().sub_(a * (1 + d)), near)

    def slope(self, log_s: Tensor, log_a: Tensor | None) -> Tensor:
        """s − a = a(e^d − 1)."""
        if log_a is None:
            return log_s.exp()
        d, a = log_s - log_a, log_a.exp()
        return torch.where(d > _FAR, log_s.exp().sub_(a), torch.expm1(d).mul_(a))


@final
class Square(Divergence):
    """½(s − a)²: concrete score matching.  [§6]"""

    def value(self, log_s: Tensor, log_a: Tensor | None) -> Tensor:
        return _minus(log_s.exp(), log_a).square_().div_(2)

    def slope(self, log_s: Tensor, log_a: Tensor | None) -> Tensor:
        s = log_s.exp()
        return s * _minus(s, log_a)


@final
class SignedSquare(Divergence):
    """½(s − a)² of a score of any sign: its first argument is s itself, not log s, and its derivative in s.  [§6]"""

    def value(self, log_s: Tensor, log_a: Tensor | None) -> Tensor:
        return _minus(log_s, log_a).square().div_(2)

    def slope(self, log_s: Tensor, log_a: Tensor | None) -> Tensor:
        return _minus(log_s, log_a)


@final
class LinearDivergence(Divergence):
    """s − a·s + K(a): score entropy with s in place of log s, as in `softmax-linear`; not a divergence.  [§6]"""

    def value(self, log_s: Tensor, log_a: Tensor | None) -> Tensor:
        return self.slope(log_s, log_a) if log_a is None else self.slope(log_s, log_a).add_(K(log_a.exp()))

    def slope(self, log_s: Tensor, log_a: Tensor | None) -> Tensor:
        """s(1 − a)."""
        return log_s.exp() if log_a is None else log_s.exp().mul_(-torch.expm1(log_a))


def _minus(s: Tensor, log_a: Tensor | None) -> Tensor:
    return s if log_a is None else s - log_a.exp()


score_entropy = ScoreEntropy()
square = Square()
signed_square = SignedSquare()
linear = LinearDivergence()
