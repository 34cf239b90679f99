"""The uniforms of `CounterRNG` in Triton: the same numbers (Philox) in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.diffusion.rng import CounterRNG
from sedd.runtime.device import cdiv

SIZE = 1024
"""Positions per program."""


def philox_uniforms(rng: CounterRNG, length: int, step: int, event: int) -> Tensor:
    """Return ``rng(length, step, event)`` on CUDA."""
    count = len(rng.rows) * length
    u = torch.empty(len(rng.rows), length, 2, dtype=torch.float64, device=rng.rows.device)
    if count:
        low, high = rng.seed & 0xFFFFFFFF, rng.seed >> 32
        _uniforms[(cdiv(count, SIZE),)](rng.rows, u, low, high, step, event, count, length, SIZE=SIZE)
    return u


@triton.jit(do_not_specialize=["low", "high", "step", "event"])
def _uniforms(rows, u, low, high, step, event, count, length, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < count
    position = (i % length).to(tl.uint32)
    row = tl.load(rows + i // length, mask=inside, other=0).to(tl.uint32)
    seed = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    zero = position - position
    a, b, c, d = tl.philox(seed, position, row, zero + step.to(tl.uint32), zero + event.to(tl.uint32))
    tl.store(u + 2 * i, _uniform(a, b), mask=inside)
    tl.store(u + 2 * i + 1, _uniform(c, d), mask=inside)


@triton.jit
def _uniform(high, low):
    """Convert 52 random bits to the midpoint of one of 2⁵² equal parts of (0, 1)."""
    return (((high.to(tl.uint64) << 20) | (low.to(tl.uint64) >> 12)).to(tl.float64) + 0.5) * 2.220446049250313e-16
