"""Triton kernels of rotary positions and QK-norm, forward and backward. Arithmetic is in float32.

Partial sums for the QK scales are added up by torch: no atomic additions, so the same bits come out every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.ops.fp8 import FP8_MAX, MIN_ABS_MAX, Fp8Tensor
from sedd.runtime.device import cdiv, next_power_of_2

# mypy: disable-error-code=assignment

ROWS, WARPS = 2, 4  # rows and warps per program of the forward pass
BACKWARD_ROWS, BACKWARD_ENTRIES = 8, 512
"""Rows per program of the backward pass, which computes one after the other, and pairs of entries per warp."""

QKScales = tuple[Tensor, Tensor]  # the weights of QK-norm for queries and for keys, each (d,)


def qk_norm_rotary_forward(
    qkv: Tensor, length: int, heads: int, cos: Tensor, sin: Tensor, qk_scale: QKScales | None, eps: float
) -> Tensor:
    """Apply QK-norm and rotary positions to the queries and keys of ``qkv``, (rows, 3·width).

    Return queries and keys side by side: in a new tensor, (rows, 2·width), or in ``qkv`` itself without QK-norm.
    """
    rows, width = qkv.shape[0], qkv.shape[1] // 3
    out = qkv if qk_scale is None else qkv.new_empty(rows, 2 * width)
    q, k = (cos, cos) if qk_scale is None else qk_scale
    _rotary_forward[(cdiv(rows, ROWS),)](
        qkv, out, cos, sin, q, k, rows, length, heads, out.shape[1], eps, **_sizes(width, heads),
        NORM=qk_scale is not None, R=ROWS, num_warps=WARPS,
    )  # fmt: skip
    return out


def qk_norm_rotary_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    qk_scale: QKScales | None,
    eps: float,
    dqkv_fp8: Fp8Tensor | None = None,
) -> tuple[Tensor, QKScales | None]:
    """Return the gradients of ``qkv``, also quantized into ``dqkv_fp8`` before it is rounded, and of the QK scales.

    Without QK-norm ``qkv`` is not read.
    """
    b, length, heads, d = dq.shape
    rows, programs = b * length, cdiv(b * length, BACKWARD_ROWS)
    dqkv = dq.new_empty(rows, 3 * heads * d)
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in (dq, dk, dv)]
    strides = [s for part in parts for s in part.stride()[:3]]
    sums = dq.new_empty(programs, 2, d, dtype=torch.float32) if qk_scale is not None else cos
    q, k = (cos, cos) if qk_scale is None else qk_scale
    sizes = _sizes(heads * d, heads)
    _rotary_backward[(programs,)](
        *parts, qkv, cos, sin, q, k, dqkv, *(dqkv_fp8 or (dqkv, cos)), sums, rows, length, heads, *strides, eps,
        **sizes, NORM=qk_scale is not None, USE_FP8=dqkv_fp8 is not None, FP8_MAX=FP8_MAX, MIN_ABS_MAX=MIN_ABS_MAX,
        PROGRAM_ROWS=BACKWARD_ROWS, R=1, num_warps=min(32, cdiv(sizes["H"] * sizes["D"], BACKWARD_ENTRIES)),
    )  # fmt: skip
    if qk_scale is None:
        return dqkv, None
    d_q_scale, d_k_scale = sums.sum(0)
    return dqkv, (d_q_scale, d_k_scale)


def _sizes(width: int, heads: int) -> dict[str, int]:
    half = width // heads // 2
    return {"HALF": half, "H": next_power_of_2(heads), "D": next_power_of_2(half)}


@triton.jit
def _rotary_forward(
    qkv, out, cos, sin, q_scale, k_scale, rows, length, heads, out_width, eps,
    HALF: tl.constexpr, H: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * R + tl.arange(0, R))[:, None, None]
    head, i = tl.arange(0, H)[None, :, None], tl.arange(0, D)[None, None, :]
    inside = (row < rows) & (head < heads) & (i < HALF)
    angle = (row % length) * HALF + i
    c = tl.load(cos + angle, mask=(row < rows) & (i < HALF), other=0)
    s = tl.load(sin + angle, mask=(row < rows) & (i < HALF), other=0)
    width = heads * 2 * HALF
    for part in tl.static_range(2):
        column = part * width + head * (2 * HALF) + i
        at = qkv + row.to(tl.int64) * (3 * width) + column
        a, b = tl.load(at, mask=inside, other=0).to(tl.float32), tl.load(at + HALF, mask=inside, other=0).to(tl.float32)
        if NORM:
            scale = q_scale if part == 0 else k_scale
            r = tl.rsqrt(tl.sum(a * a + b * b, 2) / (2 * HALF) + eps)[:, :, None]
            a *= r * tl.load(scale + i, mask=i < HALF, other=0).to(tl.float32)
            b *= r * tl.load(scale + HALF + i, mask=i < HALF, other=0).to(tl.float32)
        to = out + row.to(tl.int64) * out_width + column
        tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
        tl.store(to + HALF, (a * s + b * c).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotary_backward(
    dq, dk, dv, qkv, cos, sin, q_scale, k_scale, dqkv, values, scale, sums, rows, length, heads, qb, ql, qh, kb, kl, kh,
    vb, vl, vh, eps, HALF: tl.constexpr, H: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, USE_FP8: tl.constexpr,
    FP8_MAX: tl.constexpr, MIN_ABS_MAX: tl.constexpr, PROGRAM_ROWS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    head, i = tl.arange(0, H)[None, :, None], tl.arange(0, D)[None, None, :]
    width = heads * 2 * HALF
    scales = ()
    d_scales = ()
    for part in tl.static_range(2):
        if NORM:
            at_scale = (q_scale if part == 0 else k_scale) + i
            first = tl.load(at_scale, mask=i < HALF, other=0).to(tl.float32)
            second = tl.load(at_scale + HALF, mask=i < HALF, other=0).to(tl.float32)
            scales = scales + (first, second)  # noqa: RUF005  (Triton cannot unpack)
            d_scales = d_scales + (tl.zeros([R, H, D], tl.float32), tl.zeros([R, H, D], tl.float32))  # noqa: RUF005
    for start in range(0, PROGRAM_ROWS, R):
        rows_here = tl.program_id(0) * PROGRAM_ROWS + start + tl.arange(0, R)
        row = rows_here[:, None, None]
        inside = (row < rows) & (head < heads) & (i < HALF)
        sequence, position = (row // length).to(tl.int64), row % length
        angle = position * HALF + i
        c = tl.load(cos + angle, mask=(row < rows) & (i < HALF), other=0)
        s = tl.load(sin + angle, mask=(row < rows) & (i < HALF), other=0)
        to = row.to(tl.int64) * (3 * width) + head * (2 * HALF) + i
        found = ()
        added = ()
        highest = tl.full([R], MIN_ABS_MAX, tl.float32)
        for part in tl.static_range(3):
            if part == 0:
                at = dq + sequence * qb + position * ql + head * qh + i
            elif part == 1:
                at = dk + sequence * kb + position * kl + head * kh + i
            else:
                at = dv + sequence * vb + position * vl + head * vh + i
            a = tl.load(at, mask=inside, other=0).to(tl.float32)
            b = tl.load(at + HALF, mask=inside, other=0).to(tl.float32)
            if part < 2:
                a, b = a * c + b * s, b * c - a * s
                if NORM:
                    x = tl.load(qkv + to + part * width, mask=inside, other=0).to(tl.float32)
                    y = tl.load(qkv + to + part * width + HALF, mask=inside, other=0).to(tl.float32)
                    r = tl.rsqrt(tl.sum(x * x + y * y, 2) / (2 * HALF) + eps)[:, :, None]
                    x, y = x * r, y * r
                    added = added + (d_scales[2 * part] + a * x, d_scales[2 * part + 1] + b * y)  # noqa: RUF005
                    a, b = a * scales[2 * part], b * scales[2 * part + 1]
                    projection = (tl.sum(a * x + b * y, 2) / (2 * HALF))[:, :, None]
                    a, b = r * (a - x * projection), r * (b - y * projection)
            tl.store(dqkv + to + part * width, a.to(dqkv.dtype.element_ty), mask=inside)
            tl.store(dqkv + to + part * width + HALF, b.to(dqkv.dtype.element_ty), mask=inside)
            if USE_FP8:
                found = found + (a, b)  # noqa: RUF005
                highest = tl.maximum(highest, tl.max(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 2), 1))
        d_scales = added
        if USE_FP8:
            tl.store(scale + rows_here, highest / FP8_MAX, mask=rows_here < rows)
            factor = (FP8_MAX / highest)[:, None, None]
            for part in tl.static_range(3):
                a, b = found[2 * part] * factor, found[2 * part + 1] * factor
                tl.store(values + to + part * width, a.to(values.dtype.element_ty), mask=inside)
                tl.store(values + to + part * width + HALF, b.to(values.dtype.element_ty), mask=inside)
    if NORM:
        in_half = tl.arange(0, D) < HALF
        for part in tl.static_range(2):
            to_sums = sums + (tl.program_id(0) * 2 + part) * (2 * HALF) + tl.arange(0, D)
            tl.store(to_sums, tl.sum(tl.sum(d_scales[2 * part], 0), 0), mask=in_half)
            tl.store(to_sums + HALF, tl.sum(tl.sum(d_scales[2 * part + 1], 0), 0), mask=in_half)
