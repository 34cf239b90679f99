"""Triton kernels of the MLP's activation, forward and backward. Arithmetic is in float32.

Partial sums over rows are added up by torch: no atomic additions, so the same bits come out every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.runtime.device import cdiv

ACTIVATION_IDS = {"gelu": 0, "relu2": 1}
FORWARD_SIZE = 4096  # entries per program of the forward pass
ROWS, PROGRAM_ROWS, COLUMNS, WARPS = 1, 64, 1024, 4
"""Rows per iteration, rows, columns and warps per program of the backward pass."""


def activation_forward(z: Tensor, activation: str) -> Tensor:
    out = torch.empty_like(z)
    count, size = z.numel(), FORWARD_SIZE
    _activation_forward[(cdiv(count, size),)](
        z, out, count, ACTIVATION=ACTIVATION_IDS[activation], SIZE=size, num_warps=8
    )
    return out


def activation_backward(
    z: Tensor, d_inner: Tensor, activation: str, sum_columns: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the activation of z, (rows, width), the gradient of z, and with ``sum_columns`` its sum over rows.

    ``d_inner``, the gradient of the activation, is overwritten by the gradient of z.
    """
    rows, width = z.shape
    inner = torch.empty_like(z)
    programs = cdiv(rows, PROGRAM_ROWS)
    sums = z.new_empty(programs, width, dtype=torch.float32) if sum_columns else None
    _activation_backward[(programs, cdiv(width, COLUMNS))](
        z, d_inner, inner, d_inner if sums is None else sums, rows, width, ACTIVATION=ACTIVATION_IDS[activation],
        SUM_COLUMNS=sum_columns, PROGRAM_ROWS=PROGRAM_ROWS, R=ROWS, C=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return inner, d_inner, None if sums is None else sums.sum(0)


@triton.jit
def activation_and_slope(z, ACTIVATION: tl.constexpr):
    """Return the activation and its derivative."""
    if ACTIVATION == 0:  # z/2·(1 + tanh(√(2/π)(z + 0.044715 z³))), and tanh(a) = 2/(1 + e^−2a) − 1
        square = z * z
        # −2a·log₂ e; clamped where the exponential would overflow, since the activation is 0 there
        bits = tl.minimum(z * (-2.3022082 - 0.10294324 * square), 115.0)
        half = 1 / (1 + tl.exp2(bits))
        value = z * half
        slope = half + value * (1 - half) * (1.5957691 + 0.21406448 * square)
    else:
        positive = tl.where(z > 0, z, 0.0)
        value, slope = positive * positive, 2 * positive
    return value, slope


@triton.jit
def _activation_forward(z, out, count, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    value, _ = activation_and_slope(tl.load(z + at, mask=inside, other=0).to(tl.float32), ACTIVATION)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activation_backward(
    z, grad, inner, sums, rows, width, ACTIVATION: tl.constexpr, SUM_COLUMNS: tl.constexpr, PROGRAM_ROWS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(1) * C + tl.arange(0, C)
    inside_row = col < width
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, PROGRAM_ROWS, R):
        row = tl.program_id(0) * PROGRAM_ROWS + start + tl.arange(0, R)
        inside = (row < rows)[:, None] & inside_row[None, :]
        at = row[:, None].to(tl.int64) * width + col[None, :]
        value, slope = activation_and_slope(tl.load(z + at, mask=inside, other=0).to(tl.float32), ACTIVATION)
        dz = slope * tl.load(grad + at, mask=inside, other=0).to(tl.float32)
        tl.store(inner + at, value.to(inner.dtype.element_ty), mask=inside)
        tl.store(grad + at, dz.to(grad.dtype.element_ty), mask=inside)
        total += tl.where(inside, dz, 0.0)
    if SUM_COLUMNS:
        tl.store(sums + tl.program_id(0).to(tl.int64) * width + col, tl.sum(total, 0), mask=inside_row)
