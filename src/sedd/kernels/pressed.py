"""What `eighths` are made of, in Triton: a program reads whole rows, and knows the largest entry before it writes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.kernels.eighths import LARGEST, LEAST, Eighths
from sedd.kernels.strips import BENDS, _bent

# mypy: disable-error-code=assignment

COLUMNS = 1024
"""Rows are read in parts of so many entries at most."""
PRESS_STRIP, PRESS_WARPS = 16, 4
"""Rows a program, and its warps."""
BEND_STRIP, BEND_WARPS = 16, 4
BACK_STRIP, BACK_WARPS = 32, 8


def _empty(m: int, k: int, like: Tensor) -> Eighths:
    values = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=like.device)
    return Eighths(values, like.new_empty(m, 1, dtype=torch.float32))


def _sizes(width: int) -> dict[str, float]:
    columns = min(COLUMNS, triton.next_power_of_2(width))
    return {"LARGEST": LARGEST, "LEAST": LEAST, "C": columns, "N": triton.cdiv(width, columns)}


def press(x: Tensor) -> Eighths:
    """See `eighths.eighths`."""
    m, k = x.shape
    out = _empty(m, k, x)
    _press[(triton.cdiv(m, PRESS_STRIP),)](
        x.contiguous(), *out, m, k, **_sizes(k), BEND=-1, STRIP=PRESS_STRIP, num_warps=PRESS_WARPS
    )
    return out


def bend(z: Tensor, kind: str) -> Eighths:
    """The eighths of what `strips.bend` gives, before that is rounded."""
    m, k = z.shape
    out = _empty(m, k, z)
    _press[(triton.cdiv(m, BEND_STRIP),)](
        z, *out, m, k, **_sizes(k), BEND=BENDS[kind], STRIP=BEND_STRIP, num_warps=BEND_WARPS
    )
    return out


@triton.jit
def _press(
    x, values, scale, m, width, LARGEST: tl.constexpr, LEAST: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    BEND: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, C)
    top = tl.program_id(0) * STRIP
    for row in range(top, tl.minimum(top + STRIP, m)):
        at = row * width.to(tl.int64) + col
        parts = ()
        high = tl.full([C], LEAST, tl.float32)
        for i in tl.static_range(N):
            each = tl.load(x + at + i * C, mask=i * C + col < width, other=0).to(tl.float32)
            if BEND >= 0:
                each, _ = _bent(each, BEND)
            parts = parts + (each,)  # noqa: RUF005  (the compiler knows no other way)
            high = tl.maximum(high, tl.abs(each))
        most = tl.max(high, 0)
        tl.store(scale + row, most / LARGEST)
        for i in tl.static_range(N):
            pressed = (parts[i] * (LARGEST / most)).to(values.dtype.element_ty)
            tl.store(values + at + i * C, pressed, mask=i * C + col < width)


def bend_back(z: Tensor, d_inner: Tensor, kind: str, summed: bool) -> tuple[Tensor, Tensor, Tensor | None, Eighths]:
    """What `strips.bend_back` gives, and the eighths of the gradient of z, before that is rounded."""
    m, k = z.shape
    inner, strips, out = torch.empty_like(z), triton.cdiv(m, BACK_STRIP), _empty(m, k, z)
    sums = z.new_empty(strips, k, dtype=torch.float32) if summed else None
    _bend_back[(strips,)](
        z, d_inner, inner, d_inner if sums is None else sums, *out, m, k, **_sizes(k), BEND=BENDS[kind],
        SUMMED=summed, STRIP=BACK_STRIP, num_warps=BACK_WARPS,
    )  # fmt: skip
    return inner, d_inner, None if sums is None else sums.sum(0), out


@triton.jit
def _bend_back(
    z, slope, inner, sums, values, scale, m, width, LARGEST: tl.constexpr, LEAST: tl.constexpr, C: tl.constexpr,
    N: tl.constexpr, BEND: tl.constexpr, SUMMED: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, C)
    totals = ()
    for _i in tl.static_range(N):
        totals = totals + (tl.zeros([C], tl.float32),)  # noqa: RUF005
    top = tl.program_id(0) * STRIP
    for row in range(top, tl.minimum(top + STRIP, m)):
        at = row * width.to(tl.int64) + col
        parts = ()
        added = ()
        high = tl.full([C], LEAST, tl.float32)
        for i in tl.static_range(N):
            inside = i * C + col < width
            value, times = _bent(tl.load(z + at + i * C, mask=inside, other=0).to(tl.float32), BEND)
            d = times * tl.load(slope + at + i * C, mask=inside, other=0).to(tl.float32)
            tl.store(inner + at + i * C, value.to(inner.dtype.element_ty), mask=inside)
            tl.store(slope + at + i * C, d.to(slope.dtype.element_ty), mask=inside)
            parts = parts + (d,)  # noqa: RUF005
            added = added + (totals[i] + d,)  # noqa: RUF005
            high = tl.maximum(high, tl.abs(d))
        totals = added
        most = tl.max(high, 0)
        tl.store(scale + row, most / LARGEST)
        for i in tl.static_range(N):
            pressed = (parts[i] * (LARGEST / most)).to(values.dtype.element_ty)
            tl.store(values + at + i * C, pressed, mask=i * C + col < width)
    if SUMMED:
        for i in tl.static_range(N):
            out = sums + tl.program_id(0).to(tl.int64) * width + i * C + col
            tl.store(out, totals[i], mask=i * C + col < width)
