"""The twin of `definition` in Triton: the output is read once and its gradient written in its place.

A program is one warp. It goes down some columns row by row, so that whatever concerns a whole row is a number and not a
tensor: whether a token of its own stands here, or whether a score is too large, is asked once a row, and most rows are
done without. It writes the sums of its part; the sums of sums are torch's. Nothing is added by two programs to one
place, so the same bits come out every time. Arithmetic is in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.ops.linear_loss_reference import GUARD, Entries, Sums
from sedd.runtime.device import cdiv

SIZES = {False: (128, 512, 3), True: (64, 256, 1)}
"""Rows and columns of a program of `slopes_`, and loads under way; without ratios to compare with, and with."""
SUM_ROWS, SUM_COLUMNS, SUM_STAGES, SUM_WARPS = 4, 512, 3, 2
"""Rows of a program of `logsumexp`, what it reads of them at a time, loads under way, and its warps."""
MOST = 65_535
"""Strips, which is as many programs as the second axis of a grid has."""
LARGE, SMALL = 1e34, 1e-28
"""Costs that sum to less have no score beyond the guard among them; exponentials that sum to more have lost little."""
BITS: tl.constexpr = tl.constexpr(1.4426950408889634)
"""log₂ e."""


def slopes_(z: Tensor, entries: Entries) -> Sums:
    """See `definition.slopes_`."""
    n, width = z.shape
    strip, size, stages = SIZES[entries.log_rest is not None]
    while cdiv(n, strip) > MOST:
        strip *= 2
    grid = cdiv(width, size), cdiv(n, strip)
    values = z.new_empty(grid[0], n, dtype=torch.float32)
    columns = z.new_empty(grid[1], entries.states, dtype=torch.float32)
    overflow_count = z.new_empty(grid[0], n, dtype=torch.int16)
    e = entries
    absent = e.scale  # stands for a pointer that is never followed
    _slopes[grid](
        z,
        absent if e.bias is None else e.bias,
        e.scale,
        e.weight,
        e.data,
        e.at_data,
        e.data if e.skip is None else e.skip,
        absent if e.log_rest is None else e.log_rest,
        values,
        columns,
        overflow_count,
        n,
        e.states,
        width,
        BIAS=e.bias is not None,
        SKIP=e.skip is not None,
        REST=e.log_rest is not None,
        GUARD=GUARD,
        LARGE=LARGE,
        STRIP=strip,
        C=size,
        STAGES=stages,
        num_warps=1,
    )
    return Sums(values.sum(0), columns.sum(0), overflow_count.sum(0))


def logsumexp(z: Tensor, states: int, bias: Tensor | None) -> Tensor:
    """See `definition.logsumexp`."""
    n, width = z.shape
    total = z.new_empty(n, dtype=torch.float32)
    _logsumexp[(cdiv(n, SUM_ROWS),)](
        z,
        total if bias is None else bias,
        total,
        n,
        states,
        width,
        BIAS=bias is not None,
        LARGE=LARGE,
        SMALL=SMALL,
        R=SUM_ROWS,
        C=SUM_COLUMNS,
        STAGES=SUM_STAGES,
        num_warps=SUM_WARPS,
    )
    return total


@triton.jit
def _entropy(log_s, log_a, REST: tl.constexpr):
    """s − a log s + K(a) and s − a; by a(e^d − 1 − d) in its series where that would cancel, or s alone for a = 0."""
    s = tl.exp2(
        log_s * BITS
    )  # `tl.exp` would keep what is less than a float's normal numbers, and take three times as long
    value = s
    slope = s
    if REST:
        a = tl.exp2(log_a * BITS)
        d = log_s - log_a
        series = 1.0 / 720 + d * (1.0 / 5040 + d * (1.0 / 40320))
        series = 1.0 / 24 + d * (1.0 / 120 + d * series)
        series = 0.5 + d * (1.0 / 6 + d * series)
        value = tl.where(tl.abs(d) < 0.5, a * (d * d) * series, s - a - a * d)
        slope = value + a * d
    return value, slope


@triton.jit(do_not_specialize=["n"])  # it differs from step to step
def _slopes(
    z,
    bias,
    scale,
    weight,
    data,
    at_data,
    skip,
    log_rest,
    values,
    columns,
    overflow_count,
    n,
    states,
    width,
    BIAS: tl.constexpr,
    SKIP: tl.constexpr,
    REST: tl.constexpr,
    GUARD: tl.constexpr,
    LARGE: tl.constexpr,
    STRIP: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
):
    left = tl.program_id(0) * C
    col = left + tl.arange(0, C)
    counts = col < states
    plus = tl.zeros([C], tl.float32)
    if BIAS:
        plus += tl.load(bias + col, mask=counts, other=0)
    total = tl.zeros([C], tl.float32)
    top = tl.program_id(1) * STRIP
    for row in tl.range(top, tl.minimum(top + STRIP, n), num_stages=STAGES):
        place = z + row * width.to(tl.int64) + col
        log_s = tl.load(place, mask=col < width, other=0).to(tl.float32) + (plus + tl.load(scale + row))
        log_a = 0.0
        if REST:
            log_a = tl.load(log_rest + row)
        times = tl.load(weight + row)
        own = tl.load(data + row).to(tl.int32) - left
        special = (left + C > states) | ((own >= 0) & (own < C))
        if SKIP:
            skipped = tl.load(skip + row).to(tl.int32) - left
            special |= (skipped >= 0) & (skipped < C)

        value, slope = _entropy(log_s, log_a, REST)
        slope *= times
        sums = tl.sum(value)
        far = tl.full([], 0, tl.int32)
        if special | ~(sums < LARGE):  # an entry unlike the others, or one too large, or none at all: all again
            log_s = tl.where(counts, log_s, 0.0)
            large = log_s > GUARD
            # a minimum may hide what is no number
            value, slope = _entropy(tl.where(large, GUARD, log_s), log_a, REST)
            slope = tl.where(col == own + left, tl.load(at_data + row), times * slope)
            out = (col == own + left) | ~counts
            slope = tl.where(counts, slope, 0.0)
            if SKIP:
                slope = tl.where(col == skipped + left, 0.0, slope)
                out |= col == skipped + left
                large &= col != skipped + left
            sums = tl.sum(tl.where(out, 0.0, value))
            far = tl.sum(large.to(tl.int32))

        tl.store(place, slope.to(z.dtype.element_ty), mask=col < width)
        at = tl.program_id(0) * n + row
        tl.store(values + at, sums)
        tl.store(overflow_count + at, far.to(tl.int16))
        total += slope
    tl.store(columns + tl.program_id(1).to(tl.int64) * states + col, total, mask=counts)


@triton.jit(do_not_specialize=["n"])
def _logsumexp(
    z,
    bias,
    total,
    n,
    states,
    width,
    BIAS: tl.constexpr,
    LARGE: tl.constexpr,
    SMALL: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A few rows a program. Exponentials are summed as they are; where a sum is too large or too small, once more."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    start = z + row[:, None].to(tl.int64) * width
    sums = tl.zeros([R, C], tl.float32)
    for left in tl.range(0, states, C, num_stages=STAGES):
        sums += tl.exp2(_entries(start, bias, row, left, n, states, width, BIAS, C) * BITS)
    found = tl.sum(sums, 1)
    most = tl.zeros([R], tl.float32)
    if tl.sum(((found < LARGE) & (found > SMALL)).to(tl.int32), 0) < R:
        highest = tl.full([R, C], -float("inf"), tl.float32)
        for left in range(0, states, C):
            highest = tl.maximum(highest, _entries(start, bias, row, left, n, states, width, BIAS, C))
        most = tl.max(highest, 1)
        sums = tl.zeros([R, C], tl.float32)
        for left in range(0, states, C):
            x = _entries(start, bias, row, left, n, states, width, BIAS, C)
            sums += tl.exp2((x - most[:, None]) * BITS)
        found = tl.sum(sums, 1)
    tl.store(total + row, most + tl.log(found), mask=row < n)


@triton.jit
def _entries(start, bias, row, left, n, states, width, BIAS: tl.constexpr, C: tl.constexpr):
    """A part of some rows; −∞ behind the last that counts, which few parts have."""
    col = left + tl.arange(0, C)
    # all of the width, which is even, so that loads are wide
    x = tl.load(start + col[None, :], mask=(row < n)[:, None] & (col < width)[None, :], other=0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + col, mask=col < states, other=0)[None, :]
    if left + C > states:
        x = tl.where((col < states)[None, :], x, -float("inf"))
    return x
