"""A step of AdamW and of the average after it, in Triton: one launch, each number read once and written once."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE, WARPS = 1024, 4
"""Entries a program, and its warps."""
WIDE = 16
"""Bytes that are read at once: what every pointer is a multiple of."""


class Weight(NamedTuple):
    """A tensor of weights, and what moves with it or moves it: each `wide`, in float32."""

    value: Tensor
    gradient: Tensor
    mean: Tensor
    """Of gradients."""
    square: Tensor
    """The same of their squares."""
    average: Tensor
    """Of the weights."""
    steps: Tensor
    """How many there were."""
    decay: float


class Rule(NamedTuple):
    """How they move."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    share: float
    """Of the new weights in their average."""


def wide(tensor: Tensor) -> Tensor:
    """The same, to be read in order and ``WIDE`` bytes at once: it may be a view into something larger, or a file."""
    fits = tensor.data_ptr() % WIDE == 0 and tensor.is_contiguous()
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def move(weights: list[Weight], rule: Rule, scale: Tensor, finite: Tensor) -> None:
    """AdamW of gradients times ``scale``, then the average; nothing, and no step, unless ``finite``. Nobody waits."""
    if not weights:
        return
    device, counts = weights[0].value.device, [w.steps for w in weights]
    torch._foreach_add_(counts, [finite.float()] * len(counts))  # a list: of one alone the host would ask its value
    steps = torch.stack(counts).double()
    rates, roots = rule.rate / (1 - rule.beta1**steps), (1 - rule.beta2**steps).sqrt()
    cuts, decays = _cut(tuple((w.value.numel(), w.decay) for w in weights), SIZE, device)
    _move[(len(cuts),)](
        _pointers(weights).to(device, non_blocking=True), cuts, decays, rates.float(), roots.float(), scale, finite,
        rule.rate, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps, rule.share, SIZE=SIZE, num_warps=WARPS,
    )  # fmt: skip
    torch.autograd.graph.increment_version([t for w in weights for t in (w.value, w.mean, w.square, w.average)])


def _pointers(weights: list[Weight]) -> Tensor:
    """Where they are, on the host: gradients lie elsewhere at every step. Torch keeps the page until it is copied."""
    table = torch.tensor([t.data_ptr() for w in weights for t in w[:5]], pin_memory=weights[0].value.is_cuda)
    if (table % WIDE).any():
        raise ValueError(f"weights and averages must lie at multiples of {WIDE} bytes; clone those that do not")
    return table


@functools.lru_cache(maxsize=8)
def _cut(kinds: tuple[tuple[int, float], ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which tensor each program moves, from where and how many entries; and by how much each tensor decays."""
    cuts = [(i, at, min(size, n - at)) for i, (n, _) in enumerate(kinds) for at in range(0, n, size)]
    return torch.tensor(cuts, device=device).view(-1, 3), torch.tensor([d for _, d in kinds], device=device)


@triton.jit
def _move(
    table, cuts, decays, rates, roots, scale, finite, rate, share1, beta2, share2, eps, share, SIZE: tl.constexpr
):  # fmt: skip
    cut, well, scale = cuts + 3 * tl.program_id(0), tl.load(finite), tl.load(scale)
    tensor, at, count = tl.load(cut), tl.load(cut + 1), tl.load(cut + 2)
    row, lost = table + 5 * tensor, rate * tl.load(decays + tensor)
    step, root = tl.load(rates + tensor), tl.load(roots + tensor)
    if well:
        if count == SIZE:  # no mask, so that reads are wide
            _part(row, at, count, lost, step, root, scale, share1, beta2, share2, eps, share, SIZE, True)
        else:
            _part(row, at, count, lost, step, root, scale, share1, beta2, share2, eps, share, SIZE, False)


@triton.jit
def _part(
    row, at, count, lost, step, root, scale, share1, beta2, share2, eps, share, SIZE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, SIZE)
    held = None if WHOLE else i < count
    values, gradients, means = _at(row, at) + i, _at(row + 1, at) + i, _at(row + 2, at) + i
    squares, averages = _at(row + 3, at) + i, _at(row + 4, at) + i
    p, g, m = tl.load(values, mask=held), tl.load(gradients, mask=held), tl.load(means, mask=held)
    v, average = tl.load(squares, mask=held), tl.load(averages, mask=held)
    g *= scale
    m += share1 * (g - m)
    v = beta2 * v + share2 * g * g
    p -= lost * p
    p -= step * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(values, p, mask=held)
    tl.store(means, m, mask=held)
    tl.store(squares, v, mask=held)
    tl.store(averages, average + share * (p - average), mask=held)


@triton.jit
def _at(row, at):
    return tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)) + at, 16)
