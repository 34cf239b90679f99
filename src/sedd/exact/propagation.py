"""Expectations over noise, and the law that a sampler's steps lead to, without drawing anything."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.diffusion.process import Process
from sedd.exact.distribution import Distribution, every, transition_matrix


def expect(
    f: Callable[[Tensor, Tensor], Tensor], law: Distribution, process: Process, sigma: Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """E f(x_t, x_0) over x_0 from the law and x_t from noise σ; f maps two (pairs, L) to (pairs,)."""
    x_t, x_0, weight = pairs(law, process, sigma)
    return (weight * f(x_t, x_0)).sum()


def pairs(
    law: Distribution, process: Process, sigma: Float[Tensor, ""]
) -> tuple[Int[Tensor, "p L"], Int[Tensor, "p L"], Float[Tensor, " p"]]:
    """Every (x_t, x_0) that can happen at noise σ, and its probability."""
    x_t = every(process.num_states, law.length)
    P = transition_matrix(process, sigma)
    joint = law.probabilities * P[x_t[:, None], law.sequences].prod(-1)  # x_t, x_0
    t, zero = torch.nonzero(joint > 0, as_tuple=True)
    return x_t[t], law.sequences[zero], joint[t, zero]


def propagate(law: Float[Tensor, " n"], table: Float[Tensor, "n L states"]) -> Float[Tensor, " sequences"]:
    """The law after one step of a sampler: Σ_x p(x) Π_i table[x, i, y_i], for every y.

    ``law`` is over `every` sequence of states, or whatever else decides the step; ``table`` is the law of each
    position given that.
    """
    _, length, num_states = table.shape
    p = law[:, None]  # x, y_1 … y_i
    for i in range(length):
        p = (p[:, :, None] * table[:, i, None, :]).reshape(len(law), num_states ** (i + 1))
    return p.sum(0)
