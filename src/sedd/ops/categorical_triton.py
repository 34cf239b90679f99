"""Draws in Triton: categorical sampling from logits, and the uniforms of `CounterRNG`.

A program of the sampler reads a row of logits in two or three passes and writes one token. Exponentials and the
additions within a lane, about two dozen, are in float32; sums over lanes and all comparisons are in float64, so that a
token of probability 1e-12 is drawn with that probability.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.draws import AffineWeights, CounterRNG
from sedd.ops.categorical import HeadLogits, SampledTokens
from sedd.runtime.device import cdiv

COLUMNS, WARPS = 2048, 8  # logits per load and warps of a program
MAX_LOG_SCORE: tl.constexpr = tl.constexpr(70.0)
"""Scores are clamped at e^70: the sum of fifty thousand of them is finite, and staying has probability 0 beside it."""


def sample_categorical_triton(head: HeadLogits, x: Tensor, weights: AffineWeights, u: Tensor) -> SampledTokens:
    """Draw the next token of every row; see `categorical.sample_categorical`."""
    y, clamped = torch.empty_like(x), torch.empty_like(x, dtype=torch.int32)
    if not len(x):
        return SampledTokens(y, clamped.sum())
    parts = [weights.change_score if part is None else part for part in weights]  # a pointer that is never read
    _sample[(len(x),)](
        head.logits, x, head.shift.float(), *(part.double() for part in parts), u.contiguous(), y, clamped,
        head.vocab_size, head.logits.shape[1], head.logits.stride(0), IS_SCORE=head.is_score,
        AFFINE=weights.change_sum is not None, STAYS=weights.stay_own is not None, C=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return SampledTokens(y, clamped.sum())


@triton.jit
def _exp(x):
    """Return e^x, flushing subnormal results to 0: `tl.exp` would keep them and take three times as long."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _log_scores(row, start, width, shift_k, C: tl.constexpr):
    """Load C log-scores of a row; the mask is the padded width, so that loads stay vectorized."""
    col = start + tl.arange(0, C)
    return tl.load(row + col, mask=col < width, other=0).to(tl.float32) + shift_k


@triton.jit
def _fill_excluded(each, start, states, own, fill, C: tl.constexpr):
    """Replace the entries of x itself and past the last state, which most parts of a row do not contain."""
    if (start + C > states) | ((own >= start) & (own < start + C)):
        col = start + tl.arange(0, C)
        each = tl.where((col < states) & (col != own), each, fill)
    return each


