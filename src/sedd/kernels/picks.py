"""The twin of `choice` in Triton: a program reads a row of scores as often as it must, and writes one token.

Exponentials and the first two dozen additions of each lane are of float32, the rest and all comparisons of float64: a
token of probability 1e-12 is drawn as seldom as that.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.kernels.choice import Drawn, Scores
from sedd.process import Affine

COLUMNS, WARPS = 2048, 8
MOST: tl.constexpr = tl.constexpr(70.0)
"""Scores beyond e^70 are taken for e^70: fifty thousand of them are still a number, and whoever stays has no chance."""


def choose(said: Scores, x: Tensor, law: Affine, u: Tensor) -> Drawn:
    """See `choice.choose`."""
    y, clamped = torch.empty_like(x), torch.empty_like(x, dtype=torch.int32)
    if not len(x):
        return Drawn(y, clamped.sum())
    parts = [law.go if part is None else part for part in law]  # stands for what is never read
    stays = law.stay is not None
    _choose[(len(x),)](
        said.z, x, said.scale.float(), *(part.double() for part in parts), u.contiguous(), y, clamped,
        said.vocab_size, said.z.stride(0), RELATIVE=said.relative, FLAT=law.by_sum is None, STAYS=stays, C=COLUMNS,
        num_warps=WARPS,
    )  # fmt: skip
    return Drawn(y, clamped.sum())


@triton.jit
def _log_scores(row, col, states, own, plus):
    """Those of a part of a row, without x itself."""
    here = (col < states) & (col != own)
    return tl.where(here, tl.load(row + col, mask=col < states, other=0).to(tl.float32) + plus, -float("inf"))


@triton.jit
def _choose(
    z, x, scale, go, stay, stay_sum, by_sum, by_own, u, y, clamped, states, stride,
    RELATIVE: tl.constexpr, FLAT: tl.constexpr, STAYS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0)
    row, own, plus = z + k.to(tl.int64) * stride, tl.load(x + k), tl.load(scale + k)
    column = tl.arange(0, C)
    sums = tl.zeros([C], tl.float32)
    if RELATIVE and STAYS:  # scores are measured by that of staying, 1: beside it, what exponentials lose is nothing
        for start in range(0, states, C):
            log_s = _log_scores(row, start + column, states, own, plus)
            sums += tl.exp(tl.minimum(log_s, MOST))
        top = tl.full([], 0.0, tl.float32)
        s_own = tl.full([], 1.0, tl.float64)
        total = tl.sum(sums.to(tl.float64), 0)
    else:
        most = tl.full([C], -1e30, tl.float32)
        for start in range(0, states, C):
            log_s = _log_scores(row, start + column, states, own, plus)
            higher = tl.maximum(most, log_s)
            sums = sums * tl.exp(most - higher) + tl.exp(log_s - higher)
            most = higher
        log_own = tl.full([], 0.0, tl.float32)
        if not RELATIVE:
            at_own = tl.load(row + own, mask=own < states, other=0).to(tl.float32) + plus
            log_own = tl.where(own < states, at_own, -1e30)
        top = tl.maximum(tl.max(most, 0), log_own)
        total = tl.sum((sums * tl.exp(most - top)).to(tl.float64), 0)
        s_own = tl.exp(log_own - top).to(tl.float64)

    a = tl.load(go + k)
    floor = tl.full([], 0.0, tl.float64)
    moving = a * total
    least = tl.full([], 0.0, tl.float64)
    staying = tl.full([], 0.0, tl.float64)
    if STAYS:
        staying += tl.load(stay + k) * s_own + tl.load(stay_sum + k) * total
    whole = moving + staying
    if not FLAT:
        floor += tl.load(by_sum + k) * total + tl.load(by_own + k) * s_own
        flat, base = a.to(tl.float32), floor.to(tl.float32)
        above = tl.zeros([C], tl.float32)
        low = tl.zeros([C], tl.float32)
        for start in range(0, states, C):
            log_s = _log_scores(row, start + column, states, own, plus)
            counts = (start + column < states) & (start + column != own)
            weight = tl.where(counts, flat * tl.exp(tl.minimum(log_s - top, MOST)) + base, 0.0)
            above += tl.maximum(weight, 0.0)
            low = tl.minimum(weight, low)
        moving = tl.sum(above.to(tl.float64), 0)
        least = tl.min(low, 0).to(tl.float64)
        whole += floor * (states - tl.where(own < states, 1, 0))
    least = tl.where(staying < least, staying, least)
    tl.store(clamped + k, (least < -1e-5 * tl.maximum(tl.abs(whole), 1e-30)).to(tl.int32))
    staying = tl.where(staying > 0, staying, 0.0)

    found = own
    if tl.load(u + 2 * k) * (moving + staying) < moving:
        target = tl.load(u + 2 * k + 1) * moving
        before = tl.full([], 0.0, tl.float64)
        for start in range(0, states, C):
            if before <= target:  # not found yet
                log_s = _log_scores(row, start + column, states, own, plus)
                counts = (start + column < states) & (start + column != own)
                weight = tl.where(counts, a * tl.exp(tl.minimum(log_s - top, MOST)).to(tl.float64) + floor, 0.0)
                running = before + tl.cumsum(tl.where(weight > 0, weight, 0.0), 0)
                # the first whose running sum passes the target; rounding may pass the end, then the last that can be
                some = tl.where(weight > 0, start + column, -1)
                last = tl.max(some, 0)
                passed = tl.min(tl.where((running > target) & (weight > 0), start + column, states), 0)
                found = tl.where(passed < states, passed, tl.where(last >= 0, last, found)).to(found.dtype)
                before = tl.where(passed < states, float("inf"), tl.max(running, 0))
    tl.store(y + k, found)
