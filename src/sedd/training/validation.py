"""The bound on held-out data: always the same rows, times and noise, so that only the weights differ."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sedd import data, likelihood
from sedd.diffusion.objective import Autoregressive
from sedd.diffusion.schedule import Times, stratified
from sedd.factory import DiffusionSetup
from sedd.runtime.distributed import Ranks
from sedd.training.batches import seeded


@torch.no_grad()
def bound(
    told: Callable[[Tensor, Tensor], Any],
    parts: DiffusionSetup,
    blocks: data.TokenBlocks,
    ranks: Ranks,
    *,
    count: int,
    size: int,
    seed: int,
) -> dict[str, float]:
    """The bound over ``count`` rows, ``size`` at a time, in nats a token; padding does not count.

    ``told(valid, label)`` is the model of some rows: where they have labels, what is bounded is −log p(x | label).
    """
    rows = [
        a[ranks.rank :: ranks.world_size].to(ranks.device)
        for a in _rows(parts, blocks, count, size * ranks.world_size, seed)
    ]
    sums = torch.zeros(5, dtype=torch.float64, device=ranks.device)
    for piece in zip(*(a.split(size) for a in rows), strict=True):
        *shown, label = piece
        sums += _sums(told(shown[-1], label), parts, *shown)
    *terms, squares, tokens = ranks.all_reduce_sum(sums).tolist()
    nats = sum(terms) / tokens
    variance = max(0.0, squares / count - (sum(terms) / count) ** 2)
    return {
        "bound": nats,
        "bound_stderr": math.sqrt(variance / count) * count / tokens,
        "bound_bits_per_char": nats / math.log(2) / blocks.chars_per_token,
    }


def _rows(parts: DiffusionSetup, blocks: data.TokenBlocks, count: int, multiple: int, seed: int) -> list[Tensor]:
    """x_0, x_t, x at the first noise, t, weight, valid, label: of ``count`` rows, again where there are fewer.

    Filled up to a multiple with rows that do not count: processes must ask the network equally often, since a sharded
    one gathers its weights each time, and always for as many rows.
    """
    numbers = np.arange(count) % len(blocks)
    x_0, valid = (torch.from_numpy(a) for a in blocks.read(numbers))
    generator = seeded(seed, 0, 2)
    times = likelihood.early_times(stratified(count, generator))
    x_t, x_first = (
        torch.where(valid, parts.process.corrupt(x_0, parts.schedule.sigma(t), generator), x_0)
        for t in (times.t, torch.zeros_like(times.t))
    )
    filled = torch.arange(count + -count % multiple).clamp_max(count - 1)
    valid = valid[filled].index_fill(0, torch.arange(count, len(filled)), False)
    rows = [a[filled] for a in (x_0, x_t, x_first, *times)]
    return [*rows, valid, torch.from_numpy(blocks.label_ids(numbers))[filled]]


def _sums(
    model: Any,
    parts: DiffusionSetup,
    x_0: Tensor,
    x_t: Tensor,
    x_first: Tensor,
    t: Tensor,
    weight: Tensor,
    valid: Tensor,
) -> Tensor:
    """Each term of the bound, the square of their total, and the tokens, summed over rows."""
    if isinstance(parts.objective, Autoregressive):
        exact = torch.where(valid, parts.objective.loss(model, x_0, x_0, t), 0).sum(-1)
        terms = likelihood.Terms(exact, torch.zeros_like(exact), torch.zeros_like(exact))
    else:
        terms = likelihood.terms(model, parts.process, parts.schedule, x_0, x_t, x_first, Times(t, weight), valid)
    return torch.stack([*(a.sum() for a in terms), (terms.total**2).sum(), valid.sum()]).double()
