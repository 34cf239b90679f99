"""Metrics of samples: generative perplexity in two conventions, entropy, distinct n-grams, repetition, MAUVE.  [§10]

All are computed over the judge's tokens, so that models with different tokenizers can be compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from sedd.evaluation.quality.judge import Judge, SampleScore, extract_features
from sedd.evaluation.quality.samples import SampleSet, encode_for_judge
from sedd.extras import install_hint
from sedd.tokenizer import Ids

NGRAM_SIZES = (1, 2, 3, 4)
REPETITION_SIZE = 4
"""Size of the n-grams whose repetition inside a sample is counted."""


class MeanWithError(NamedTuple):
    """A mean over samples and its standard error, None of a single sample."""

    value: float
    stderr: float | None


@final
@dataclass(frozen=True)
class QualityMetrics:
    """Generative perplexity of samples under a judge, in both conventions, always together with their entropy."""

    gen_ppl_by_token: MeanWithError
    """exp(Σ nats/Σ tokens) over all tokens of all samples."""
    gen_ppl_by_sample: MeanWithError
    """Mean over samples of exp(nats/tokens). For samples of equal length it is the larger of the two (Jensen); it is
    sensitive to single samples."""
    entropy: MeanWithError
    """Unigram entropy of a sample, −Σ_w f_w log f_w in nats with f_w the frequency of token w; mean over samples."""
    distinct: tuple[float | None, ...]
    """Distinct-n for n = 1, 2, 3, 4: different n-grams over all n-grams of all samples. It falls with their number."""
    self_repetition: MeanWithError | None
    """Fraction of a sample's 4-grams that occurred earlier in it; mean over samples."""
    samples: int
    tokens: int

    def __post_init__(self) -> None:
        for name in ("gen_ppl_by_token", "gen_ppl_by_sample", "entropy"):
            if not math.isfinite(value := getattr(self, name).value):
                raise ValueError(f"{name} is {value}; the judge assigns probability 0 to a sample: use another judge")


def compute_metrics(scores: Sequence[SampleScore]) -> QualityMetrics:
    """Compute all metrics of samples that a judge has scored."""
    rows = [score.ids for score in scores]
    nats = np.array([score.nats for score in scores], dtype=float)
    counts = np.array([score.scored_tokens for score in scores], dtype=float)
    with np.errstate(over="ignore", invalid="ignore"):  # `QualityMetrics` rejects what is not finite
        by_token, by_sample = _exp_of_ratio(nats, counts), _mean(np.exp(nats / counts))
    distinct = [distinct_ngrams([row], REPETITION_SIZE) for row in rows]
    repeated = [1 - fraction for fraction in distinct if fraction is not None]
    return QualityMetrics(
        gen_ppl_by_token=by_token,
        gen_ppl_by_sample=by_sample,
        entropy=_mean(np.array([unigram_entropy(row) for row in rows])),
        distinct=tuple(distinct_ngrams(rows, n) for n in NGRAM_SIZES),
        self_repetition=_mean(np.array(repeated)) if repeated else None,
        samples=len(rows),
        tokens=sum(map(len, rows)),
    )


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


def _mean(values: np.ndarray) -> MeanWithError:
    n = len(values)
    return MeanWithError(float(values.mean()), float(values.std(ddof=1) / n**0.5) if n > 1 else None)


def _exp_of_ratio(nats: np.ndarray, counts: np.ndarray) -> MeanWithError:
    """Return exp(r), r = Σ nats/Σ tokens, with the standard error from the residuals nats − r·tokens (delta method)."""
    n, ratio = len(nats), nats.sum() / counts.sum()
    value, residuals = float(np.exp(ratio)), nats - ratio * counts
    stderr = value * float((n / (n - 1) * (residuals**2).sum()) ** 0.5 / counts.sum()) if n > 1 else None
    return MeanWithError(value, stderr)


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
        self._compute = mauve.compute_mauve
        self.source = texts.source
        self.features = self._features(judge, encode_for_judge(texts, judge, truncate=True).ids, batch, self.source)

    def compare(self, judge: Judge, rows: list[Ids], batch: int) -> dict[str, Any]:
        """Return MAUVE, between 0 and 1, with mauve-text's default settings; nothing is downloaded."""
        features = self._features(judge, rows, batch, "the set of samples")
        found = self._compute(p_features=features, q_features=self.features, verbose=False)
        return {
            "mauve": round(float(found.mauve), 6),
            "mauve_reference": self.source,
            "mauve_texts": len(self.features),
            "mauve_buckets": int(found.num_buckets),
        }

    @staticmethod
    def _features(judge: Judge, rows: list[Ids], batch: int, source: str) -> np.ndarray:
        if len(rows) < 2:
            raise ValueError(f"{source} holds one text; MAUVE compares distributions and needs 100 or more")
        return extract_features(judge, rows, batch)
