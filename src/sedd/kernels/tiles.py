"""The twin of `definition` in Triton: the output is read once and its gradient written in its place.

A program does a tile of rows × entries and writes the sums of its tile; the sums of sums are torch's. Nothing is added
by two programs to one place, so the same bits come out every time. Arithmetic is in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.kernels.definition import GUARD, Entries, Sums

ROWS, STRIP, COLUMNS, WARPS = 8, 256, 256, 8
"""Of `slopes_`: rows at a time, rows and columns of a program, and its warps. A warp has a row of its own at a time, so
that a row is summed within it; columns are summed over the rows of a program before anybody else is asked."""
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 4, 2048, 8
"""A tile of `logsumexp`, which goes along the rows."""


def slopes_(z: Tensor, entries: Entries) -> Sums:
    """See `definition.slopes_`."""
    n, width = z.shape
    grid = triton.cdiv(n, STRIP), triton.cdiv(width, COLUMNS)
    values = z.new_empty(n, grid[1], dtype=torch.float32)
    columns = z.new_empty(grid[0], entries.states, dtype=torch.float32)
    beyond = z.new_empty(n, grid[1], dtype=torch.int16)
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
        beyond,
        n,
        e.states,
        width,
        BIAS=e.bias is not None,
        SKIP=e.skip is not None,
        REST=e.log_rest is not None,
        GUARD=GUARD,
        STRIP=STRIP,
        R=ROWS,
        C=COLUMNS,
        num_warps=WARPS,
    )
    return Sums(values.sum(-1), columns.sum(0), beyond.sum(-1))


def logsumexp(z: Tensor, states: int, bias: Tensor | None) -> Tensor:
    """See `definition.logsumexp`."""
    n, width = z.shape
    total = z.new_empty(n, dtype=torch.float32)
    _logsumexp[(triton.cdiv(n, SUM_ROWS),)](
        z,
        total if bias is None else bias,
        total,
        n,
        states,
        width,
        BIAS=bias is not None,
        R=SUM_ROWS,
        C=SUM_COLUMNS,
        num_warps=SUM_WARPS,
    )
    return total


@triton.jit
def _entropy(log_s, log_a, REST: tl.constexpr):
    """s − a log s + K(a) and s − a; by a(e^d − 1 − d) in its series where that would cancel, or s alone for a = 0."""
    s = tl.exp(log_s)
    value = s
    slope = s
    if REST:
        a = tl.exp(log_a)
        d = log_s - log_a
        series = 1 + d * (1.0 / 10)
        series = 1 + d * (1.0 / 9) * series
        series = 1 + d * (1.0 / 8) * series
        series = 1 + d * (1.0 / 7) * series
        series = 1 + d * (1.0 / 6) * series
        series = 1 + d * (1.0 / 5) * series
        series = 1 + d * (1.0 / 4) * series
        series = 1 + d * (1.0 / 3) * series
        series = 0.5 * d * d * series
        near = tl.abs(d) < 0.5
        value = tl.where(near, a * series, s - a * (1 + d))
        slope = tl.where(near, a * (d + series), s - a)
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
    beyond,
    n,
    states,
    width,
    BIAS: tl.constexpr,
    SKIP: tl.constexpr,
    REST: tl.constexpr,
    GUARD: tl.constexpr,
    STRIP: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    col = tl.program_id(1) * C + tl.arange(0, C)
    counts = (col < states)[None, :]
    if BIAS:
        plus = tl.load(bias + col, mask=col < states, other=0)[None, :]
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, STRIP, R):
        row = tl.program_id(0) * STRIP + start + tl.arange(0, R)
        here = row < n
        place = z + row[:, None].to(tl.int64) * width + col[None, :]
        # all of the width, which is even, so that loads are wide; what does not count is left out below
        held = here[:, None] & (col < width)[None, :]
        log_s = tl.load(place, mask=held, other=0).to(tl.float32)
        log_s += tl.load(scale + row, mask=here, other=0)[:, None]
        if BIAS:
            log_s += plus
        log_s = tl.where(counts, log_s, 0.0)
        own = tl.load(data + row, mask=here, other=-1).to(tl.int32)[:, None] == col[None, :]
        at_own = tl.load(at_data + row, mask=here, other=0)[:, None]
        times = tl.load(weight + row, mask=here, other=0)[:, None]
        log_a = 0.0
        if REST:
            log_a = tl.load(log_rest + row, mask=here, other=0)[:, None]

        far = log_s > GUARD
        value, slope = _entropy(tl.where(far, GUARD, log_s), log_a, REST)  # a minimum may hide what is no number
        slope = tl.where(own, at_own, times * slope)
        out = own | ~counts
        slope = tl.where(counts, slope, 0.0)
        if SKIP:
            skipped = tl.load(skip + row, mask=here, other=-1).to(tl.int32)[:, None] == col[None, :]
            slope = tl.where(skipped, 0.0, slope)
            out = out | skipped
            far = far & ~skipped
        value = tl.where(out, 0.0, value)

        tl.store(place, slope.to(z.dtype.element_ty), mask=held)
        tile = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(values + tile, tl.sum(value, 1), mask=here)
        tl.store(beyond + tile, tl.sum(far.to(tl.int32), 1).to(tl.int16), mask=here)
        total += tl.where(here[:, None], slope, 0.0)
    out = columns + tl.program_id(0).to(tl.int64) * states + col
    tl.store(out, tl.sum(total, 0), mask=col < states)


@triton.jit(do_not_specialize=["n"])
def _logsumexp(z, bias, total, n, states, width, BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """A few rows a program, one exponential an entry: sums are relative to the largest entry so far."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    here = (row < n)[:, None]
    most = tl.full([R], -float("inf"), tl.float32)
    sums = tl.zeros([R, C], tl.float32)
    for start in range(0, states, C):
        col = (start + tl.arange(0, C))[None, :]
        x = tl.load(z + row[:, None].to(tl.int64) * width + col, mask=here & (col < width), other=0).to(tl.float32)
        if BIAS:
            x += tl.load(bias + col, mask=col < states, other=0)
        x = tl.where(col < states, x, -float("inf"))
        higher = tl.maximum(most, tl.max(x, 1))
        sums = sums * tl.exp(most - higher)[:, None] + tl.exp(x - higher[:, None])
        most = higher
    tl.store(total + row, most + tl.log(tl.sum(sums, 1)), mask=row < n)
