"""Metrics of samples: generative perplexity in two conventions, entropy, distinct n-grams, repetition, MAUVE.  [§10]

All are computed over the judge's tokens, so that models with different tokenizers can be compared.
"""

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from sedd.evaluation.quality.judge import Judge, Numbers, extract_features
from sedd.evaluation.quality.samples import SampleSet, encode_for_judge
from sedd.extras import install_hint
from sedd.tokenizer import Ids

MeanWithError = tuple[float, float | None]
"""A mean over samples and its standard error, None of a single sample."""


def compute_metrics(rows: Sequence[Ids], nats: Numbers, counts: Numbers) -> dict[str, Any]:
    """Compute all metrics of samples that cost ``nats`` over ``counts`` tokens: the fields of a result, not rounded.

    No other function returns a generative perplexity, and this one always returns an entropy too: repetitive text has a
    low perplexity. Means over samples have standard errors, fields named ``stderr_…``:

    - ``gen_ppl_by_token``: exp(Σ nats/Σ tokens) over all tokens of all samples.
    - ``gen_ppl_by_sample``: the mean of exp(nats/tokens). For samples of equal length it is the larger of the two
      (Jensen); it is sensitive to single samples.
    - ``entropy_nats``: unigram entropy of a sample, −Σ_w f_w log f_w with f_w the frequency of token w.
    - ``self_repetition_4``: the fraction of a sample's 4-grams that occurred earlier in it.
    - ``distinct_n``: different n-grams over all n-grams of all samples. It falls with their number.
    """
    distinct = [distinct_ngrams([row], 4) for row in rows]
    repeated = np.array([1 - fraction for fraction in distinct if fraction is not None])
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is rejected below
        means: dict[str, tuple[float | None, float | None]] = {
            "gen_ppl_by_token": _exp_of_ratio(nats, counts),
            "gen_ppl_by_sample": _mean(np.exp(nats / counts)),
            "entropy_nats": _mean(np.array([unigram_entropy(row) for row in rows])),
            "self_repetition_4": _mean(repeated) if len(repeated) else (None, None),
        }
    record: dict[str, Any] = {"samples": len(rows), "tokens": sum(map(len, rows))}
    for name, (value, stderr) in means.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} is {value}; the judge assigns probability 0 to a sample: use another judge")
        record |= {name: value, f"stderr_{name}": stderr}
    return record | {f"distinct_{n}": distinct_ngrams(rows, n) for n in (1, 2, 3, 4)}


def unigram_entropy(row: Ids) -> float:
    """Return −Σ_w f_w log f_w of the token frequencies of one sample, in nats."""
    frequency = np.unique(row, return_counts=True)[1] / len(row)
    return float(-(frequency * np.log(frequency)).sum()) + 0.0  # turns −0 into 0


def distinct_ngrams(rows: Sequence[Ids], n: int) -> float | None:
    """Return distinct-n over all rows, or None if every row is shorter than n.

    Reference: Li et al. 2015, "A Diversity-Promoting Objective Function for Neural Conversation Models",
    arXiv 1510.03055.
    """
    found = [tuple(row[i : i + n]) for row in (row.tolist() for row in rows) for i in range(len(row) - n + 1)]
    return len(set(found)) / len(found) if found else None


def _mean(values: Numbers) -> MeanWithError:
    n = len(values)
    return float(values.mean()), float(values.std(ddof=1) / n**0.5) if n > 1 else None


def _exp_of_ratio(nats: Numbers, counts: Numbers) -> MeanWithError:
    """Return exp(r), r = Σ nats/Σ tokens, with the standard error from the residuals nats − r·tokens (delta method)."""
    n, ratio = len(nats), nats.sum() / counts.sum()
    value, residuals = float(np.exp(ratio)), nats - ratio * counts
    stderr = value * float((n / (n - 1) * (residuals**2).sum()) ** 0.5 / counts.sum()) if n > 1 else None
    return value, stderr


@final
class MauveReference:
    """Human texts to compute MAUVE against, in a judge's features; what is longer than its context is truncated.

    Reference: Pillutla et al. 2021, "MAUVE: Measuring the Gap Between Neural Text and Human Text using Divergence
    Frontiers", arXiv 2102.01454.
    """

    def __init__(self, texts: SampleSet, judge: Judge, batch: int = 8) -> None:
        try:
            import mauve
        except ImportError:
            raise ValueError(f"MAUVE needs the package mauve-text; install it: {install_hint('mauve')}") from None
        self._compute, self.source = mauve.compute_mauve, texts.source
        self.features = _features(judge, encode_for_judge(texts, judge, truncate=True)[0], batch, self.source)

    def compare(self, judge: Judge, rows: list[Ids], batch: int) -> dict[str, Any]:
        """Return MAUVE, between 0 and 1, with mauve-text's default settings; nothing is downloaded."""
        features = _features(judge, rows, batch, "the set of samples")
        found = self._compute(p_features=features, q_features=self.features, verbose=False)
        return {
            "mauve": round(float(found.mauve), 6),
            "mauve_reference": self.source,
            "mauve_texts": len(self.features),
            "mauve_buckets": int(found.num_buckets),
        }


def _features(judge: Judge, rows: list[Ids], batch: int, source: str) -> np.ndarray:
    if len(rows) < 2:
        raise ValueError(f"{source} holds one text; MAUVE compares distributions and needs 100 or more")
    return extract_features(judge, rows, batch)
