"""Likelihood results: a number with everything it depends on, and tables of results that can be compared."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sedd import samplers
from sedd.draws import CounterRNG, derive_seed
from sedd.evaluation.corpus import Corpus, sample_corpus
from sedd.evaluation.protocols import OWN_SAMPLES, Protocol, default_draws
from sedd.likelihood import ImportanceWeightedEstimator, LikelihoodEstimate, estimate_likelihood
from sedd.likelihood.estimate import OnProgress, build_estimator, default_batch, estimate_difference, population_stderr
from sedd.likelihood.estimators import BoundTerms, Estimator
from sedd.likelihood.orders import Orders, own_sample_bounds
from sedd.loading import LoadedModel, convert_precision
from sedd.parameterization import DiscreteModel
from sedd.runtime.distributed import Ranks
from sedd.samplers import GeneratedSequence
from sedd.tokenizer import Ids

DIGITS = 5
"""Digits of nats and bits in results; differences between batch sizes and numbers of processes are far smaller."""
COMPARABLE_FIELDS = ("protocol", "terms_included", "eos", "packing", "t_min", "precision", "label")
"""Fields that results must share to be compared in one table."""
Record = dict[str, Any]


ModelsByPrecision = tuple[DiscreteModel, str, DiscreteModel | None]
"""A model in the precision of its weights, that precision, and the model in a faster one, to be tried first."""


def models_by_precision(loaded: LoadedModel, precision: str | None = None) -> ModelsByPrecision:
    """Return the models, of weights in float32: ``precision`` or, if it is None, on a GPU bfloat16 before float32."""
    if precision is None and loaded.device.type == "cuda":
        return loaded.model, "float32", convert_precision(loaded, "bfloat16").model
    model = loaded.model if precision in (None, "float32") else convert_precision(loaded, precision).model
    return model, precision or "float32", None


def evaluate(
    loaded: LoadedModel,
    corpus: Corpus,
    protocol: Protocol,
    ranks: Ranks,
    *,
    estimator: str | None = None,
    orders: Orders | None = None,
    draws: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    models: ModelsByPrecision | None = None,
    on_progress: OnProgress | None = None,
) -> Record:
    """Estimate the likelihood of ``corpus`` under ``protocol``; return the record that is printed and stored.

    It has nats, bits, perplexity bound, terms, standard errors, and every setting and hash they depend on.

    Args:
        protocol: Which terms of the bound are reported, and from which time.
        estimator: Name of the estimator; by default the first that fits the model.
        orders: For a time-free denoiser of masks: the number of orders of the importance-weighted bound, or ``all`` for
            the exact likelihood of short sequences; None: ``estimator`` decides.
        draws: Monte Carlo draws per sequence; by default the protocol's, with ``orders`` a sixteenth of them.
        batch: Draws per batch on each process; affects speed only. None: chosen for the device.
        seed: Seed of times and noise, and of a random order of tokens.
        noise_seed: Another seed of times and noise: results with different ones have independent errors.
        models: The model in each precision, for several calls; by default bfloat16 on a GPU if the difference is
            negligible, else float32.
    """
    by = build_estimator(estimator, loaded.model, protocol.terms, protocol.t_min, seed, orders)
    draws = default_draws(protocol, orders) if draws is None else draws
    model, precision, low_precision_model = models or models_by_precision(loaded)
    found = estimate_likelihood(
        model,
        by,
        corpus.sequences,
        draws=draws,
        seed=seed if noise_seed is None else noise_seed,
        batch=_default_batch(loaded, corpus.sequences) if batch is None else batch,
        ranks=ranks,
        low_precision_model=low_precision_model,
        on_progress=on_progress,
    )
    facts = {"draws": 0 if by.is_exact else draws, "orders": orders, "seed": seed}
    return _record(found, corpus, by, facts, precision, protocol, loaded)


def evaluate_difference(
    loaded: LoadedModel,
    other: LoadedModel,
    corpus: Corpus,
    protocol: Protocol,
    ranks: Ranks,
    *,
    draws: int | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Record:
    """Estimate how much more ``other`` needs for ``corpus`` than ``loaded``, the same model with other weights.

    Both are evaluated on the same times and noise, so the difference has a far smaller error than either value.
    """
    by = build_estimator(None, loaded.model, protocol.terms, protocol.t_min, seed)
    draws = protocol.draws if draws is None else draws
    options: Any = {"draws": draws, "seed": seed, "batch": _default_batch(loaded, corpus.sequences), "ranks": ranks}
    models = (loaded.model, other.model)
    found = estimate_difference(models, by, corpus.sequences, on_progress=on_progress, **options)
    return {
        "nats_per_token": round(found.nats, DIGITS + 2),
        "stderr_nats_per_token": _per_unit(found.stderr_population, 1.0, DIGITS + 2),
        "bits_per_char": _per_unit(found.nats / math.log(2), corpus.characters_per_token, DIGITS + 2),
        "draws": 0 if by.is_exact else draws,
    }


def evaluate_own_samples(
    loaded: LoadedModel,
    ranks: Ranks,
    *,
    samples: int,
    orders: int,
    seed: int = 0,
    batch: int | None = None,
    on_progress: OnProgress | None = None,
) -> Record:
    """Generate samples one token at a time, and bound −log p of them from both sides by ``orders`` orders each.  [§8]

    The order in which a sample was generated is a draw of p(order | sample), which no other text comes with. The mean
    of −log p over a model's own samples is its entropy. Standard errors are those of the entropy, over samples and
    orders.

    The record is that of `evaluate`, with the upper bound as ``nats_per_token`` and the lower as
    ``lower_nats_per_token``. More orders bring them closer together.
    """
    if samples < 2:
        raise ValueError(f"samples is {samples}; a standard error needs at least 2")
    by = build_estimator(None, loaded.model, orders=orders)
    if not isinstance(by, ImportanceWeightedEstimator):
        raise ValueError(f"orders is {orders!r}; samples are bounded from both sides by a number of orders, such as 16")
    prompt = samplers.blank_prompt(loaded, samples, None).to(loaded.device)
    batch = _default_batch(loaded, prompt.given) if batch is None else batch
    settings = samplers.SamplingSettings("first-hitting", steps=None, seed=seed)
    x_0, order = sequences_and_orders(samplers.SamplingRun.of(loaded, settings).sample(prompt, batch))
    found = torch.zeros(samples, 2, dtype=torch.float64, device=ranks.device)
    mine, done = torch.arange(samples).split(batch)[ranks.rank :: ranks.world_size], 0
    for rows in mine:
        given, by_step = (part[rows].to(ranks.device) for part in (x_0, order))
        rng = CounterRNG(derive_seed(seed, "orders"), rows.to(ranks.device))
        with torch.no_grad():
            bounds = own_sample_bounds(loaded.model, by.process, given, by_step, orders, rng)
        found[rows] = torch.stack(bounds, -1)
        if on_progress is not None:
            on_progress(done := done + len(rows), sum(map(len, mine)))
    length = x_0.shape[-1]
    (low, low_error), (high, high_error) = (
        (nats.mean().item() / length, population_stderr(nats.cpu().numpy(), np.full(samples, length)))
        for nats in ranks.all_reduce_sum(found).unbind(-1)
    )
    estimate = LikelihoodEstimate(
        nats=high,
        stderr=high_error or 0.0,
        stderr_population=high_error,
        terms=(high, 0.0, 0.0),
        network_calls=samples * (orders + 1) * length,
        lower=low,
        lower_stderr=low_error,
    )
    corpus, facts = sample_corpus(list(x_0.numpy()), loaded, seed), {"draws": 1, "orders": orders, "seed": seed}
    return _record(estimate, corpus, by, facts, "float32", OWN_SAMPLES, loaded)


def sequences_and_orders(drawn: Sequence[GeneratedSequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples that were generated one token at a time, and the order in which each was."""
    x_0, steps = (torch.tensor([row[i] for row in drawn]) for i in (0, 1))
    return x_0, steps.argsort(-1)


