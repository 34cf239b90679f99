"""The kernel of `swift.join` in Triton, by strips as in `strips`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.kernels.glue import threshold

JOIN_ROWS, JOIN_STRIP, JOIN_WARPS, JOIN_STAGES = 1, 16, 4, 3
"""Rows at a time, rows a program, warps, and loads under way of `join`."""
BACK_ROWS, BACK_STRIP, BACK_WARPS, BACK_STAGES = 1, 32, 4, 3
"""The same of `join_back`."""


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


def join(x: Tensor, parts: Parts, plan: Join, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stream with the branch, what the next block reads, and mean and 1/spread of every row."""
    b, length, width = parts.sequences(x), plan.length, x.shape[-1]
    total = x if parts.y is None else torch.empty_like(x)
    n = torch.empty_like(x, dtype=dtype)
    mean, spread = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    strip = JOIN_STRIP if b * length >= 2**14 else JOIN_ROWS
    _join[(triton.cdiv(length, strip), b)](
        x, *parts.pointers(x), total, n, mean, spread, length, width, *parts.strides(),
        threshold(plan.rate), 1 / (1 - plan.rate), plan.eps, STRIP=strip, STAGES=JOIN_STAGES, CENTRED=plan.centred,
        **parts.flags(plan.rate > 0), R=JOIN_ROWS, C=triton.next_power_of_2(width), num_warps=JOIN_WARPS,
    )  # fmt: skip
    return total, n, mean, spread


class JoinBack(NamedTuple):
    """Gradients of a join: of the stream, of the branch, and sums over positions for each sequence."""

    dx: Tensor
    dy: Tensor | None
    sums: tuple[Tensor, Tensor, Tensor, Tensor]


def join_back(
    total: Tensor, parts: Parts, plan: Join, mean: Tensor, spread: Tensor, dn: Tensor, g: Tensor | None
) -> JoinBack:
    """From the gradients of what `join` gave to those of what it was given."""
    b, length, width = parts.sequences(total), plan.length, total.shape[-1]
    dx = torch.empty_like(total)
    dy = None if parts.y is None else torch.empty_like(parts.y)
    strips = triton.cdiv(length, BACK_STRIP)
    sums = total.new_empty(4, b, strips, width, dtype=torch.float32)
    given = total if g is None else g.contiguous()
    _join_back[(strips, b)](
        total, *parts.pointers(total), mean, spread, dn, given, dx, dx if dy is None else dy, sums, length, width,
        *parts.strides(), sums.stride(0), threshold(plan.rate), 1 / (1 - plan.rate), STRIP=BACK_STRIP,
        STAGES=BACK_STAGES, CENTRED=plan.centred, **parts.flags(plan.rate > 0), GIVEN=g is not None, R=BACK_ROWS,
        C=triton.next_power_of_2(width), num_warps=BACK_WARPS,
    )  # fmt: skip
    scale_sum, plain_sum, gate_sum, y_sum = sums.sum(2)
    return JoinBack(dx, dy, (scale_sum, plain_sum, gate_sum, y_sum))


@triton.jit
def _survives(index, first, second, least):
    """See `glue.survivors`."""
    h = index.to(tl.uint32) ^ first
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = (h ^ (h >> 16)) ^ second
    h = (h ^ (h >> 15)) * 0x85EBCA6B
    h = (h ^ (h >> 16)) * 0xC2B2AE35
    h = h ^ (h >> 17)
    return h >= least.to(tl.uint32)


@triton.jit
def _run(starts, length, RAGGED: tl.constexpr, STRIP: tl.constexpr):
    """Of a program's sequence the first row and how many there are; of the program, how many it looks at."""
    first, steps = tl.program_id(1).to(tl.int64) * length, STRIP
    if RAGGED:
        first = tl.load(starts + tl.program_id(1))
        length = (tl.load(starts + tl.program_id(1) + 1) - first).to(tl.int32)
        steps = tl.minimum(STRIP, length - tl.program_id(0) * STRIP)
    return first, length, steps


