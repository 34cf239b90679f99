"""One step of AdamW and of the EMA in Triton: one launch, which reads and writes each number once.

References: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization" (AdamW).
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE, WARPS = 1024, 4
"""Entries and warps per program."""
ALIGNMENT = 16
"""Bytes of a vectorized load, which every pointer must be a multiple of."""


class ParameterState(NamedTuple):
    """A parameter with its gradient, optimizer state and EMA; tensors are float32 and `aligned`."""

    value: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    ema: Tensor
    step: Tensor
    """Steps so far, a scalar on the device."""
    weight_decay: float


class AdamWHyperparameters(NamedTuple):
    """Hyperparameters of one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    ema_weight: float
    """Weight of the new parameters in their EMA: 1 − decay."""


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is contiguous and aligned, else a copy that is."""
    fits = tensor.data_ptr() % ALIGNMENT == 0 and tensor.is_contiguous()
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def adamw_ema_step(
    parameters: list[ParameterState], hyper: AdamWHyperparameters, grad_scale: Tensor, finite: Tensor
) -> None:
    """Update parameters, moments, EMA and step counts in place, without waiting for the device.

    Args:
        parameters: All parameters that have a gradient.
        hyper: Hyperparameters of this step.
        grad_scale: Factor of all gradients, from gradient clipping; a scalar on the device.
        finite: Whether to do the step at all; a scalar on the device.
    """
    if not parameters:
        return
    device, counts = parameters[0].value.device, [p.step for p in parameters]
    torch._foreach_add_(counts, [finite.float()] * len(counts))  # with one tensor alone, it would wait for its value
    steps = torch.stack(counts).double()
    step_sizes, denoms = hyper.lr / (1 - hyper.beta1**steps), (1 - hyper.beta2**steps).sqrt()
    chunks, decays = _chunks(tuple((p.value.numel(), p.weight_decay) for p in parameters), SIZE, device)
    _adamw_ema[(len(chunks),)](
        _pointers(parameters).to(device, non_blocking=True), chunks, decays, step_sizes.float(), denoms.float(),
        grad_scale, finite, hyper.lr, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, hyper.eps, hyper.ema_weight,
        SIZE=SIZE, num_warps=WARPS,
    )  # fmt: skip
    torch.autograd.graph.increment_version([t for p in parameters for t in (p.value, p.exp_avg, p.exp_avg_sq, p.ema)])


def _pointers(parameters: list[ParameterState]) -> Tensor:
    """Return the addresses of all tensors, in pinned memory: gradients have new ones at every step."""
    table = torch.tensor([t.data_ptr() for p in parameters for t in p[:5]], pin_memory=parameters[0].value.is_cuda)
    if (table % ALIGNMENT).any():
        raise ValueError(f"a parameter or its EMA is not aligned to {ALIGNMENT} bytes; clone those that are not")
    return table


@functools.lru_cache(maxsize=8)
def _chunks(sizes: tuple[tuple[int, float], ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (tensor, first entry, number of entries) of every program, and the weight decay of every tensor."""
    chunks = [(i, at, min(size, n - at)) for i, (n, _) in enumerate(sizes) for at in range(0, n, size)]
    return torch.tensor(chunks, device=device).view(-1, 3), torch.tensor([d for _, d in sizes], device=device)


@triton.jit
def _adamw_ema(
    table, chunks, decays, step_sizes, denoms, grad_scale, finite, lr, w1, beta2, w2, eps, ema_weight,
    SIZE: tl.constexpr,
):  # fmt: skip
    chunk, is_finite, scale = chunks + 3 * tl.program_id(0), tl.load(finite), tl.load(grad_scale)
    tensor, at, count = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    row, decay = table + 5 * tensor, lr * tl.load(decays + tensor)
    step_size, denom = tl.load(step_sizes + tensor), tl.load(denoms + tensor)
    if is_finite:
        if count == SIZE:  # without a mask loads are vectorized
            _update(
                row,
                at,
                count,
                decay,
                step_size,
                denom,
                scale,
                w1,
                beta2,
                w2,
                eps,
                ema_weight,
                SIZE,
                True,
            )
        else:
            _update(
                row,
                at,
                count,
                decay,
                step_size,
                denom,
                scale,
                w1,
                beta2,
                w2,
                eps,
                ema_weight,
                SIZE,
                False,
            )


@triton.jit
def _update(
    row, at, count, decay, step_size, denom, scale, w1, beta2, w2, eps, ema_weight, SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, SIZE)
    inside = None if WHOLE else i < count
    values, grads, exp_avgs = _pointer(row, at) + i, _pointer(row + 1, at) + i, _pointer(row + 2, at) + i
    exp_avg_sqs, emas = _pointer(row + 3, at) + i, _pointer(row + 4, at) + i
    p, g, m = tl.load(values, mask=inside), tl.load(grads, mask=inside), tl.load(exp_avgs, mask=inside)
    v, ema = tl.load(exp_avg_sqs, mask=inside), tl.load(emas, mask=inside)
    g *= scale
    m += w1 * (g - m)
    v = beta2 * v + w2 * g * g
    p -= decay * p
    p -= step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), denom) + eps)
    tl.store(values, p, mask=inside)
    tl.store(exp_avgs, m, mask=inside)
    tl.store(exp_avg_sqs, v, mask=inside)
    tl.store(emas, ema + ema_weight * (p - ema), mask=inside)


@triton.jit
def _pointer(row, at):
    """Return the address of entry ``at`` of the tensor whose base is stored in ``row``."""
    return tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)) + at, 16)
