"""The uniforms of `randomness.CounterRNG` in Triton: the same numbers, in one launch instead of a hundred."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.diffusion.rng import CounterRNG
from sedd.runtime.device import cdiv

SIZE = 1024


def uniforms(chance: CounterRNG, length: int, step: int, event: int) -> Tensor:
    """See `CounterRNG.__call__`."""
    count = len(chance.rows) * length
    u = torch.empty(len(chance.rows), length, 2, dtype=torch.float64, device=chance.rows.device)
    if count:
        low, high = chance.seed & 0xFFFFFFFF, chance.seed >> 32
        _uniforms[(cdiv(count, SIZE),)](chance.rows, u, low, high, step, event, count, length, SIZE=SIZE)
    return u


@triton.jit(do_not_specialize=["low", "high", "step", "event"])
def _uniforms(rows, u, low, high, step, event, count, length, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    held = i < count
    place = (i % length).to(tl.uint32)
    row = tl.load(rows + i // length, mask=held, other=0).to(tl.uint32)
    seed = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    zero = place - place
    a, b, c, d = tl.philox(seed, place, row, zero + step.to(tl.uint32), zero + event.to(tl.uint32))
    tl.store(u + 2 * i, _uniform(a, b), mask=held)
    tl.store(u + 2 * i + 1, _uniform(c, d), mask=held)


@triton.jit
def _uniform(high, low):
    """The middle of one of 2⁵² equal parts of (0, 1)."""
    return (((high.to(tl.uint64) << 20) | (low.to(tl.uint64) >> 12)).to(tl.float64) + 0.5) * 2.220446049250313e-16
