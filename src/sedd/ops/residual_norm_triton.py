"""The kernels of `swift.join` in Triton, by strips as in `strips`; a row is a warp's: nobody waits for its sums."""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.ops.block_ops import threshold
from sedd.ops.fp8 import LARGEST, LEAST, Fp8Tensor
from sedd.runtime.device import cdiv, next_power_of_2

# mypy: disable-error-code=assignment

COLUMNS = 256
"""Rows are read in parts of so many entries, by one warp, or by more if there are many parts."""
JOIN_STRIP, JOIN_STAGES = 8, 2
"""Rows a program and loads under way of `join`."""
BACK_STRIP, BACK_STAGES = 64, 2
"""The same of `join_back`."""
JOIN_PARTS, BACK_PARTS = 4, 3
"""Of how many parts a warp remembers all it must."""
SUM_ROWS, SUM_COLUMNS = 16, 128
"""A tile of the sums of strips."""


class Join(NamedTuple):
    """What a join does."""

    eps: float
    centred: bool
    rate: float
    length: int
    """How many rows a sequence has, or may have at most."""


class Parts(NamedTuple):
    """What a join reads besides the stream."""

    y: Tensor | None
    y_bias: Tensor | None
    gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    shift: Tensor | None
    scale: Tensor | None
    seed: Tensor | None
    starts: Tensor | None
    """Where the rows of each sequence begin, and the end, if not all have as many."""

    def sequences(self, x: Tensor) -> int:
        """How many there are."""
        return len(x) if self.starts is None else len(self.starts) - 1

    def flags(self, drop: bool) -> dict[str, bool]:
        """Which of them there are."""
        names = {
            "Y": self.y,
            "Y_BIAS": self.y_bias,
            "GATE": self.gate,
            "WEIGHT": self.weight,
            "BIAS": self.bias,
            "CHANGE": self.scale,
            "RAGGED": self.starts,
        }
        return {name: part is not None for name, part in names.items()} | {"DROP": drop and self.seed is not None}

    def pointers(self, absent: Tensor) -> list[Tensor]:
        """Something stands for pointers that are never followed."""
        return [absent if part is None else part for part in self]

    def strides(self) -> tuple[int, int]:
        """From one sequence to the next, of gates and of changes: rows of wider tables."""
        if self.shift is not None and self.scale is not None and self.shift.stride() != self.scale.stride():
            raise ValueError("shift and scale must lie alike in memory")
        return 0 if self.gate is None else self.gate.stride(0), 0 if self.scale is None else self.scale.stride(0)


@functools.cache
def _sizes(width: int, most: int) -> dict[str, Any]:
    """How a row is cut, and by how many warps it is done."""
    columns, warps = min(COLUMNS, next_power_of_2(width)), 1
    while cdiv(width, columns) > most * warps:
        warps *= 2
    columns *= warps
    return {"C": columns, "N": cdiv(width, columns), "WHOLE": width % columns == 0, "num_warps": warps}


