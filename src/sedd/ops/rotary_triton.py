"""The kernels of `swift` in Triton: a program does a strip of a tensor, and writes sums of its own for torch to add up.

Nothing is added by two programs to one place, so the same bits come out every time. Arithmetic is in float32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.runtime.device import cdiv, next_power_of_2

TURN_ROWS, TURN_STRIP, TURN_WARPS = 2, 4, 4
BEND_ROWS, BEND_STRIP, BEND_COLUMNS, BEND_WARPS = 1, 64, 1024, 4


class Gains(NamedTuple):
    """What normed queries and keys are multiplied by, entry by entry of a head."""

    q: Tensor
    k: Tensor


def turn(qkv: Tensor, length: int, heads: int, cos: Tensor, sin: Tensor, gains: Gains | None, eps: float) -> Tensor:
    """Queries and keys turned to their positions, in place; with ``gains``, normed before, in a tensor of their own."""
    rows, width = qkv.shape[0], qkv.shape[1] // 3
    out = qkv if gains is None else qkv.new_empty(rows, 2 * width)
    q, k = (cos, cos) if gains is None else gains
    _turn[(cdiv(rows, TURN_ROWS),)](
        qkv, out, cos, sin, q, k, rows, length, heads, out.shape[1], eps, **_sizes(width, heads),
        NORM=gains is not None, R=TURN_ROWS, num_warps=TURN_WARPS,
    )  # fmt: skip
    return out


def _sizes(width: int, heads: int) -> dict[str, int]:
    half = width // heads // 2
    return {"HALF": half, "H": next_power_of_2(heads), "D": next_power_of_2(half)}


@triton.jit
def _turn(
    qkv, out, cos, sin, q_gain, k_gain, rows, length, heads, out_width, eps,
    HALF: tl.constexpr, H: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * R + tl.arange(0, R))[:, None, None]
    head, i = tl.arange(0, H)[None, :, None], tl.arange(0, D)[None, None, :]
    held = (row < rows) & (head < heads) & (i < HALF)
    turns = (row % length) * HALF + i
    c = tl.load(cos + turns, mask=(row < rows) & (i < HALF), other=0)
    s = tl.load(sin + turns, mask=(row < rows) & (i < HALF), other=0)
    width = heads * 2 * HALF
    for part in tl.static_range(2):
        inside = part * width + head * (2 * HALF) + i
        at = qkv + row.to(tl.int64) * (3 * width) + inside
        a, b = tl.load(at, mask=held, other=0).to(tl.float32), tl.load(at + HALF, mask=held, other=0).to(tl.float32)
        if NORM:
            gain = q_gain if part == 0 else k_gain
            r = tl.rsqrt(tl.sum(a * a + b * b, 2) / (2 * HALF) + eps)[:, :, None]
            a *= r * tl.load(gain + i, mask=i < HALF, other=0).to(tl.float32)
            b *= r * tl.load(gain + HALF + i, mask=i < HALF, other=0).to(tl.float32)
        to = out + row.to(tl.int64) * out_width + inside
        tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=held)
        tl.store(to + HALF, (a * s + b * c).to(out.dtype.element_ty), mask=held)


class TurnBack(NamedTuple):
    """The gradient of queries, keys and values side by side, and those of the gains."""

    dqkv: Tensor
    gains: Gains | None


def turn_back(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, gains: Gains | None, eps: float
) -> TurnBack:
    """From the gradients of what was turned to those of what was given; without gains ``qkv`` is not read."""
    b, length, heads, d = dq.shape
    rows, programs = b * length, cdiv(b * length, TURN_STRIP)
    back = dq.new_empty(rows, 3 * heads * d)
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in (dq, dk, dv)]
    strides = [s for part in parts for s in part.stride()[:3]]
    sums = dq.new_empty(programs, 2, d, dtype=torch.float32) if gains is not None else cos
    q, k = (cos, cos) if gains is None else gains
    _turn_back[(programs,)](
        *parts, qkv, cos, sin, q, k, back, sums, rows, length, heads, *strides, eps, **_sizes(heads * d, heads),
        NORM=gains is not None, STRIP=TURN_STRIP, R=TURN_ROWS, num_warps=TURN_WARPS,
    )  # fmt: skip
    return TurnBack(back, None if gains is None else Gains(*sums.sum(0)))


@triton.jit
def _turn_back(
    dq, dk, dv, qkv, cos, sin, q_gain, k_gain, back, sums, rows, length, heads, qb, ql, qh, kb, kl, kh, vb, vl, vh,
    eps, HALF: tl.constexpr, H: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, STRIP: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    head, i = tl.arange(0, H)[None, :, None], tl.arange(0, D)[None, None, :]
    width = heads * 2 * HALF
    for part in tl.static_range(3):
        if NORM and part < 2:
            gain = q_gain if part == 0 else k_gain
            first = tl.load(gain + i, mask=i < HALF, other=0).to(tl.float32)
            second = tl.load(gain + HALF + i, mask=i < HALF, other=0).to(tl.float32)
        by_first = tl.zeros([R, H, D], tl.float32)
        by_second = tl.zeros([R, H, D], tl.float32)
        for start in range(0, STRIP, R):
            row = (tl.program_id(0) * STRIP + start + tl.arange(0, R))[:, None, None]
            held = (row < rows) & (head < heads) & (i < HALF)
            sequence, place = (row // length).to(tl.int64), row % length
            if part == 0:
                at = dq + sequence * qb + place * ql + head * qh + i
            elif part == 1:
                at = dk + sequence * kb + place * kl + head * kh + i
            else:
                at = dv + sequence * vb + place * vl + head * vh + i
            a, b = tl.load(at, mask=held, other=0), tl.load(at + HALF, mask=held, other=0)
            inside = row.to(tl.int64) * (3 * width) + part * width + head * (2 * HALF) + i
            if part < 2:
                turns = place * HALF + i
                c = tl.load(cos + turns, mask=(row < rows) & (i < HALF), other=0)
                s = tl.load(sin + turns, mask=(row < rows) & (i < HALF), other=0)
                x, y = a.to(tl.float32), b.to(tl.float32)
                a, b = x * c + y * s, y * c - x * s
                if NORM:
                    x = tl.load(qkv + inside, mask=held, other=0).to(tl.float32)
                    y = tl.load(qkv + inside + HALF, mask=held, other=0).to(tl.float32)
                    r = tl.rsqrt(tl.sum(x * x + y * y, 2) / (2 * HALF) + eps)[:, :, None]
                    x, y = x * r, y * r
                    by_first += a * x
                    by_second += b * y
                    a, b = a * first, b * second
                    along = (tl.sum(a * x + b * y, 2) / (2 * HALF))[:, :, None]
                    a, b = r * (a - x * along), r * (b - y * along)
            tl.store(back + inside, a.to(back.dtype.element_ty), mask=held)
            tl.store(back + inside + HALF, b.to(back.dtype.element_ty), mask=held)
        if NORM and part < 2:
            to = sums + (tl.program_id(0) * 2 + part) * (2 * HALF) + tl.arange(0, D)
            kept = tl.arange(0, D) < HALF
            tl.store(to, tl.sum(tl.sum(by_first, 0), 0), mask=kept)
            tl.store(to + HALF, tl.sum(tl.sum(by_second, 0), 0), mask=kept)


BENDS = {"gelu": 0, "relu2": 1}


def bend(z: Tensor, kind: str) -> Tensor:
    """The activation of every entry."""
    out = torch.empty_like(z)
    count, size = z.numel(), 4096
    _bend[(cdiv(count, size),)](z, out, count, BEND=BENDS[kind], SIZE=size, num_warps=8)
    return out


@triton.jit
def _bent(z, BEND: tl.constexpr):
    """The activation, and its slope."""
    if BEND == 0:  # z/2·(1 + tanh(√(2/π)(z + 0.044715 z³))), and tanh(a) = 2/(1 + e^−2a) − 1
        square = z * z
        # −2a in bits; an exponential that would overflow is of what is 0 already
        bits = tl.minimum(z * (-2.3022082 - 0.10294324 * square), 115.0)
        half = 1 / (1 + tl.exp2(bits))
        value = z * half
        slope = half + value * (1 - half) * (1.5957691 + 0.21406448 * square)
    else:
        above = tl.where(z > 0, z, 0.0)
        value, slope = above * above, 2 * above
    return value, slope


@triton.jit
def _bend(z, out, count, BEND: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    held = at < count
    value, _ = _bent(tl.load(z + at, mask=held, other=0).to(tl.float32), BEND)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=held)


def bend_back(z: Tensor, d_inner: Tensor, kind: str, summed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `bend` gave, the gradient of z in place of that of what it gave, and its sum over rows if asked."""
    rows, width = z.shape
    inner = torch.empty_like(z)
    strips = cdiv(rows, BEND_STRIP)
    sums = z.new_empty(strips, width, dtype=torch.float32) if summed else None
    _bend_back[(strips, cdiv(width, BEND_COLUMNS))](
        z, d_inner, inner, d_inner if sums is None else sums, rows, width, BEND=BENDS[kind], SUMMED=summed,
        STRIP=BEND_STRIP, R=BEND_ROWS, C=BEND_COLUMNS, num_warps=BEND_WARPS,
    )  # fmt: skip
    return inner, d_inner, None if sums is None else sums.sum(0)


@triton.jit
def _bend_back(
    z, slope, inner, sums, rows, width, BEND: tl.constexpr, SUMMED: tl.constexpr, STRIP: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(1) * C + tl.arange(0, C)
    inside = col < width
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, STRIP, R):
        row = tl.program_id(0) * STRIP + start + tl.arange(0, R)
        held = (row < rows)[:, None] & inside[None, :]
        at = row[:, None].to(tl.int64) * width + col[None, :]
        value, times = _bent(tl.load(z + at, mask=held, other=0).to(tl.float32), BEND)
        d = times * tl.load(slope + at, mask=held, other=0).to(tl.float32)
        tl.store(inner + at, value.to(inner.dtype.element_ty), mask=held)
        tl.store(slope + at, d.to(slope.dtype.element_ty), mask=held)
        total += tl.where(held, d, 0.0)
    if SUMMED:
        tl.store(sums + tl.program_id(0).to(tl.int64) * width + col, tl.sum(total, 0), mask=inside)
