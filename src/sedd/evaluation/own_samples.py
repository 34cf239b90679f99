"""The likelihood of a model's own samples, bounded from both sides.  [§8]"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from sedd import samplers
from sedd.draws import CounterRNG, derive_seed
from sedd.evaluation.corpus import sample_corpus
from sedd.evaluation.protocols import OWN_SAMPLES
from sedd.evaluation.results import make_record
from sedd.likelihood import (
    ImportanceWeightedEstimator,
    LikelihoodEstimate,
    OwnSampleBounds,
    build_estimator,
    own_sample_bounds,
)
from sedd.likelihood.estimate import OnProgress, default_batch, population_stderr
from sedd.loading import LoadedModel
from sedd.runtime.distributed import Ranks
from sedd.samplers import GeneratedSequence


def evaluate_own_samples(
    loaded: LoadedModel,
    ranks: Ranks,
    *,
    samples: int,
    orders: int,
    seed: int = 0,
    batch: int | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Generate samples one token at a time, and bound −log p of them from both sides by ``orders`` orders each.

    The order in which a sample was generated is a draw of p(order | sample), which no other text comes with. The mean
    of −log p over a model's own samples is its entropy. Standard errors are those of the entropy, over samples and
    orders.

    Args:
        orders: Orders in each mean; more bring the bounds closer together.
        batch: Samples at a time; it affects speed only. None: chosen for the device.
        on_progress: Called with the number of samples done on this process and their total.

    Returns:
        The record of `results.evaluate`: ``nats_per_token`` is the upper bound, ``lower_nats_per_token`` the lower.
    """
    if samples < 2:
        raise ValueError(f"samples is {samples}; a standard error needs at least 2")
    by = build_estimator(None, loaded.model, orders=orders)
    if not isinstance(by, ImportanceWeightedEstimator):
        raise ValueError(f"orders is {orders!r}; samples are bounded from both sides by a number of orders, such as 16")
    length = loaded.config.model.seq_len
    batch = default_batch(loaded.device, loaded.process.num_states, length) if batch is None else batch
    drawn = _generate(loaded, samples, seed, batch)
    found = torch.zeros(samples, 2, dtype=torch.float64, device=ranks.device)
    mine = list(torch.arange(samples, device=ranks.device).split(batch))[ranks.rank :: ranks.world_size]
    done, total = 0, sum(map(len, mine))
    for rows in mine:
        rng = CounterRNG(derive_seed(seed, "orders"), rows)
        with torch.no_grad():
            bounds = own_sample_bounds(loaded.model, by.process, drawn.x_0[rows], drawn.order[rows], orders, rng)
        found[rows] = torch.stack(bounds, -1)
        on_progress(done := done + len(rows), total)
    estimate = _summary(OwnSampleBounds(*ranks.all_reduce_sum(found).unbind(-1)), drawn.x_0.shape[-1], orders)
    facts = {"draws": 1, "orders": orders, "seed": seed, "precision": "float32", "bfloat16_difference": None}
    corpus = sample_corpus(list(drawn.x_0.cpu().numpy()), loaded, seed)
    return make_record(estimate, corpus, by, facts, OWN_SAMPLES, loaded)


class DrawnSamples(NamedTuple):
    """Samples, and the order in which the tokens of each were generated."""

    x_0: Int[Tensor, "n L"]
    order: Int[Tensor, "n L"]

    @staticmethod
    def of(drawn: Sequence[GeneratedSequence], device: torch.device) -> "DrawnSamples":
        """Read samples that were generated one token at a time."""
        x_0, steps = (torch.tensor([row[i] for row in drawn], device=device) for i in (0, 1))
        return DrawnSamples(x_0, steps.argsort(-1))


def _generate(loaded: LoadedModel, samples: int, seed: int, batch: int) -> DrawnSamples:
    """Generate one token at a time, in random orders."""
    settings = samplers.SamplingSettings("first-hitting", steps=None, seed=seed)
    prompt = samplers.blank_prompt(loaded, samples, None).to(loaded.device)
    return DrawnSamples.of(samplers.SamplingRun.of(loaded, settings).sample(prompt, batch), loaded.device)


def _summary(bounds: OwnSampleBounds, length: int, orders: int) -> LikelihoodEstimate[float]:
    """Average over samples, in nats per token."""
    samples = len(bounds.upper)
    lengths = np.full(samples, length)
    (low, low_error), (high, high_error) = (
        (nats.mean().item() / length, population_stderr(nats.cpu().numpy(), lengths)) for nats in bounds
    )
    return LikelihoodEstimate(
        nats=high,
        stderr=high_error or 0.0,
        stderr_population=high_error,
        terms=(high, 0.0, 0.0),
        network_calls=samples * (orders + 1) * length,
        lower=low,
        lower_stderr=low_error,
    )
