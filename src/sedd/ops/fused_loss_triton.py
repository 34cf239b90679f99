"""Triton kernels of the linear loss: logits are read once and overwritten by their gradient. Arithmetic is in float32.

A program is one warp, which goes down a block of columns row by row. Whatever concerns a whole row is then a scalar:
whether x_0 or x_t lies in these columns, or whether a score overflows, is tested once per row, and most rows take the
fast path. Every program writes its own partial sums, which torch adds up: no atomic additions, so the same bits come
out every time.
"""

from typing import final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.ops.fused_loss import MAX_LOG_SCORE, EntropySums, EntropyTerms, LinearLossBackend
from sedd.runtime.device import cdiv

SIZES = {False: (128, 512, 3), True: (64, 256, 1)}
"""Rows, columns and pipeline stages of a program of the entropy kernel; with a = 0 except at x_0, and in general."""
SUM_ROWS, SUM_COLUMNS, SUM_STAGES, SUM_WARPS = 4, 512, 3, 2
"""Rows, columns per load, pipeline stages and warps of a program of the logsumexp kernel."""
MAX_GRID_Y = 65_535  # largest second dimension of a CUDA grid
LARGE, SMALL = 1e34, 1e-28
"""A sum of divergences below LARGE has no score above the clamp; a sum of exponentials above SMALL is accurate."""
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@final
class TritonLinearLoss(LinearLossBackend):
    """Triton kernels of the linear loss, for CUDA."""

    def entropy_and_grad_(self, z: Tensor, terms: EntropyTerms) -> EntropySums:
        n, width = z.shape
        rows, columns, stages = SIZES[terms.log_rest is not None]
        while cdiv(n, rows) > MAX_GRID_Y:
            rows *= 2
        grid = cdiv(width, columns), cdiv(n, rows)
        row_sums = z.new_empty(grid[0], n, dtype=torch.float32)
        column_sums = z.new_empty(grid[1], terms.states, dtype=torch.float32)
        overflow_count = z.new_empty(grid[0], n, dtype=torch.int16)
        unused = terms.scale  # a pointer that is never read
        _entropy_and_grad[grid](
            z, unused if terms.bias is None else terms.bias, terms.scale, terms.weight, terms.data, terms.grad_at_data,
            terms.data if terms.skip is None else terms.skip, unused if terms.log_rest is None else terms.log_rest,
            row_sums, column_sums, overflow_count, n, terms.states, width, BIAS=terms.bias is not None,
            SKIP=terms.skip is not None, REST=terms.log_rest is not None, MAX_LOG_SCORE=MAX_LOG_SCORE, LARGE=LARGE,
            ROWS=rows, C=columns, STAGES=stages, num_warps=1,
        )  # fmt: skip
        return EntropySums(row_sums.sum(0), column_sums.sum(0), overflow_count.sum(0))

    def logsumexp(self, z: Tensor, states: int, bias: Tensor | None) -> Tensor:
        n, width = z.shape
        total = z.new_empty(n, dtype=torch.float32)
        _logsumexp[(cdiv(n, SUM_ROWS),)](
            z, total if bias is None else bias, total, n, states, width, BIAS=bias is not None, LARGE=LARGE,
            SMALL=SMALL, R=SUM_ROWS, C=SUM_COLUMNS, STAGES=SUM_STAGES, num_warps=SUM_WARPS,
        )  # fmt: skip
        return total


TRITON = TritonLinearLoss()


@triton.jit
def _entropy(log_s, log_a, REST: tl.constexpr):
    """Return score entropy s − a log s + K(a) and its derivative s − a; both are s if a = 0.

    With d = log s − log a it is a(e^d − 1 − d), by its series where that would cancel.
    """
    s = tl.exp2(log_s * LOG2_E)  # `tl.exp` would keep subnormal results and take three times as long
    value = s
    grad = s
    if REST:
        a = tl.exp2(log_a * LOG2_E)
        d = log_s - log_a
        series = 1.0 / 720 + d * (1.0 / 5040 + d * (1.0 / 40320))
        series = 1.0 / 24 + d * (1.0 / 120 + d * series)
        series = 0.5 + d * (1.0 / 6 + d * series)
        value = tl.where(tl.abs(d) < 0.5, a * (d * d) * series, s - a - a * d)
        grad = value + a * d
    return value, grad