@triton.jit
def _join(
    x, y, y_bias, gate, weight, bias, shift, scale, seed, starts, total, n, mean, spread, length, width, gate_stride,
    change_stride, least, keep, eps, STRIP: tl.constexpr, STAGES: tl.constexpr, RAGGED: tl.constexpr,
    CENTRED: tl.constexpr, Y: tl.constexpr, Y_BIAS: tl.constexpr, GATE: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, CHANGE: tl.constexpr, DROP: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    begin, length, steps = _run(starts, length, RAGGED, STRIP)
    col = tl.arange(0, C)
    inside = col < width
    if Y_BIAS:
        lift = tl.load(y_bias + col, mask=inside, other=0).to(tl.float32)[None, :]
    if GATE:
        g = tl.load(gate + b * gate_stride + col, mask=inside, other=0)[None, :]
    if WEIGHT:
        w = tl.load(weight + col, mask=inside, other=0).to(tl.float32)[None, :]
    if BIAS:
        v = tl.load(bias + col, mask=inside, other=0).to(tl.float32)[None, :]
    if CHANGE:
        plus = tl.load(shift + b * change_stride + col, mask=inside, other=0)[None, :]
        times = 1 + tl.load(scale + b * change_stride + col, mask=inside, other=0)[None, :]
    if DROP:
        first, second = tl.load(seed).to(tl.uint32), tl.load(seed + 1).to(tl.uint32)
    for start in tl.range(0, steps, R, num_stages=STAGES):
        place = tl.program_id(0) * STRIP + start + tl.arange(0, R)
        row = begin + place
        here = place < length
        held = here[:, None] & inside[None, :]
        at = row[:, None] * width + col[None, :]
        s = tl.load(x + at, mask=held, other=0).to(tl.float32)
        if Y:
            a = tl.load(y + at, mask=held, other=0).to(tl.float32)
            if Y_BIAS:
                a += lift
            if DROP:
                a = tl.where(_survives(at, first, second, least), a * keep, 0.0)
            if GATE:
                a *= g
            s = (s + a).to(total.dtype.element_ty)  # what is kept is what is read
            tl.store(total + at, s, mask=held)
            s = s.to(tl.float32)
        if CENTRED:
            middle = tl.sum(s, 1) / width
            d = tl.where(inside[None, :], s - middle[:, None], 0.0)
            tl.store(mean + row, middle, mask=here)
        else:
            d = s
        r = tl.rsqrt(tl.sum(d * d, 1) / width + eps)
        tl.store(spread + row, r, mask=here)
        d *= r[:, None]
        if WEIGHT:
            d *= w
        if BIAS:
            d += v
        if CHANGE:
            d = d * times + plus
        tl.store(n + at, d.to(n.dtype.element_ty), mask=held)


@triton.jit
def _join_back(
    total, y, y_bias, gate, weight, bias, shift, scale, seed, starts, mean, spread, dn, given, dx, dy, sums, length,
    width, gate_stride, change_stride, sums_stride, least, keep, STRIP: tl.constexpr, STAGES: tl.constexpr,
    RAGGED: tl.constexpr, CENTRED: tl.constexpr, Y: tl.constexpr, Y_BIAS: tl.constexpr, GATE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, CHANGE: tl.constexpr, DROP: tl.constexpr, GIVEN: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    begin, length, steps = _run(starts, length, RAGGED, STRIP)
    col = tl.arange(0, C)
    inside = col < width
    times = tl.full([1, C], 1.0, tl.float32)
    if WEIGHT:
        times = tl.load(weight + col, mask=inside, other=0).to(tl.float32)[None, :]
    if CHANGE:
        times *= 1 + tl.load(scale + b * change_stride + col, mask=inside, other=0)[None, :]
    if Y_BIAS:
        lift = tl.load(y_bias + col, mask=inside, other=0).to(tl.float32)[None, :]
    if GATE:
        gates = tl.load(gate + b * gate_stride + col, mask=inside, other=0)[None, :]
    if DROP:
        first, second = tl.load(seed).to(tl.uint32), tl.load(seed + 1).to(tl.uint32)
    by_scale = tl.zeros([R, C], tl.float32)
    by_shift = tl.zeros([R, C], tl.float32)
    by_gate = tl.zeros([R, C], tl.float32)
    by_y = tl.zeros([R, C], tl.float32)
    for start in tl.range(0, steps, R, num_stages=STAGES):
        place = tl.program_id(0) * STRIP + start + tl.arange(0, R)
        row = begin + place
        here = place < length
        held = here[:, None] & inside[None, :]
        at = row[:, None] * width + col[None, :]
        d = tl.load(total + at, mask=held, other=0).to(tl.float32)
        slope = tl.load(dn + at, mask=held, other=0).to(tl.float32)
        r = tl.load(spread + row, mask=here, other=0)[:, None]
        if CENTRED:
            d -= tl.load(mean + row, mask=here, other=0)[:, None]
        d *= r
        by_scale += slope * d
        by_shift += slope
        slope *= times
        v = slope - d * (tl.sum(slope * d, 1) / width)[:, None]
        if CENTRED:
            v -= (tl.sum(slope, 1) / width)[:, None]
        v *= r
        if GIVEN:
            v += tl.load(given + at, mask=held, other=0).to(tl.float32)
        tl.store(dx + at, v.to(dx.dtype.element_ty), mask=held)
        if Y:
            if DROP:
                kept = tl.where(_survives(at, first, second, least), keep, 0.0)
                v *= kept
            if GATE:
                a = tl.load(y + at, mask=held, other=0).to(tl.float32)
                if Y_BIAS:
                    a += lift
                by_gate += tl.where(held, v * a, 0.0)
                v *= gates
            if Y_BIAS:
                by_y += tl.where(held, v, 0.0)
            tl.store(dy + at, v.to(dy.dtype.element_ty), mask=held)
    out = sums + (b * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * width + col
    tl.store(out, tl.sum(by_scale, 0), mask=inside)
    tl.store(out + sums_stride, tl.sum(by_shift, 0), mask=inside)
    tl.store(out + 2 * sums_stride, tl.sum(by_gate, 0), mask=inside)
    tl.store(out + 3 * sums_stride, tl.sum(by_y, 0), mask=inside)