def join(
    x: Tensor, parts: Parts, plan: Join, dtype: torch.dtype, few: Fp8Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stream with the branch, what the next block reads, and mean and 1/spread of every row.

    The eighths of what the next block reads, before that is rounded, are written to ``few``.
    """
    b, length, width = parts.sequences(x), plan.length, x.shape[-1]
    total = x if parts.y is None else torch.empty_like(x)
    n = torch.empty_like(x, dtype=dtype)
    mean, spread = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    strip = JOIN_STRIP if b * length >= 2**15 else 4 if b * length >= 2**12 else 1
    _join[(cdiv(length, strip), b)](
        x, *parts.pointers(x), total, n, mean, spread, *(few or (n, mean)), length, width, *parts.strides(),
        threshold(plan.rate), 1 / (1 - plan.rate), plan.eps, LARGEST=LARGEST, LEAST=LEAST, FEW=few is not None,
        STRIP=strip, STAGES=JOIN_STAGES, CENTRED=plan.centred,
        **parts.flags(plan.rate > 0), **_sizes(width, JOIN_PARTS),
    )  # fmt: skip
    return total, n, mean, spread


class JoinBack(NamedTuple):
    """Gradients of a join: of the stream and the branch, and of all that it was told."""

    dx: Tensor
    dy: Tensor | None
    shift: Tensor
    scale: Tensor
    gate: Tensor
    """Of every sequence, like those before."""
    weight: Tensor
    bias: Tensor
    y_bias: Tensor


def join_back(
    total: Tensor, parts: Parts, plan: Join, mean: Tensor, spread: Tensor, dn: Tensor, g: Tensor | None
) -> JoinBack:
    """From the gradients of what `join` gave to those of what it was given; what it was not given has some too."""
    b, length, width = parts.sequences(total), plan.length, total.shape[-1]
    dx = torch.empty_like(total)
    dy = None if parts.y is None else torch.empty_like(parts.y)
    strips, flags = cdiv(length, BACK_STRIP), parts.flags(plan.rate > 0)
    sums = total.new_empty(4, b, strips, width, dtype=torch.float32)
    given = total if g is None else g.contiguous()
    _join_back[(strips, b)](
        total, *parts.pointers(total), mean, spread, dn, given, dx, dx if dy is None else dy, sums, length, width,
        *parts.strides(), sums.stride(0), threshold(plan.rate), 1 / (1 - plan.rate), STRIP=BACK_STRIP,
        STAGES=BACK_STAGES, CENTRED=plan.centred, **flags, GIVEN=g is not None, **_sizes(width, BACK_PARTS),
    )  # fmt: skip
    told = total.new_empty(6, b, width, dtype=torch.float32)
    of = {name: flags[name] for name in ("Y_BIAS", "GATE", "WEIGHT", "BIAS", "CHANGE")}
    _, y_bias, gate, weight, bias, _, scale, *_ = parts.pointers(total)
    _told_back[(b, cdiv(width, SUM_COLUMNS))](
        sums, y_bias, gate, weight, bias, scale, told, strips, width, *parts.strides(), sums.stride(0), told.stride(0),
        **of, R=SUM_ROWS, C=SUM_COLUMNS, num_warps=4,
    )  # fmt: skip
    return JoinBack(dx, dy, *told[:3], *told[3:].sum(1))


@triton.jit
def _told_back(
    sums, y_bias, gate, weight, bias, scale, told, strips, width, gate_stride, change_stride, sums_stride, told_stride,
    Y_BIAS: tl.constexpr, GATE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, CHANGE: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """From the sums of a sequence's strips to gradients: of what it was told itself, and its share of the others."""
    b = tl.program_id(0)
    col = tl.program_id(1) * C + tl.arange(0, C)
    inside = col < width
    by_scale = tl.zeros([R, C], tl.float32)
    by_shift = tl.zeros([R, C], tl.float32)
    by_gate = tl.zeros([R, C], tl.float32)
    by_y = tl.zeros([R, C], tl.float32)
    for start in range(0, strips, R):
        strip = start + tl.arange(0, R)
        held = (strip < strips)[:, None] & inside[None, :]
        at = sums + (b * strips + strip).to(tl.int64)[:, None] * width + col[None, :]
        by_scale += tl.load(at, mask=held, other=0)
        by_shift += tl.load(at + sums_stride, mask=held, other=0)
        by_gate += tl.load(at + 2 * sums_stride, mask=held, other=0)
        by_y += tl.load(at + 3 * sums_stride, mask=held, other=0)
    of_scale, of_shift, of_y = tl.sum(by_scale, 0), tl.sum(by_shift, 0), tl.sum(by_y, 0)
    d_scale, d_gate = of_scale, tl.sum(by_gate, 0)
    if WEIGHT:
        d_scale *= tl.load(weight + col, mask=inside, other=0)
    if BIAS:
        d_scale += of_shift * tl.load(bias + col, mask=inside, other=0)
    if Y_BIAS:
        d_gate += of_y * tl.load(y_bias + col, mask=inside, other=0)
    times = tl.full([C], 1.0, tl.float32)
    if CHANGE:
        times += tl.load(scale + b * change_stride + col, mask=inside, other=0)
    gated = tl.full([C], 1.0, tl.float32)
    if GATE:
        gated = tl.load(gate + b * gate_stride + col, mask=inside, other=0).to(tl.float32)
    to = told + b * width + col
    tl.store(to, of_shift, mask=inside)
    tl.store(to + told_stride, d_scale, mask=inside)
    tl.store(to + 2 * told_stride, d_gate, mask=inside)
    tl.store(to + 3 * told_stride, times * of_scale, mask=inside)
    tl.store(to + 4 * told_stride, times * of_shift, mask=inside)
    tl.store(to + 5 * told_stride, gated * of_y, mask=inside)


@triton.jit
def _mixed(h):
    """See `glue._mixed`."""
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0xD35A2D97
    return h ^ (h >> 15)


@triton.jit
def _seeds(seed):
    """What `_survives` is told of one."""
    first = _mixed(tl.load(seed + tl.arange(0, 1)).to(tl.uint32))
    return first, _mixed(tl.load(seed + 1 + tl.arange(0, 1)).to(tl.uint32) ^ first)


@triton.jit
def _survives(index, first, second, least):
    """See `glue.survivors`."""
    h = index.to(tl.uint32) * 0x9E3779B9 + first
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15) ^ second) * 0xD35A2D97
    return (h ^ (h >> 15)) >= least.to(tl.uint32)


