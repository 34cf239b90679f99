"""What `eighths` are made of, in Triton: a program reads whole rows, and knows the largest entry before it writes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.kernels.eighths import LARGEST, LEAST, Eighths
from sedd.kernels.strips import BENDS, _bent

PRESS_STRIP, PRESS_WARPS, STAGES = 16, 4, 3
"""Rows a program, its warps, and loads under way."""
BEND_STRIP, BEND_WARPS = 32, 8


def _empty(m: int, k: int, like: Tensor) -> Eighths:
    values = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=like.device)
    return Eighths(values, like.new_empty(m, 1, dtype=torch.float32))


def press(x: Tensor) -> Eighths:
    """See `eighths.eighths`."""
    m, k = x.shape
    out = _empty(m, k, x)
    _press[(triton.cdiv(m, PRESS_STRIP),)](
        x.contiguous(), *out, m, k, LARGEST=LARGEST, LEAST=LEAST, STRIP=PRESS_STRIP, STAGES=STAGES,
        C=triton.next_power_of_2(k), num_warps=PRESS_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _write(values, scale, row, col, inside, width, x, LARGEST: tl.constexpr, LEAST: tl.constexpr):
    """One row, which has no entries outside."""
    most = tl.maximum(tl.max(tl.abs(x), 0), LEAST)
    tl.store(scale + row, most / LARGEST)
    pressed = (x * (LARGEST / most)).to(values.dtype.element_ty)
    tl.store(values + row * width.to(tl.int64) + col, pressed, mask=inside)


@triton.jit
def _press(
    x, values, scale, m, width, LARGEST: tl.constexpr, LEAST: tl.constexpr, STRIP: tl.constexpr,
    STAGES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, C)
    inside = col < width
    top = tl.program_id(0) * STRIP
    for row in tl.range(top, tl.minimum(top + STRIP, m), num_stages=STAGES):
        each = tl.load(x + row * width.to(tl.int64) + col, mask=inside, other=0).to(tl.float32)
        _write(values, scale, row, col, inside, width, each, LARGEST, LEAST)


def bend(z: Tensor, kind: str) -> Eighths:
    """The eighths of what `strips.bend` gives."""
    m, k = z.shape
    out = _empty(m, k, z)
    _bend[(triton.cdiv(m, BEND_STRIP),)](
        z, *out, m, k, BEND=BENDS[kind], LARGEST=LARGEST, LEAST=LEAST, STRIP=BEND_STRIP,
        C=triton.next_power_of_2(k), num_warps=BEND_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _bend(
    z, values, scale, m, width, BEND: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr, STRIP: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, C)
    inside = col < width
    top = tl.program_id(0) * STRIP
    for row in range(top, tl.minimum(top + STRIP, m)):
        value, _ = _bent(tl.load(z + row * width.to(tl.int64) + col, mask=inside, other=0).to(tl.float32), BEND)
        value = value.to(z.dtype.element_ty).to(tl.float32)  # as it would have been written
        _write(values, scale, row, col, inside, width, value, LARGEST, LEAST)


def bend_back(z: Tensor, d_inner: Tensor, kind: str, summed: bool) -> tuple[Tensor, Tensor, Tensor | None, Eighths]:
    """What `strips.bend_back` gives, and the eighths of the gradient of z."""
    m, k = z.shape
    inner, strips, out = torch.empty_like(z), triton.cdiv(m, BEND_STRIP), _empty(m, k, z)
    sums = z.new_empty(strips, k, dtype=torch.float32) if summed else None
    _bend_back[(strips,)](
        z, d_inner, inner, d_inner if sums is None else sums, *out, m, k, BEND=BENDS[kind], SUMMED=summed,
        LARGEST=LARGEST, LEAST=LEAST, STRIP=BEND_STRIP, C=triton.next_power_of_2(k), num_warps=BEND_WARPS,
    )  # fmt: skip
    return inner, d_inner, None if sums is None else sums.sum(0), out


@triton.jit
def _bend_back(
    z, slope, inner, sums, values, scale, m, width, BEND: tl.constexpr, SUMMED: tl.constexpr, LARGEST: tl.constexpr,
    LEAST: tl.constexpr, STRIP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, C)
    inside = col < width
    total = tl.zeros([C], tl.float32)
    top = tl.program_id(0) * STRIP
    for row in range(top, tl.minimum(top + STRIP, m)):
        at = row * width.to(tl.int64) + col
        value, times = _bent(tl.load(z + at, mask=inside, other=0).to(tl.float32), BEND)
        d = times * tl.load(slope + at, mask=inside, other=0).to(tl.float32)
        tl.store(inner + at, value.to(inner.dtype.element_ty), mask=inside)
        d = d.to(slope.dtype.element_ty)
        tl.store(slope + at, d, mask=inside)
        d = d.to(tl.float32)
        _write(values, scale, row, col, inside, width, d, LARGEST, LEAST)
        total += d
    if SUMMED:
        tl.store(sums + tl.program_id(0).to(tl.int64) * width + col, total, mask=inside)
