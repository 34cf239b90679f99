"""The variational bound on validation data, always with the same sequences, times and noise."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sedd import data
from sedd.likelihood import LikelihoodEstimate
from sedd.likelihood.estimators import default_estimator
from sedd.likelihood.variance_reduction import neighbour_variance
from sedd.runtime.distributed import Ranks
from sedd.schedule import LowNoiseTimes, stratified
from sedd.training.batches import VALIDATION_STREAM, seeded_generator
from sedd.training.setup import DiffusionSetup


@torch.no_grad()
def validation_bound(
    model: Callable[[Tensor, Tensor], Any],
    setup: DiffusionSetup,
    blocks: data.TokenBlocks,
    ranks: Ranks,
    *,
    count: int,
    batch_size: int,
    seed: int,
) -> LikelihoodEstimate[float]:
    """Estimate the variational bound over ``count`` sequences in nats per token; padding does not count.  [§8]

    ``model(valid, label)`` is the model of sequences with this padding and these labels; with labels, the bound is one
    on −log p(x | label). ``batch_size`` is per process. If ``blocks`` has fewer sequences, they repeat.
    """
    columns = _validation_columns(setup, blocks, count, batch_size * ranks.world_size, seed)
    local = [a[ranks.rank :: ranks.world_size].to(ranks.device) for a in columns]
    # the terms of the bound, the number of tokens, and the bound of every sequence
    sums = torch.zeros(4 + len(columns[0]), dtype=torch.float64, device=ranks.device)
    totals = []
    for batch in zip(*(a.split(batch_size) for a in local), strict=True):
        x_0, *inputs, label = batch
        valid = inputs[-1]
        bound = model(valid, label)
        bounds = default_estimator(bound).nats(bound, x_0, *inputs)
        sums[:4] += torch.stack([*(a.sum() for a in bounds), valid.sum()]).double()
        totals.append(bounds.total.double())
    sums[4 + ranks.rank :: ranks.world_size] = torch.cat(totals)
    sums = ranks.all_reduce_sum(sums).cpu()
    *terms, tokens = sums[:4].tolist()
    # the bound varies with t, but there is one time in every stratum: only the difference of neighbours is an error
    variance = neighbour_variance(sums[4 : 4 + count].numpy(), columns[3][:count].numpy())
    return LikelihoodEstimate(nats=sum(terms) / tokens, stderr=math.sqrt(variance) / tokens)


def sequence_ids(blocks: data.TokenBlocks, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the blocks that are evaluated: the first ``count``, repeated where there are fewer."""
    return np.arange(count) % len(blocks)


def _validation_columns(
    setup: DiffusionSetup, blocks: data.TokenBlocks, count: int, multiple: int, seed: int
) -> list[Tensor]:
    """Return x_0, x_t, x at t = 0, t, weight, valid and label of ``count`` sequences.

    Sequences of padding fill up ``multiple``: under FSDP all processes must call the network equally often.
    """
    ids = sequence_ids(blocks, count)
    x_0, valid = (torch.from_numpy(a) for a in blocks.read(ids))
    generator = seeded_generator(seed, 0, VALIDATION_STREAM)
    times = LowNoiseTimes()(stratified(count, generator))
    x_t, x_first = (
        torch.where(valid, setup.process.corrupt(x_0, setup.schedule.sigma(t), generator), x_0)
        for t in (times.t, torch.zeros_like(times.t))
    )
    rows = torch.arange(count + -count % multiple).clamp_max(count - 1)
    valid = valid[rows].index_fill(0, torch.arange(count, len(rows)), False)
    inputs = [a[rows] for a in (x_0, x_t, x_first, *times)]
    return [*inputs, valid, torch.from_numpy(blocks.label_ids(ids))[rows]]
