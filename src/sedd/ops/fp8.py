"""Float8 (e4m3) matrix products with rowwise scales, which need no history of maxima; `fp8_triton` quantizes on CUDA.

`scaled_mm` takes half the time of a bfloat16 product. Gradients of weights stay in the dtype of their factors: they are
sums over all tokens, where rounding errors of float8 would add up.

Reference: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sedd.runtime import device as devices
from sedd.tensors import upcast

FP8_MAX = 448.0  # largest number of float8 e4m3
MIN_ABS_MAX = 1e-30  # lower bound of a row's largest absolute value: smaller rows become 0


class Fp8Tensor(NamedTuple):
    """A quantized matrix: values·scale, with one scale per row."""

    values: Tensor
    scale: Float[Tensor, "m 1"]


def quantize_rowwise(x: Float[Tensor, "m k"]) -> Fp8Tensor:
    """Quantize rows to float8 e4m3, one scale per row."""
    scale = upcast(x).abs().amax(-1, keepdim=True).clamp_min(MIN_ABS_MAX).float() / FP8_MAX
    return Fp8Tensor((upcast(x) / scale).to(torch.float8_e4m3fn).contiguous(), scale)


def scaled_mm(a: Fp8Tensor, b: Fp8Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Float[Tensor, "m n"]:
    """Compute a·bᵀ + bias."""
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
    product = (a.values.float() * a.scale) @ (b.values.float() * b.scale).t()
    return (product if bias is None else product + bias).to(dtype)


def fp8_linear(
    x: Float[Tensor, "*s k"], x_fp8: Fp8Tensor, weight: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None
) -> Float[Tensor, "*s n"]:
    """Compute x·weightᵀ + bias from quantized ``x``; its gradient is a float8 product too, the weight's is not."""
    y: Tensor = _Fp8Linear.apply(x.flatten(0, -2), *x_fp8, weight, bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], len(weight))


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return scaled_mm(Fp8Tensor(values, scale), quantize_rowwise(weight), x.dtype, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = scaled_mm(quantize_rowwise(dy), quantize_rowwise(weight.t()), dy.dtype)
        return dx, None, None, dy.t() @ x, dy.sum(0) if ctx.has_bias else None


def check_supported(device: str, width: int) -> None:
    """Raise ValueError where float8 cannot be used: on an older GPU, or with this width."""
    if device == "cuda" and not (devices.has_triton() and torch.cuda.get_device_capability() >= (8, 9)):
        raise ValueError("float8 needs a GPU of compute capability 8.9 or more with Triton; use bfloat16")
    if width % 16:
        raise ValueError(f"float8 needs a width that is a multiple of 16, and it is {width}; use bfloat16")