@triton.jit
def _sample(
    z, x, shift, go, stay, stay_sum, by_sum, by_own, u, y, clamped, states, width, stride,
    IS_SCORE: tl.constexpr, AFFINE: tl.constexpr, STAYS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0)
    row, own, shift_k = z + k.to(tl.int64) * stride, tl.load(x + k).to(tl.int32), tl.load(shift + k)
    minus_inf = -float("inf")
    sums = tl.zeros([C], tl.float32)
    lowest = tl.full([C], float("inf"), tl.float32)
    if IS_SCORE and STAYS:  # the score of staying is 1: relative to it, flushed exponentials are negligible
        for start in range(0, states, C):
            log_s = _log_scores(row, start, width, shift_k, C)
            sums += _exp(tl.minimum(_fill_excluded(log_s, start, states, own, minus_inf, C), MAX_LOG_SCORE))
            if AFFINE:
                lowest = tl.minimum(lowest, _fill_excluded(log_s, start, states, own, -minus_inf, C))
        top = tl.full([], 0.0, tl.float32)
        s_own = tl.full([], 1.0, tl.float64)
        total = tl.sum(sums.to(tl.float64), 0)
    else:
        highest = tl.full([C], -1e30, tl.float32)
        for start in range(0, states, C):
            log_s = _log_scores(row, start, width, shift_k, C)
            if AFFINE:
                lowest = tl.minimum(lowest, _fill_excluded(log_s, start, states, own, -minus_inf, C))
            log_s = _fill_excluded(log_s, start, states, own, minus_inf, C)
            new_highest = tl.maximum(highest, log_s)
            sums = sums * _exp(highest - new_highest) + _exp(log_s - new_highest)
            highest = new_highest
        log_own = tl.full([], 0.0, tl.float32)
        if not IS_SCORE:
            at_own = tl.load(row + own, mask=own < states, other=0).to(tl.float32) + shift_k
            log_own = tl.where(own < states, at_own, -1e30)
        top = tl.maximum(tl.max(highest, 0), log_own)
        total = tl.sum((sums * _exp(highest - top)).to(tl.float64), 0)
        s_own = _exp(log_own - top).to(tl.float64)

    a = tl.load(go + k)
    constant = tl.full([], 0.0, tl.float64)
    change_weight = a * total
    lowest_weight = tl.full([], 0.0, tl.float64)
    stay_weight = tl.full([], 0.0, tl.float64)
    if STAYS:
        stay_weight += tl.load(stay + k) * s_own + tl.load(stay_sum + k) * total
    if AFFINE:
        constant += tl.load(by_sum + k) * total + tl.load(by_own + k) * s_own
        change_weight += constant * (states - tl.where(own < states, 1, 0))
    total_weight = change_weight + stay_weight
    if AFFINE:
        lowest_s = _exp(tl.minimum(tl.min(lowest, 0) - top, MAX_LOG_SCORE)).to(tl.float64)
        if (a < 0) | (a * lowest_s + constant < 0):  # otherwise no weight is negative
            slope, intercept = a.to(tl.float32), constant.to(tl.float32)
            positive = tl.zeros([C], tl.float32)
            negative = tl.zeros([C], tl.float32)
            for start in range(0, states, C):
                log_s = _log_scores(row, start, width, shift_k, C)
                weight = slope * _exp(tl.minimum(log_s - top, MAX_LOG_SCORE)) + intercept
                weight = _fill_excluded(weight, start, states, own, 0.0, C)
                positive += tl.maximum(weight, 0.0)
                negative = tl.minimum(weight, negative)
            change_weight = tl.sum(positive.to(tl.float64), 0)
            lowest_weight = tl.min(negative, 0).to(tl.float64)
    lowest_weight = tl.where(stay_weight < lowest_weight, stay_weight, lowest_weight)
    tl.store(clamped + k, (lowest_weight < -1e-5 * tl.maximum(tl.abs(total_weight), 1e-30)).to(tl.int32))
    stay_weight = tl.where(stay_weight > 0, stay_weight, 0.0)

    token = own
    if tl.load(u + 2 * k) * (change_weight + stay_weight) < change_weight:
        target = tl.load(u + 2 * k + 1) * change_weight
        before = tl.full([], 0.0, tl.float64)
        for start in range(0, states, C):
            if before <= target:  # not found yet
                log_s = _log_scores(row, start, width, shift_k, C)
                weight = a * _exp(tl.minimum(log_s - top, MAX_LOG_SCORE)).to(tl.float64) + constant
                weight = _fill_excluded(tl.where(weight > 0, weight, 0.0), start, states, own, 0.0, C)
                # the first token whose running sum exceeds the target; if rounding prevents that, the last possible one
                col = start + tl.arange(0, C)
                last = tl.max(tl.where(weight > 0, col, -1), 0)
                token = tl.where(last >= 0, last, token)
                chunk_sum = tl.sum(weight, 0)
                if before + chunk_sum > target:
                    running = before + tl.cumsum(weight, 0)
                    hit = tl.min(tl.where((running > target) & (weight > 0), col, states), 0)
                    token = tl.where(hit < states, hit, token)
                    before = tl.full([], float("inf"), tl.float64)
                else:
                    before += chunk_sum
    tl.store(y + k, token)


# Uniforms --------------------------------------------------------------------------------------------------

SIZE = 1024  # positions per program


def philox_uniforms(rng: CounterRNG, length: int, step: int | Tensor, event: int) -> Tensor:
    """Return ``rng(length, step, event)`` on CUDA."""
    rows, seed, count = rng.rows, rng.seed, len(rng.rows) * length
    u = torch.empty(len(rows), length, 2, dtype=torch.float64, device=rows.device)
    if not count:
        return u
    per_row, sizes = isinstance(seed, Tensor) or isinstance(step, Tensor), (event, count, length)
    if per_row:  # one seed and one step for each row
        seeds, steps = (a if isinstance(a, Tensor) else torch.full_like(rows, a) for a in (seed, step))
        _uniforms[(cdiv(count, SIZE),)](rows, seeds, steps, u, 0, 0, 0, *sizes, PER_ROW=True, SIZE=SIZE)
    else:
        words = seed & 0xFFFFFFFF, seed >> 32, step
        _uniforms[(cdiv(count, SIZE),)](rows, rows, rows, u, *words, *sizes, PER_ROW=False, SIZE=SIZE)
    return u


@triton.jit(do_not_specialize=["low", "high", "step", "event"])
def _uniforms(rows, seeds, steps, u, low, high, step, event, count, length, PER_ROW: tl.constexpr, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < count
    position = (i % length).to(tl.uint32)
    zero = position - position
    row = tl.load(rows + i // length, mask=inside, other=0).to(tl.uint32)
    if PER_ROW:
        seed = tl.load(seeds + i // length, mask=inside, other=0).to(tl.uint64)
        number = tl.load(steps + i // length, mask=inside, other=0).to(tl.uint32)
    else:
        seed = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
        number = zero + step.to(tl.uint32)
    a, b, c, d = tl.philox(seed, position, row, number, zero + event.to(tl.uint32))
    tl.store(u + 2 * i, _uniform(a, b), mask=inside)
    tl.store(u + 2 * i + 1, _uniform(c, d), mask=inside)


@triton.jit
def _uniform(high, low):
    """Convert 52 random bits to the midpoint of one of 2⁵² equal parts of (0, 1)."""
    return (((high.to(tl.uint64) << 20) | (low.to(tl.uint64) >> 12)).to(tl.float64) + 0.5) * 2.220446049250313e-16