@triton.jit(do_not_specialize=["n"])  # n changes from step to step
def _entropy_and_grad(
    z, bias, scale, weight, data, grad_at_data, skip, log_rest, row_sums, column_sums, overflow_count, n, states, width,
    BIAS: tl.constexpr, SKIP: tl.constexpr, REST: tl.constexpr, MAX_LOG_SCORE: tl.constexpr, LARGE: tl.constexpr,
    ROWS: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    left = tl.program_id(0) * C
    col = left + tl.arange(0, C)
    is_state = col < states
    bias_c = tl.zeros([C], tl.float32)
    if BIAS:
        bias_c += tl.load(bias + col, mask=is_state, other=0)
    total = tl.zeros([C], tl.float32)
    top = tl.program_id(1) * ROWS
    for row in tl.range(top, tl.minimum(top + ROWS, n), num_stages=STAGES):
        at_z = z + row * width.to(tl.int64) + col
        log_s = tl.load(at_z, mask=col < width, other=0).to(tl.float32) + (bias_c + tl.load(scale + row))
        log_a = 0.0
        if REST:
            log_a = tl.load(log_rest + row)
        weight_r = tl.load(weight + row)
        data_c = tl.load(data + row).to(tl.int32) - left
        special = (left + C > states) | ((data_c >= 0) & (data_c < C))
        if SKIP:
            skip_c = tl.load(skip + row).to(tl.int32) - left
            special |= (skip_c >= 0) & (skip_c < C)

        value, grad = _entropy(log_s, log_a, REST)
        grad *= weight_r
        sums = tl.sum(value)
        overflows = tl.full([], 0, tl.int32)
        # x_0, x_t or padding in these columns, an overflow or NaN: compute the row again, entry by entry
        if special | ~(sums < LARGE):
            log_s = tl.where(is_state, log_s, 0.0)
            overflow = log_s > MAX_LOG_SCORE
            # `tl.minimum` may hide a NaN
            value, grad = _entropy(tl.where(overflow, MAX_LOG_SCORE, log_s), log_a, REST)
            grad = tl.where(col == data_c + left, tl.load(grad_at_data + row), weight_r * grad)
            excluded = (col == data_c + left) | ~is_state
            grad = tl.where(is_state, grad, 0.0)
            if SKIP:
                grad = tl.where(col == skip_c + left, 0.0, grad)
                excluded |= col == skip_c + left
                overflow &= col != skip_c + left
            sums = tl.sum(tl.where(excluded, 0.0, value))
            overflows = tl.sum(overflow.to(tl.int32))

        tl.store(at_z, grad.to(z.dtype.element_ty), mask=col < width)
        at = tl.program_id(0) * n + row
        tl.store(row_sums + at, sums)
        tl.store(overflow_count + at, overflows.to(tl.int16))
        total += grad
    tl.store(column_sums + tl.program_id(1).to(tl.int64) * states + col, total, mask=is_state)


@triton.jit(do_not_specialize=["n"])
def _logsumexp(
    z, bias, total, n, states, width, BIAS: tl.constexpr, LARGE: tl.constexpr, SMALL: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum exponentials of R rows without subtracting their maximum; where a sum over- or underflows, do it again."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    start = z + row[:, None].to(tl.int64) * width
    sums = tl.zeros([R, C], tl.float32)
    for left in tl.range(0, states, C, num_stages=STAGES):
        sums += tl.exp2(_logits(start, bias, row, left, n, states, width, BIAS, C) * LOG2_E)
    sum_exp = tl.sum(sums, 1)
    highest_r = tl.zeros([R], tl.float32)
    if tl.sum(((sum_exp < LARGE) & (sum_exp > SMALL)).to(tl.int32), 0) < R:
        highest = tl.full([R, C], -float("inf"), tl.float32)
        for left in range(0, states, C):
            highest = tl.maximum(highest, _logits(start, bias, row, left, n, states, width, BIAS, C))
        highest_r = tl.max(highest, 1)
        sums = tl.zeros([R, C], tl.float32)
        for left in range(0, states, C):
            x = _logits(start, bias, row, left, n, states, width, BIAS, C)
            sums += tl.exp2((x - highest_r[:, None]) * LOG2_E)
        sum_exp = tl.sum(sums, 1)
    tl.store(total + row, highest_r + tl.log(sum_exp), mask=row < n)


@triton.jit
def _logits(start, bias, row, left, n, states, width, BIAS: tl.constexpr, C: tl.constexpr):
    """Load logits of R rows; −∞ after the last state, which most loads do not reach."""
    col = left + tl.arange(0, C)
    # the mask is the padded width, so that loads stay vectorized
    x = tl.load(start + col[None, :], mask=(row < n)[:, None] & (col < width)[None, :], other=0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + col, mask=col < states, other=0)[None, :]
    if left + C > states:
        x = tl.where((col < states)[None, :], x, -float("inf"))
    return x