def _record(
    found: LikelihoodEstimate[float],
    corpus: Corpus,
    by: Estimator,
    facts: Record,
    precision: str,
    protocol: Protocol,
    loaded: LoadedModel,
) -> Record:
    """Return a result with ``facts`` about its draws and everything else that it depends on."""
    bits, check, difference = found.nats / math.log(2), found.precision_check, None
    terms = zip(BoundTerms._fields, found.terms, strict=True)
    if check is not None:
        precision = "bfloat16" if check.is_negligible else "float32"
        difference = {
            "nats_per_token": round(check.difference, DIGITS + 3),
            "stderr": round(check.stderr, DIGITS + 3),
            "draws": check.compared,
        }
    return {
        "nats_per_token": round(found.nats, DIGITS),
        "stderr_nats_per_token": round(found.stderr, DIGITS + 1),
        "stderr_population_nats_per_token": _per_unit(found.stderr_population, 1.0, DIGITS + 1),
        "lower_nats_per_token": _per_unit(found.lower, 1.0),
        "stderr_lower_nats_per_token": _per_unit(found.lower_stderr, 1.0, DIGITS + 1),
        "bits_per_token": round(bits, DIGITS),
        "bits_per_char": _per_unit(bits, corpus.characters_per_token),
        "bits_per_byte": _per_unit(bits, corpus.bytes_per_token),
        "ppl_bound": round(math.exp(found.nats), 3) if found.nats < 700 else None,  # JSON has no infinity
        "terms": {name: round(value, DIGITS) if name in by.included else None for name, value in terms},
        "terms_included": list(by.included),
        "estimator": type(by).__name__,
        "is_exact": by.is_exact,
        "tokens": sum(map(len, corpus.sequences)),
        "sequences": len(corpus.sequences),
        **facts,
        "precision": precision,
        "bfloat16_difference": difference,
        "network_calls": found.network_calls,
        **protocol.as_record(corpus.by_record),
        "split": corpus.split,
        "dataset": corpus.dataset,
        "data": corpus.source,
        "data_sha256": corpus.sha256,
        "tokenizer": loaded.tokenizer.kind,
        "tokenizer_sha256": loaded.tokenizer.fingerprint(),
        "label": loaded.label,
        "model": str(loaded.folder),
        "model_sha256": loaded.sha256,
    }


def _default_batch(loaded: LoadedModel, sequences: Sequence[Ids] | torch.Tensor) -> int:
    return default_batch(loaded.device, loaded.process.num_states, max(map(len, sequences)))


def _per_unit(value: float | None, units_per_token: float | None, digits: int = DIGITS) -> float | None:
    return None if value is None or units_per_token is None else round(value / units_per_token, digits)


def likelihood_table(records: Sequence[Record], columns: Sequence[str]) -> list[list[str]]:
    """Return these columns of the records as text; reject records of different protocols."""
    for field in COMPARABLE_FIELDS:
        values = set()
        for record in records:
            if field == "precision" and record.get("bfloat16_difference") is not None:
                values.add("float32")  # bfloat16 was chosen since it makes no difference
            elif not (field == "terms_included" and record["is_exact"]):  # no term is left out of an exact value
                values.add(str(record.get(field)))
        if len(values) > 1:
            raise ValueError(f"results with {field} {' and '.join(sorted(values))} cannot share a table")
    return [["" if record[column] is None else str(record[column]) for column in columns] for record in records]
