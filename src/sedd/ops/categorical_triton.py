"""The twin of `choice` in Triton: a program reads a row of scores as often as it must, and writes one token.

Exponentials and the first two dozen additions of each lane are of float32, the rest and all comparisons of float64: a
token of probability 1e-12 is drawn as seldom as that.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.diffusion.categorical import AffineWeights
from sedd.ops.categorical import Drawn, Scores

COLUMNS, WARPS = 2048, 8
MOST: tl.constexpr = tl.constexpr(70.0)
"""Scores beyond e^70 are taken for e^70: fifty thousand of them are still a number, and whoever stays has no chance."""


def choose(said: Scores, x: Tensor, law: AffineWeights, u: Tensor) -> Drawn:
    """See `choice.choose`."""
    y, clamped = torch.empty_like(x), torch.empty_like(x, dtype=torch.int32)
    if not len(x):
        return Drawn(y, clamped.sum())
    parts = [law.go if part is None else part for part in law]  # stands for what is never read
    stays = law.stay is not None
    _choose[(len(x),)](
        said.z, x, said.scale.float(), *(part.double() for part in parts), u.contiguous(), y, clamped,
        said.vocab_size, said.z.shape[1], said.z.stride(0), RELATIVE=said.relative, FLAT=law.by_sum is None,
        STAYS=stays, C=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return Drawn(y, clamped.sum())


@triton.jit
def _exp(x):
    """e^x; what is less than a float's normal numbers is 0, which takes a third of the time."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _log_scores(row, start, width, plus, C: tl.constexpr):
    """Those of a part of a row: of all of its width, which is even, so that loads are wide."""
    col = start + tl.arange(0, C)
    return tl.load(row + col, mask=col < width, other=0).to(tl.float32) + plus


@triton.jit
def _but(each, start, states, own, instead, C: tl.constexpr):
    """A part of a row with something else for x itself and behind the last, of which few parts have any."""
    if (start + C > states) | ((own >= start) & (own < start + C)):
        col = start + tl.arange(0, C)
        each = tl.where((col < states) & (col != own), each, instead)
    return each


@triton.jit
def _choose(
    z, x, scale, go, stay, stay_sum, by_sum, by_own, u, y, clamped, states, width, stride,
    RELATIVE: tl.constexpr, FLAT: tl.constexpr, STAYS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0)
    row, own, plus = z + k.to(tl.int64) * stride, tl.load(x + k).to(tl.int32), tl.load(scale + k)
    nothing = -float("inf")
    sums = tl.zeros([C], tl.float32)
    lowest = tl.full([C], float("inf"), tl.float32)
    if RELATIVE and STAYS:  # scores are measured by that of staying, 1: beside it, what exponentials lose is nothing
        for start in range(0, states, C):
            log_s = _log_scores(row, start, width, plus, C)
            sums += _exp(tl.minimum(_but(log_s, start, states, own, nothing, C), MOST))
            if not FLAT:
                lowest = tl.minimum(lowest, _but(log_s, start, states, own, -nothing, C))
        top = tl.full([], 0.0, tl.float32)
        s_own = tl.full([], 1.0, tl.float64)
        total = tl.sum(sums.to(tl.float64), 0)
    else:
        most = tl.full([C], -1e30, tl.float32)
        for start in range(0, states, C):
            log_s = _log_scores(row, start, width, plus, C)
            if not FLAT:
                lowest = tl.minimum(lowest, _but(log_s, start, states, own, -nothing, C))
            log_s = _but(log_s, start, states, own, nothing, C)
            higher = tl.maximum(most, log_s)
            sums = sums * _exp(most - higher) + _exp(log_s - higher)
            most = higher
        log_own = tl.full([], 0.0, tl.float32)
        if not RELATIVE:
            at_own = tl.load(row + own, mask=own < states, other=0).to(tl.float32) + plus
            log_own = tl.where(own < states, at_own, -1e30)
        top = tl.maximum(tl.max(most, 0), log_own)
        total = tl.sum((sums * _exp(most - top)).to(tl.float64), 0)
        s_own = _exp(log_own - top).to(tl.float64)

    a = tl.load(go + k)
    floor = tl.full([], 0.0, tl.float64)
    moving = a * total
    least = tl.full([], 0.0, tl.float64)
    staying = tl.full([], 0.0, tl.float64)
    if STAYS:
        staying += tl.load(stay + k) * s_own + tl.load(stay_sum + k) * total
    if not FLAT:
        floor += tl.load(by_sum + k) * total + tl.load(by_own + k) * s_own
        moving += floor * (states - tl.where(own < states, 1, 0))
    whole = moving + staying
    if not FLAT:
        weakest = _exp(tl.minimum(tl.min(lowest, 0) - top, MOST)).to(tl.float64)
        if (a < 0) | (a * weakest + floor < 0):  # else nothing is below 0
            flat, base = a.to(tl.float32), floor.to(tl.float32)
            above = tl.zeros([C], tl.float32)
            low = tl.zeros([C], tl.float32)
            for start in range(0, states, C):
                log_s = _log_scores(row, start, width, plus, C)
                weight = flat * _exp(tl.minimum(log_s - top, MOST)) + base
                weight = _but(weight, start, states, own, 0.0, C)
                above += tl.maximum(weight, 0.0)
                low = tl.minimum(weight, low)
            moving = tl.sum(above.to(tl.float64), 0)
            least = tl.min(low, 0).to(tl.float64)
    least = tl.where(staying < least, staying, least)
    tl.store(clamped + k, (least < -1e-5 * tl.maximum(tl.abs(whole), 1e-30)).to(tl.int32))
    staying = tl.where(staying > 0, staying, 0.0)

    found = own
    if tl.load(u + 2 * k) * (moving + staying) < moving:
        target = tl.load(u + 2 * k + 1) * moving
        before = tl.full([], 0.0, tl.float64)
        for start in range(0, states, C):
            if before <= target:  # not found yet
                log_s = _log_scores(row, start, width, plus, C)
                weight = a * _exp(tl.minimum(log_s - top, MOST)).to(tl.float64) + floor
                weight = _but(tl.where(weight > 0, weight, 0.0), start, states, own, 0.0, C)
                # where the running sum passes the target; rounding may pass the end, then the last that can be
                col = start + tl.arange(0, C)
                last = tl.max(tl.where(weight > 0, col, -1), 0)
                found = tl.where(last >= 0, last, found)
                here = tl.sum(weight, 0)
                if before + here > target:
                    running = before + tl.cumsum(weight, 0)
                    passed = tl.min(tl.where((running > target) & (weight > 0), col, states), 0)
                    found = tl.where(passed < states, passed, found)
                    before = tl.full([], float("inf"), tl.float64)
                else:
                    before += here
    tl.store(y + k, found)
