"""The variational bound on validation data, always with the same sequences, times and noise."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sedd import data, likelihood
from sedd.diffusion.objective import Autoregressive
from sedd.diffusion.schedule import LowNoiseTimes, Times, stratified
from sedd.factory import DiffusionSetup
from sedd.runtime.distributed import Ranks
from sedd.training.batches import VALIDATION_STREAM, seeded_generator


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
) -> dict[str, float]:
    """Estimate the variational bound over ``count`` sequences in nats per token; padding does not count.  [§8]

    Args:
        model: ``model(valid, label)`` is the model of sequences with this padding and these labels; with labels, the
            bound is one on −log p(x | label).
        setup: The process, schedule and objective of the run.
        blocks: The validation data.
        ranks: The processes, among which the sequences are divided.
        count: Number of sequences; they repeat where there are fewer.
        batch_size: Sequences per process at a time.
        seed: Seed of times and noise.

    Returns:
        The bound, its standard error and, where the tokens are text, the bound in bits per character.
    """
    columns = _validation_columns(setup, blocks, count, batch_size * ranks.world_size, seed)
    local = [a[ranks.rank :: ranks.world_size].to(ranks.device) for a in columns]
    sums = torch.zeros(5, dtype=torch.float64, device=ranks.device)
    for batch in zip(*(a.split(batch_size) for a in local), strict=True):
        *inputs, label = batch
        sums += _bound_sums(model(inputs[-1], label), setup, *inputs)
    *terms, squares, tokens = ranks.all_reduce_sum(sums).tolist()
    nats = sum(terms) / tokens
    variance = max(0.0, squares / count - (sum(terms) / count) ** 2)
    return {
        "bound": nats,
        "bound_stderr": math.sqrt(variance / count) * count / tokens,
        **({} if (bits := blocks.bits_per_char(nats)) is None else {"bound_bits_per_char": bits}),
    }


def _validation_columns(
    setup: DiffusionSetup, blocks: data.TokenBlocks, count: int, multiple: int, seed: int
) -> list[Tensor]:
    """Return x_0, x_t, x at t = 0, t, weight, valid and label of ``count`` sequences.

    Sequences without a valid position are appended up to a multiple of ``multiple``: under FSDP all processes must call
    the network equally often, and with equal batches.
    """
    ids = np.arange(count) % len(blocks)
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


def _bound_sums(
    model: Any,
    setup: DiffusionSetup,
    x_0: Tensor,
    x_t: Tensor,
    x_first: Tensor,
    t: Tensor,
    weight: Tensor,
    valid: Tensor,
) -> Tensor:
    """Return each term of the bound, their squared total and the number of tokens, summed over sequences."""
    if isinstance(setup.objective, Autoregressive):
        nll = torch.where(valid, setup.objective.loss(model, x_0, x_0, t), 0).sum(-1)
        terms = likelihood.BoundTerms(nll, torch.zeros_like(nll), torch.zeros_like(nll))
    else:
        terms = likelihood.bound_terms(model, setup.process, setup.schedule, x_0, x_t, x_first, Times(t, weight), valid)
    return torch.stack([*(a.sum() for a in terms), (terms.total**2).sum(), valid.sum()]).double()
