"""Triton kernels of the elementwise halves of a Muon step. Arithmetic is in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.runtime.device import cdiv

SIZE, WARPS = 2048, 4  # entries and warps per program


def nesterov_momentum_triton(
    gradients: list[Tensor], averages: list[Tensor], momentum: float, found_inf: Tensor, dtype: torch.dtype
) -> Tensor:
    """Update the averages and return the stacked Nesterov momentum; see `momentum.nesterov_momentum`."""
    out = gradients[0].new_empty(len(gradients), *gradients[0].shape, dtype=dtype)
    count = gradients[0].numel()
    for i, (gradient, average) in enumerate(zip(gradients, averages, strict=True)):
        _nesterov[(cdiv(count, SIZE),)](
            gradient, average, out[i], found_inf, count, momentum, SIZE=SIZE, num_warps=WARPS
        )
    return out


def apply_updates_triton(weights: list[Tensor], updates: Tensor, rate: float, decay: float, found_inf: Tensor) -> None:
    """Update the weights; see `momentum.apply_updates`."""
    count, updates = weights[0].numel(), updates.contiguous()
    for i, weight in enumerate(weights):
        _apply[(cdiv(count, SIZE),)](weight, updates[i], found_inf, count, rate, decay, SIZE=SIZE, num_warps=WARPS)


@triton.jit
def _nesterov(gradient, average, out, found_inf, count, momentum, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    a = tl.load(average + at, mask=inside, other=0)
    g = tl.load(gradient + at, mask=inside, other=0)
    g = tl.where(tl.load(found_inf) != 0, a, g)
    a += (1 - momentum) * (g - a)
    tl.store(average + at, a, mask=inside)
    tl.store(out + at, (g + momentum * (a - g)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _apply(weight, update, found_inf, count, rate, decay, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    w = tl.load(weight + at, mask=inside, other=0)
    u = tl.load(update + at, mask=inside, other=0).to(tl.float32)
    updated = (1 - decay) * w - rate * u
    tl.store(weight + at, tl.where(tl.load(found_inf) != 0, w, updated), mask=inside)
