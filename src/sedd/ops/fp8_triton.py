"""Triton kernels that quantize rows to float8: a program reads whole rows, so their maximum is known when it writes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.ops.activation_triton import ACTIVATION_IDS, activation_and_slope
from sedd.ops.fp8 import FP8_MAX, MIN_ABS_MAX, Fp8Tensor
from sedd.runtime.device import cdiv, next_power_of_2

# mypy: disable-error-code=assignment

COLUMNS = 1024  # entries of a row per load, at most
ROWS, WARPS = 4, 4  # rows and warps per program
BACKWARD_ROWS, SUM_ROWS = 2, 64
"""Rows per program of the backward pass of the activation; the second where it also sums over rows."""
NO_ACTIVATION = -1


def empty_rowwise(x: Tensor, width: int | None = None) -> Fp8Tensor:
    """Allocate the quantized form of a matrix, or of one with as many rows and another width."""
    values = x.new_empty(len(x), x.shape[1] if width is None else width, dtype=torch.float8_e4m3fn)
    return Fp8Tensor(values, x.new_empty(len(x), 1, dtype=torch.float32))


def quantize(x: Tensor) -> Fp8Tensor:
    """Quantize rows; see `fp8.quantize_rowwise`."""
    return _launch(x.contiguous(), NO_ACTIVATION)


def activate_and_quantize(z: Tensor, activation: str) -> Fp8Tensor:
    """Apply an activation and quantize its rows, without rounding in between."""
    return _launch(z, ACTIVATION_IDS[activation])


def activation_backward_and_quantize(
    z: Tensor, d_inner: Tensor, activation: str, sum_columns: bool
) -> tuple[Tensor, Tensor, Tensor | None, Fp8Tensor]:
    """Return what `activation_triton.activation_backward` does, and the gradient of z, quantized before rounding."""
    m, k = z.shape
    inner, quantized = torch.empty_like(z), empty_rowwise(z)
    columns, rows = min(COLUMNS, next_power_of_2(k)), SUM_ROWS if sum_columns else BACKWARD_ROWS
    programs = cdiv(m, rows)
    sums = z.new_empty(programs, k, dtype=torch.float32) if sum_columns else None
    _activation_backward_and_quantize[(programs,)](
        z, d_inner, inner, *quantized, d_inner if sums is None else sums, m, k, FP8_MAX=FP8_MAX,
        MIN_ABS_MAX=MIN_ABS_MAX, C=columns, N=cdiv(k, columns), ACTIVATION=ACTIVATION_IDS[activation],
        SUM_COLUMNS=sum_columns, ROWS=rows, num_warps=WARPS,
    )  # fmt: skip
    return inner, d_inner, None if sums is None else sums.sum(0), quantized


def _launch(x: Tensor, activation: int) -> Fp8Tensor:
    m, k = x.shape
    out = empty_rowwise(x)
    columns = min(COLUMNS, next_power_of_2(k))
    _quantize[(cdiv(m, ROWS),)](
        x, *out, m, k, FP8_MAX=FP8_MAX, MIN_ABS_MAX=MIN_ABS_MAX, C=columns, N=cdiv(k, columns),
        ACTIVATION=activation, ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _quantize(
    x, values, scale, m, width, FP8_MAX: tl.constexpr, MIN_ABS_MAX: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, C)
    top = tl.program_id(0) * ROWS
    for row in range(top, tl.minimum(top + ROWS, m)):
        at = row * width.to(tl.int64) + col
        parts = ()
        highest = tl.full([C], MIN_ABS_MAX, tl.float32)
        for i in tl.static_range(N):
            part = tl.load(x + at + i * C, mask=i * C + col < width, other=0).to(tl.float32)
            if ACTIVATION >= 0:
                part, _ = activation_and_slope(part, ACTIVATION)
            parts = parts + (part,)  # noqa: RUF005  (Triton cannot unpack)
            highest = tl.maximum(highest, tl.abs(part))
        abs_max = tl.max(highest, 0)
        tl.store(scale + row, abs_max / FP8_MAX)
        for i in tl.static_range(N):
            quantized = (parts[i] * (FP8_MAX / abs_max)).to(values.dtype.element_ty)
            tl.store(values + at + i * C, quantized, mask=i * C + col < width)


@triton.jit
def _activation_backward_and_quantize(
    z, grad, inner, values, scale, sums, m, width, FP8_MAX: tl.constexpr, MIN_ABS_MAX: tl.constexpr, C: tl.constexpr,
    N: tl.constexpr, ACTIVATION: tl.constexpr, SUM_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, C)
    top = tl.program_id(0) * ROWS
    totals = ()
    for _ in tl.static_range(N):
        totals = totals + (tl.zeros([C], tl.float32),)  # noqa: RUF005  (Triton cannot unpack)
    for row in range(top, tl.minimum(top + ROWS, m)):
        at = row * width.to(tl.int64) + col
        parts = ()
        added = ()
        highest = tl.full([C], MIN_ABS_MAX, tl.float32)
        for i in tl.static_range(N):
            inside = i * C + col < width
            value, slope = activation_and_slope(
                tl.load(z + at + i * C, mask=inside, other=0).to(tl.float32), ACTIVATION
            )
            dz = slope * tl.load(grad + at + i * C, mask=inside, other=0).to(tl.float32)
            tl.store(inner + at + i * C, value.to(inner.dtype.element_ty), mask=inside)
            tl.store(grad + at + i * C, dz.to(grad.dtype.element_ty), mask=inside)
            parts = parts + (dz,)  # noqa: RUF005
            added = added + (totals[i] + dz,)  # noqa: RUF005
            highest = tl.maximum(highest, tl.abs(dz))
        totals = added
        abs_max = tl.max(highest, 0)
        tl.store(scale + row, abs_max / FP8_MAX)
        for i in tl.static_range(N):
            quantized = (parts[i] * (FP8_MAX / abs_max)).to(values.dtype.element_ty)
            tl.store(values + at + i * C, quantized, mask=i * C + col < width)
    if SUM_COLUMNS:
        for i in tl.static_range(N):
            to_sums = sums + tl.program_id(0).to(tl.int64) * width + i * C + col
            tl.store(to_sums, totals[i], mask=i * C + col < width)
