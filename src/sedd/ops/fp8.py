"""Matrix products in float8: every row of a matrix has a scale of its own, so that nothing need be remembered.

The definition, in torch. `pressed` makes the same eighths on CUDA, where `product` takes half the time of one in
bfloat16. Gradients of weights stay in the dtype of what they are products of: they are sums over all tokens, and what
is lost there is lost for good.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sedd.diffusion.precision import upcast
from sedd.runtime import device as card

LARGEST = 448.0
"""Of float8 with four bits of exponent and three of mantissa."""
LEAST = 1e-30
"""A row whose largest entry is less is taken for zeros."""


class Fp8Tensor(NamedTuple):
    """A matrix, rounded: values·scale, row by row."""

    values: Tensor
    scale: Float[Tensor, "m 1"]


def eighths(x: Float[Tensor, "m k"]) -> Fp8Tensor:
    """The nearest."""
    scale = upcast(x).abs().amax(-1, keepdim=True).clamp_min(LEAST).float() / LARGEST
    return Fp8Tensor((upcast(x) / scale).to(torch.float8_e4m3fn).contiguous(), scale)


def product(a: Fp8Tensor, b: Fp8Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Float[Tensor, "m n"]:
    """a bᵀ + bias: both are read along their rows."""
    if a.values.is_cuda:
        return torch._scaled_mm(
            a.values,
            b.values.t(),
            scale_a=a.scale,
            scale_b=b.scale.t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    said = (a.values.float() * a.scale) @ (b.values.float() * b.scale).t()
    return (said if bias is None else said + bias).to(dtype)


def linear(
    x: Float[Tensor, "*s k"],
    few: Fp8Tensor,
    weight: Float[Tensor, "n k"],
    bias: Float[Tensor, " n"] | None,
    back: bool,
) -> Float[Tensor, "*s n"]:
    """xWᵀ + b by the eighths of both, of which those of x are given; with ``back``, the gradient of x as well."""
    said: Tensor = _Linear.apply(x.flatten(0, -2), *few, weight, bias, back)  # type: ignore[no-untyped-call]
    return said.view(*x.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, back: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.back, ctx.biased = back, bias is not None
        return product(Fp8Tensor(values, scale), eighths(weight), x.dtype, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = product(eighths(dy), eighths(weight.t()), dy.dtype) if ctx.back else dy @ weight
        return dx, None, None, dy.t() @ x, dy.sum(0) if ctx.biased else None, None


def refusal(device: str, *sizes: int) -> str | None:
    """Why a network cannot multiply in eighths; None: it can."""
    if device == "cuda" and not card.has_fp8():
        return "float8 needs a GPU of compute capability 8.9 or more with Triton; use bfloat16"
    if odd := [size for size in sizes if size % 16]:
        return f"float8 needs a width that is a multiple of 16, and it is {odd[0]}; use bfloat16"
    return None
