"""Likelihood results: a number with everything it depends on, and tables of results that can be compared."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from sedd import checkpoint, factory
from sedd.evaluation.corpus import Corpus
from sedd.evaluation.protocols import Protocol
from sedd.factory import LoadedModel
from sedd.likelihood import BoundTerms, Estimator, LikelihoodEstimate, estimate_likelihood
from sedd.likelihood.estimate import OnProgress
from sedd.runtime.distributed import Ranks

DIGITS = 5
"""Digits of nats and bits in results; differences between batch sizes and numbers of processes are far smaller."""
COMPARABLE_FIELDS = ("protocol", "terms_included", "eos", "packing", "t_min", "precision", "label")
"""Fields that results must share to be compared in one table."""
_sha256 = cache(checkpoint.sha256)  # `sedd score` evaluates many texts with the same weights


def evaluate(
    loaded: LoadedModel,
    corpus: Corpus,
    protocol: Protocol,
    ranks: Ranks,
    *,
    estimator: str | None = None,
    draws: int | None = None,
    batch: int = 16,
    seed: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Estimate the likelihood of ``corpus`` under ``protocol``.

    Args:
        loaded: The model.
        corpus: The sequences.
        protocol: Which terms of the bound are reported, and from which time.
        ranks: The processes that share the work.
        estimator: Name of the estimator; by default the first that fits the model.
        draws: Monte Carlo draws per sequence; by default the protocol's.
        batch: Draws per batch on each process; affects speed only.
        seed: Seed of times and noise.
        on_progress: Called with the number of draws done and their total.

    Returns:
        The record that is printed and stored: nats, bits, perplexity bound, terms, standard errors, and every setting
        and hash they depend on.
    """
    by = factory.build_estimator(estimator, loaded, protocol.terms, protocol.t_min, seed)
    draws = protocol.draws if draws is None else draws
    found = estimate_likelihood(
        loaded.model, by, corpus.sequences, draws=draws, seed=seed, batch=batch, ranks=ranks, on_progress=on_progress
    )
    return {
        **_numbers(found, corpus, by),
        "tokens": corpus.tokens,
        "sequences": len(corpus),
        "draws": 0 if by.is_exact else draws,
        "seed": seed,
        **protocol.as_record(),
        "split": corpus.split,
        "dataset": corpus.dataset,
        "data": corpus.source,
        "data_sha256": corpus.sha256,
        "tokenizer": loaded.tokenizer.kind,
        "tokenizer_sha256": loaded.tokenizer.fingerprint(),
        "label": loaded.label,
        "model": str(loaded.folder),
        "model_sha256": _sha256(loaded.folder / "ema.safetensors"),
    }


def _numbers(found: LikelihoodEstimate, corpus: Corpus, by: Estimator) -> dict[str, Any]:
    bits = found.nats / math.log(2)
    terms = zip(BoundTerms._fields, found.terms, strict=True)
    return {
        "nats_per_token": round(found.nats, DIGITS),
        "stderr_nats_per_token": round(found.stderr, DIGITS + 1),
        "stderr_population_nats_per_token": _per_unit(found.stderr_population, 1.0, DIGITS + 1),
        "bits_per_token": round(bits, DIGITS),
        "bits_per_char": _per_unit(bits, corpus.characters_per_token),
        "bits_per_byte": _per_unit(bits, corpus.bytes_per_token),
        "ppl_bound": round(math.exp(found.nats), 3) if found.nats < 700 else None,  # JSON has no infinity
        "terms": {name: round(value, DIGITS) if name in by.included else None for name, value in terms},
        "terms_included": list(by.included),
        "estimator": type(by).__name__,
        "is_exact": by.is_exact,
    }


def _per_unit(value: float | None, units_per_token: float | None, digits: int = DIGITS) -> float | None:
    return None if value is None or units_per_token is None else round(value / units_per_token, digits)


def likelihood_table(records: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[list[Any]]:
    """Return these columns of the records; records of different protocols are refused."""
    for field in COMPARABLE_FIELDS:
        # an exact likelihood has no terms left out, so it can be compared with any bound
        values = sorted({str(r.get(field)) for r in records if not (field == "terms_included" and r["is_exact"])})
        if len(values) > 1:
            raise ValueError(
                f"these results have {field} {' and '.join(values)}; results of different protocols cannot share a "
                "table"
            )
    return [[record[column] for column in columns] for record in records]
