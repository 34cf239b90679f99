"""The uniforms of `CounterRNG` in Triton: the same numbers (Philox) in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.draws import CounterRNG
from sedd.runtime.device import cdiv

SIZE = 1024
"""Positions per program."""


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
