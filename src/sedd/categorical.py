"""Draws that are right in law at any vocabulary, and the one in circulation that is not.  [§9]

A float32 uniform has 24 bits. In a vocabulary of 50,257 at a step probability of 1e-4 a token may have
probability 1e-9, which such a uniform cannot express: Gumbel noise made of it never draws those tokens, which
lowers the temperature without saying so. Here every decision is made with 53 bits, and no float64 tensor of
the size of the vocabulary is made on the way.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd import check


def uniforms(shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Uniforms of 53 bits strictly inside (0, 1), on the generator's device."""
    u = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
    return u.clamp_min(2.0**-54)  # 0 would choose an outcome of probability 0


def happens(probability: Float[Tensor, "*s"], generator: torch.Generator) -> Bool[Tensor, "*s"]:
    """True with the given probability, entry by entry."""
    return uniforms(tuple(probability.shape), generator) < probability


def draw(weights: Float[Tensor, "*s n"], generator: torch.Generator) -> Int[Tensor, "*s"]:
    """One draw from each row of unnormalised ``weights``."""
    check.weights(weights)
    return invert(weights, uniforms(tuple(weights.shape[:-1]), generator))


def invert(weights: Float[Tensor, "*s n"], u: Float[Tensor, "*s"]) -> Int[Tensor, "*s"]:
    """The first index at which the running sum of a row passes ``u`` times its total.

    Two levels: first among about √n blocks by their float64 sums, then inside one block, so that the float64
    work is on tensors of √n entries a row. An entry of weight 0 is never returned.
    """
    rows, n = weights.reshape(-1, weights.shape[-1]), weights.shape[-1]
    size = math.isqrt(n - 1) + 1
    blocks = -(-n // size)
    if blocks * size != n:
        rows = torch.nn.functional.pad(rows, (0, blocks * size - n))
    grid = rows.view(-1, blocks, size)
    block, rest = _pick(grid.sum(-1, dtype=torch.float64), u.reshape(-1, 1).double(), share=True)
    inside = grid[torch.arange(len(grid), device=grid.device), block.squeeze(-1)]
    index, _ = _pick(inside.double(), rest, share=False)
    return (block * size + index).view(weights.shape[:-1])


def _pick(weights: Tensor, target: Tensor, share: bool) -> tuple[Tensor, Tensor]:
    """The first index at which the running sum exceeds ``target``, and what of ``target`` is left there."""
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    target = target * total if share else target
    end = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(target, end)  # rounding may pass the end
    index = torch.searchsorted(sums, target, right=True)
    before = torch.where(index > 0, sums.gather(-1, (index - 1).clamp_min(0)), 0)
    return index, target - before


def move(x: Int[Tensor, "*s"], probabilities: Float[Tensor, "*s n"], generator: torch.Generator) -> Int[Tensor, "*s"]:
    """Move each entry of ``x`` to y ≠ x with the probability given for y, else leave it.

    Whether is decided first, where to second and only for those that move; the probability of staying is
    what is left of 1 and is never read, so a step probability of 1e-4 loses no digits to it.
    """
    leave = probabilities.scatter(-1, x[..., None], 0)
    moves = happens(leave.sum(-1, dtype=torch.float64), generator)
    y = x.clone()
    y[moves] = draw(leave[moves], generator)
    return y


def legacy_fp32(probabilities: Float[Tensor, "*s n"], generator: torch.Generator) -> Int[Tensor, "*s"]:
    """The draw behind published samples: a race of float32 exponentials, **wrong in law** for rare tokens.

    Kept under this name alone, to reproduce published numbers; nothing here uses it by default.
    """
    p = probabilities.float()
    u = torch.rand(p.shape, generator=generator, dtype=torch.float32, device=generator.device)
    return (p / (1e-10 - torch.log(u + 1e-10))).argmax(-1)