@triton.jit
def _rows(starts, length, RAGGED: tl.constexpr, STRIP: tl.constexpr):
    """The rows of a program, from the first to behind the last."""
    begin = tl.program_id(1).to(tl.int64) * length
    end = begin + length
    if RAGGED:
        begin = tl.load(starts + tl.program_id(1))
        end = tl.load(starts + tl.program_id(1) + 1)
    top = begin + tl.program_id(0) * STRIP
    return top, tl.minimum(top + STRIP, end)


@triton.jit
def _inside(i: tl.constexpr, width, WHOLE: tl.constexpr, C: tl.constexpr):
    """Which entries of a part there are."""
    inside = tl.full([C], 1, tl.int1)
    if not WHOLE:
        inside = i * C + tl.arange(0, C) < width
    return inside


@triton.jit
def _join(
    x, y, y_bias, gate, weight, bias, shift, scale, seed, starts, total, n, mean, spread, values, values_scale, length,
    width, gate_stride, change_stride, least, keep, eps, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    FEW: tl.constexpr, STRIP: tl.constexpr, STAGES: tl.constexpr, RAGGED: tl.constexpr,
    CENTRED: tl.constexpr, Y: tl.constexpr, Y_BIAS: tl.constexpr, GATE: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, CHANGE: tl.constexpr, DROP: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    col = tl.arange(0, C)
    lifts = ()
    gates = ()
    factors = ()
    offsets = ()
    for i in tl.static_range(N):
        inside = _inside(i, width, WHOLE, C)
        lift = tl.zeros([C], tl.float32)
        if Y_BIAS:
            lift += tl.load(y_bias + i * C + col, mask=inside, other=0)
        gated = tl.full([C], 1.0, tl.float32)
        if GATE:
            gated = tl.load(gate + b * gate_stride + i * C + col, mask=inside, other=0).to(tl.float32)
        factor = tl.full([C], 1.0, tl.float32)
        if WEIGHT:
            factor = tl.load(weight + i * C + col, mask=inside, other=0).to(tl.float32)
        offset = tl.zeros([C], tl.float32)
        if BIAS:
            offset += tl.load(bias + i * C + col, mask=inside, other=0)
        if CHANGE:
            times = 1 + tl.load(scale + b * change_stride + i * C + col, mask=inside, other=0)
            offset = offset * times + tl.load(shift + b * change_stride + i * C + col, mask=inside, other=0)
            factor *= times
        lifts = lifts + (lift,)  # noqa: RUF005  (the compiler knows no other way)
        gates = gates + (gated,)  # noqa: RUF005
        factors = factors + (factor,)  # noqa: RUF005
        offsets = offsets + (offset,)  # noqa: RUF005
    if DROP:
        first, second = _seeds(seed)
    top, bottom = _rows(starts, length, RAGGED, STRIP)
    for row in tl.range(top, bottom, num_stages=STAGES):
        parts = ()
        sums = tl.zeros([C], tl.float32)
        for i in tl.static_range(N):
            inside = _inside(i, width, WHOLE, C)
            at = row * width + i * C + col
            s = tl.load(x + at, mask=inside, other=0).to(tl.float32)
            if Y:
                a = tl.load(y + at, mask=inside, other=0).to(tl.float32)
                if Y_BIAS:
                    a += lifts[i]
                if DROP:
                    a = tl.where(_survives(at, first, second, least), a * keep, 0.0)
                if GATE:
                    a *= gates[i]
                s = (s + a).to(total.dtype.element_ty)  # what is kept is what is read
                tl.store(total + at, s, mask=inside)
                s = s.to(tl.float32)
                if Y_BIAS and not WHOLE:
                    s = tl.where(inside, s, 0.0)
            parts = parts + (s,)  # noqa: RUF005
            sums += s
        middle = tl.full([], 0.0, tl.float32)
        if CENTRED:
            middle = tl.sum(sums, 0) / width
            tl.store(mean + row, middle)
        squares = tl.zeros([C], tl.float32)
        for i in tl.static_range(N):
            d = parts[i] - middle
            if CENTRED and not WHOLE:
                d = tl.where(_inside(i, width, WHOLE, C), d, 0.0)
            squares += d * d
        r = tl.rsqrt(tl.sum(squares, 0) / width + eps)
        tl.store(spread + row, r)
        saids = ()
        high = tl.full([C], LEAST, tl.float32)
        for i in tl.static_range(N):
            inside = _inside(i, width, WHOLE, C)
            said = (parts[i] - middle) * r * factors[i] + offsets[i]
            tl.store(n + row * width + i * C + col, said.to(n.dtype.element_ty), mask=inside)
            if FEW:
                saids = saids + (said,)  # noqa: RUF005
                high = tl.maximum(high, tl.where(inside, tl.abs(said), 0.0))
        if FEW:
            most = tl.max(high, 0)
            tl.store(values_scale + row, most / LARGEST)
            for i in tl.static_range(N):
                few = (saids[i] * (LARGEST / most)).to(values.dtype.element_ty)
                tl.store(values + row * width + i * C + col, few, mask=_inside(i, width, WHOLE, C))


@triton.jit
def _join_back(
    total, y, y_bias, gate, weight, bias, shift, scale, seed, starts, mean, spread, dn, given, dx, dy, sums, length,
    width, gate_stride, change_stride, sums_stride, least, keep, STRIP: tl.constexpr, STAGES: tl.constexpr,
    RAGGED: tl.constexpr, CENTRED: tl.constexpr, Y: tl.constexpr, Y_BIAS: tl.constexpr, GATE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, CHANGE: tl.constexpr, DROP: tl.constexpr, GIVEN: tl.constexpr,
    C: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    col = tl.arange(0, C)
    factors = ()
    gates = ()
    by_scale = ()
    by_shift = ()
    by_gate = ()
    by_y = ()
    for i in tl.static_range(N):
        inside = _inside(i, width, WHOLE, C)
        factor = tl.full([C], 1.0, tl.float32)
        if WEIGHT:
            factor = tl.load(weight + i * C + col, mask=inside, other=0).to(tl.float32)
        if CHANGE:
            factor *= 1 + tl.load(scale + b * change_stride + i * C + col, mask=inside, other=0)
        gated = tl.full([C], 1.0, tl.float32)
        if GATE:
            gated = tl.load(gate + b * gate_stride + i * C + col, mask=inside, other=0).to(tl.float32)
        factors = factors + (factor,)  # noqa: RUF005
        gates = gates + (gated,)  # noqa: RUF005
        by_scale = by_scale + (tl.zeros([C], tl.float32),)  # noqa: RUF005
        by_shift = by_shift + (tl.zeros([C], tl.float32),)  # noqa: RUF005
        by_gate = by_gate + (tl.zeros([C], tl.float32),)  # noqa: RUF005
        by_y = by_y + (tl.zeros([C], tl.float32),)  # noqa: RUF005
    if DROP:
        first, second = _seeds(seed)
    top, bottom = _rows(starts, length, RAGGED, STRIP)
    for row in tl.range(top, bottom, num_stages=STAGES):
        r = tl.load(spread + row)
        middle = tl.full([], 0.0, tl.float32)
        if CENTRED:
            middle = tl.load(mean + row)
        normed = ()
        slopes = ()
        scaled = ()
        shifted = ()
        along = tl.zeros([C], tl.float32)
        plain = tl.zeros([C], tl.float32)
        for i in tl.static_range(N):
            inside = _inside(i, width, WHOLE, C)
            at = row * width + i * C + col
            d = (tl.load(total + at, mask=inside, other=0).to(tl.float32) - middle) * r
            slope = tl.load(dn + at, mask=inside, other=0).to(tl.float32)
            scaled = scaled + (by_scale[i] + slope * d,)  # noqa: RUF005
            shifted = shifted + (by_shift[i] + slope,)  # noqa: RUF005
            slope *= factors[i]
            along += slope * d
            plain += slope
            normed = normed + (d,)  # noqa: RUF005
            slopes = slopes + (slope,)  # noqa: RUF005
        by_scale = scaled
        by_shift = shifted
        tilt = tl.sum(along, 0) / width
        lean = tl.full([], 0.0, tl.float32)
        if CENTRED:
            lean = tl.sum(plain, 0) / width
        gated_sums = ()
        y_sums = ()
        for i in tl.static_range(N):
            inside = _inside(i, width, WHOLE, C)
            at = row * width + i * C + col
            v = (slopes[i] - normed[i] * tilt - lean) * r
            if GIVEN:
                v += tl.load(given + at, mask=inside, other=0).to(tl.float32)
            tl.store(dx + at, v.to(dx.dtype.element_ty), mask=inside)
            if Y:
                if DROP:
                    v = tl.where(_survives(at, first, second, least), v * keep, 0.0)
                if GATE:
                    a = tl.load(y + at, mask=inside, other=0).to(tl.float32)
                    gated_sums = gated_sums + (by_gate[i] + v * a,)  # noqa: RUF005
                if Y_BIAS:
                    y_sums = y_sums + (by_y[i] + v,)  # noqa: RUF005
                tl.store(dy + at, (v * gates[i]).to(dy.dtype.element_ty), mask=inside)
        if Y and GATE:
            by_gate = gated_sums
        if Y and Y_BIAS:
            by_y = y_sums
    for i in tl.static_range(N):
        inside = _inside(i, width, WHOLE, C)
        out = sums + (b * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * width + i * C + col
        tl.store(out, by_scale[i], mask=inside)
        tl.store(out + sums_stride, by_shift[i], mask=inside)
        tl.store(out + 2 * sums_stride, by_gate[i], mask=inside)
        tl.store(out + 3 * sums_stride, by_y[i], mask=inside)
