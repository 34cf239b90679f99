"""Expectations over noise, and the propagation of distributions through a sampler's steps, by enumeration."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.exact.distribution import Distribution, all_sequences, transition_matrix
from sedd.process import Process


def expect(
    f: Callable[[Tensor, Tensor], Tensor], p_data: Distribution, process: Process, sigma: Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """Return E f(x_t, x_0) over x_0 from ``p_data`` and x_t at noise σ; f maps two (pairs, L) to (pairs,)."""
    x_t, x_0, weight = pairs(p_data, process, sigma)
    return (weight * f(x_t, x_0)).sum()


def pairs(
    p_data: Distribution, process: Process, sigma: Float[Tensor, ""]
) -> tuple[Int[Tensor, "p L"], Int[Tensor, "p L"], Float[Tensor, " p"]]:
    """Return every pair (x_t, x_0) of positive probability at noise σ, and that probability."""
    x_t = all_sequences(process.num_states, p_data.length)
    P = transition_matrix(process, sigma)
    joint = p_data.probabilities * P[x_t[:, None], p_data.sequences].prod(-1)  # x_t, x_0
    t, zero = torch.nonzero(joint > 0, as_tuple=True)
    return x_t[t], p_data.sequences[zero], joint[t, zero]


def propagate(p: Float[Tensor, " n"], table: Float[Tensor, "n L states"]) -> Float[Tensor, " sequences"]:
    """Return the distribution after one step of a sampler: Σ_x p(x) Π_i table[x, i, y_i], for every y.

    Args:
        p: Probabilities of `all_sequences` of states, or of anything else that determines the step.
        table: For each of these, the distribution of each position after the step.
    """
    _, length, num_states = table.shape
    joint = p[:, None]  # x, y_1 … y_i
    for i in range(length):
        joint = (joint[:, :, None] * table[:, i, None, :]).reshape(len(p), num_states ** (i + 1))
    return joint.sum(0)
