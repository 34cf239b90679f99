"""What the kernels compute, in torch: on any device and in any precision."""

from typing import NamedTuple

import torch
from torch import Tensor

from sedd.diffusion.divergence import score_entropy
from sedd.diffusion.precision import upcast

GUARD = 80.0
"""Scores beyond e^80 are taken for e^80 and counted: their sums and gradients stay finite, and nobody is deceived."""


class Entries(NamedTuple):
    """What every entry y < ``states`` of a block of rows costs: D(s_y, a), log s_y = z_y + bias_y + scale.

    Entry ``skip`` of a row costs nothing. Entry ``data`` is left out of the sums and gets the slope ``at_data``.
    """

    states: int
    bias: Tensor | None
    scale: Tensor
    weight: Tensor
    data: Tensor
    at_data: Tensor
    skip: Tensor | None = None
    log_rest: Tensor | None = None
    """log a; None: a = 0, and an entry costs s_y."""


class Sums(NamedTuple):
    """Sums over a block of rows."""

    values: Tensor
    """Of D, a row each."""
    columns: Tensor
    """Of weight·slope, an entry each."""
    overflow_count: Tensor
    """How many scores were beyond the guard, a row each."""


def slopes_(z: Tensor, entries: Entries) -> Sums:
    """Sum D over every row, and overwrite z_y by weight·∂D/∂log s_y."""
    e = entries
    log_s = z[:, : e.states].to(torch.promote_types(z.dtype, torch.float32), copy=True)
    log_s += e.scale[:, None] if e.bias is None else e.bias + e.scale[:, None]
    out = torch.stack([e.data, e.data if e.skip is None else e.skip], -1)
    overflow_count = log_s > GUARD
    if e.skip is not None:
        overflow_count.scatter_(-1, e.skip[:, None], False)
    log_s.clamp_max_(GUARD)
    value, slope = _entropy(log_s, None if e.log_rest is None else e.log_rest[:, None])
    values = value.scatter_(-1, out, 0).sum(-1)
    slope = slope.mul_(e.weight[:, None]).scatter_(-1, e.data[:, None], e.at_data[:, None])
    if e.skip is not None:
        slope.scatter_(-1, e.skip[:, None], 0)
    z[:, : e.states] = slope
    z[:, e.states :] = 0
    return Sums(values, slope.sum(0), overflow_count.sum(-1))


def _entropy(log_s: Tensor, log_a: Tensor | None) -> tuple[Tensor, Tensor]:
    """Value and slope of score entropy, both s itself where a = 0."""
    if log_a is None:
        s = log_s.exp_()
        return s, s
    return score_entropy.value(log_s, log_a), score_entropy.slope(log_s, log_a)


def logsumexp(z: Tensor, states: int, bias: Tensor | None) -> Tensor:
    """log Σ_{y < states} e^(z_y + bias_y)."""
    z = upcast(z[:, :states])
    return (z if bias is None else z + bias).logsumexp(-1)
