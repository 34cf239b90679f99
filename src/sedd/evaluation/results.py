"""Likelihood results: a number with everything it depends on, and tables of results that can be compared."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from sedd.evaluation.corpus import Corpus
from sedd.evaluation.protocols import Protocol, default_draws
from sedd.likelihood import (
    BoundTerms,
    Estimator,
    LikelihoodEstimate,
    build_estimator,
    estimate_difference,
    estimate_likelihood,
)
from sedd.likelihood.estimate import OnProgress, default_batch
from sedd.likelihood.orders import Orders
from sedd.loading import LoadedModel, convert_precision
from sedd.parameterization import DiscreteModel
from sedd.runtime.distributed import Ranks

DIGITS = 5
"""Digits of nats and bits in results; differences between batch sizes and numbers of processes are far smaller."""
COMPARABLE_FIELDS = ("protocol", "terms_included", "eos", "packing", "t_min", "precision", "label")
"""Fields that results must share to be compared in one table."""


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
    models: "ModelsByPrecision | None" = None,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Estimate the likelihood of ``corpus`` under ``protocol``.

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
        on_progress: Called with the number of draws done and their total.

    Returns:
        The record that is printed and stored: nats, bits, perplexity bound, terms, standard errors, and every setting
        and hash they depend on.
    """
    by = build_estimator(estimator, loaded.model, protocol.terms, protocol.t_min, seed, orders)
    draws = default_draws(protocol, orders) if draws is None else draws
    models = models or models_by_precision(loaded)
    found = estimate_likelihood(
        models.model,
        by,
        corpus.sequences,
        draws=draws,
        seed=seed if noise_seed is None else noise_seed,
        batch=_batch(loaded, corpus) if batch is None else batch,
        ranks=ranks,
        low_precision_model=models.low_precision_model,
        on_progress=on_progress,
    )
    facts = {"draws": 0 if by.is_exact else draws, "orders": orders, "seed": seed}
    return make_record(found, corpus, by, facts | _precision_fields(found, models), protocol, loaded)


def make_record(
    found: LikelihoodEstimate[float],
    corpus: Corpus,
    by: Estimator,
    facts: dict[str, Any],
    protocol: Protocol,
    loaded: LoadedModel,
) -> dict[str, Any]:
    """Return a result with ``facts`` about its draws and everything else that it depends on."""
    return {
        **_numbers(found, corpus, by),
        "tokens": corpus.tokens,
        "sequences": len(corpus),
        **facts,
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


def evaluate_difference(
    loaded: LoadedModel,
    other: LoadedModel,
    corpus: Corpus,
    protocol: Protocol,
    ranks: Ranks,
    *,
    draws: int | None = None,
    seed: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Estimate how much more ``other`` needs for ``corpus`` than ``loaded``, the same model with other weights.

    Both are evaluated on the same times and noise, so the difference has a far smaller error than either value.

    Args:
        draws: Monte Carlo draws per sequence; None: the protocol's.
    """
    by = build_estimator(None, loaded.model, protocol.terms, protocol.t_min, seed)
    draws = protocol.draws if draws is None else draws
    models, batch = (loaded.model, other.model), _batch(loaded, corpus)
    found = estimate_difference(
        models, by, corpus.sequences, draws=draws, seed=seed, batch=batch, ranks=ranks, on_progress=on_progress
    )
    return {
        "nats_per_token": round(found.nats, DIGITS + 2),
        "stderr_nats_per_token": _per_unit(found.stderr_population, 1.0, DIGITS + 2),
        "bits_per_char": _per_unit(found.nats / math.log(2), corpus.characters_per_token, DIGITS + 2),
        "draws": 0 if by.is_exact else draws,
    }


def _numbers(found: LikelihoodEstimate[float], corpus: Corpus, by: Estimator) -> dict[str, Any]:
    bits = found.nats / math.log(2)
    terms = zip(BoundTerms._fields, found.terms, strict=True)
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
    }


class ModelsByPrecision(NamedTuple):
    """A model in the precision of its weights and, to be tried first, in a faster one."""

    model: DiscreteModel
    precision: str
    low_precision_model: DiscreteModel | None


def models_by_precision(loaded: LoadedModel, precision: str | None = None) -> ModelsByPrecision:
    """Return the models to evaluate with: ``precision`` alone or, if it is None, on a GPU bfloat16 before float32.

    The weights are in float32, as `load_model` loads them by default.
    """
    if precision is None and loaded.device.type == "cuda":
        return ModelsByPrecision(loaded.model, "float32", convert_precision(loaded, "bfloat16").model)
    model = loaded.model if precision in (None, "float32") else convert_precision(loaded, precision).model
    return ModelsByPrecision(model, precision or "float32", None)


def _precision_fields(found: LikelihoodEstimate[float], models: ModelsByPrecision) -> dict[str, Any]:
    """Return the precision of a value, and what was measured to choose it."""
    check = found.precision_check
    if check is None:
        return {"precision": models.precision, "bfloat16_difference": None}
    difference = {
        "nats_per_token": round(check.difference, DIGITS + 3),
        "stderr": round(check.stderr, DIGITS + 3),
        "draws": check.compared,
    }
    return {"precision": "bfloat16" if check.is_negligible else "float32", "bfloat16_difference": difference}


def _batch(loaded: LoadedModel, corpus: Corpus) -> int:
    return default_batch(loaded.device, loaded.process.num_states, max(map(len, corpus.sequences)))


def _per_unit(value: float | None, units_per_token: float | None, digits: int = DIGITS) -> float | None:
    return None if value is None or units_per_token is None else round(value / units_per_token, digits)


def _comparable(record: dict[str, Any], field: str) -> Any:
    """Return a field; a precision that was chosen since it makes no difference counts as float32."""
    is_chosen = field == "precision" and record.get("bfloat16_difference") is not None
    return "float32" if is_chosen else record.get(field)


def likelihood_table(records: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[list[Any]]:
    """Return these columns of the records; records of different protocols are refused."""
    for field in COMPARABLE_FIELDS:
        # an exact likelihood has no terms left out, so it can be compared with any bound
        compared = (r for r in records if not (field == "terms_included" and r["is_exact"]))
        values = sorted({str(_comparable(record, field)) for record in compared})
        if len(values) > 1:
            raise ValueError(
                f"these results have {field} {' and '.join(values)}; results of different protocols cannot share a "
                "table"
            )
    return [[record[column] for column in columns] for record in records]
