"""Results: every fact that a number depends on beside it; and tables, of what may stand side by side."""

import hashlib
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sedd import factory
from sedd.evaluation.corpus import Corpus
from sedd.evaluation.protocols import Protocol
from sedd.factory import LoadedModel
from sedd.likelihood import Estimate, Estimator, Terms, estimate
from sedd.likelihood.estimate import OnProgress
from sedd.runtime.distributed import Ranks

DIGITS = 5
"""Of nats and bits that are printed: what batches and processes may change is far behind them."""
SAME = ("protocol", "terms_included", "eos", "packing", "t_min", "precision", "label")
"""What two results must share to stand in one table."""


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
    """The likelihood of ``corpus``, as it is stored and printed."""
    by = factory.estimator(estimator, loaded, protocol.terms, protocol.t_min, seed)
    draws = protocol.draws if draws is None else draws
    found = estimate(
        loaded.model, by, corpus.rows, draws=draws, seed=seed, batch=batch, ranks=ranks, on_progress=on_progress
    )
    return {
        **_numbers(found, corpus, by),
        "tokens": corpus.tokens,
        "sequences": len(corpus),
        "draws": 0 if by.is_exact else draws,
        "seed": seed,
        **protocol.facts(),
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


def _numbers(found: Estimate, corpus: Corpus, by: Estimator) -> dict[str, Any]:
    bits = found.nats / math.log(2)
    terms = zip(Terms._fields, found.terms, strict=True)
    return {
        "nats_per_token": round(found.nats, DIGITS),
        "stderr_nats_per_token": round(found.stderr, DIGITS + 1),
        "stderr_population_nats_per_token": _rounded(found.stderr_population, 1.0, DIGITS + 1),
        "bits_per_token": round(bits, DIGITS),
        "bits_per_char": _rounded(bits, corpus.characters_per_token),
        "bits_per_byte": _rounded(bits, corpus.bytes_per_token),
        "ppl_bound": round(math.exp(found.nats), 3) if found.nats < 700 else None,  # JSON has no infinity
        "terms": {name: round(value, DIGITS) if name in by.included else None for name, value in terms},
        "terms_included": list(by.included),
        "estimator": type(by).__name__,
        "is_exact": by.is_exact,
    }


def _rounded(value: float | None, share: float | None, digits: int = DIGITS) -> float | None:
    return None if value is None or share is None else round(value / share, digits)


@cache  # of the weights that `build.load` reads, once for any number of texts
def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def table(records: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[list[Any]]:
    """These columns of the records, if one protocol made them all."""
    for key in SAME:
        # an exact value holds all there is, and may stand beside any
        found = sorted({str(r.get(key)) for r in records if not (key == "terms_included" and r["is_exact"])})
        if len(found) > 1:
            raise ValueError(
                f"these results have {key} {' and '.join(found)}; numbers of different protocols never share a table"
            )
    return [[record[column] for column in columns] for record in records]
