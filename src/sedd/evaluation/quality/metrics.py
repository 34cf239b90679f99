"""Sample metrics: generative perplexity in its two conventions, entropy, distinct n-grams and self-repetition.  [§10]

All are computed over the judge's tokens, so that models with different tokenizers can be compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from sedd.evaluation.quality.judge import SampleScore
from sedd.tokenizer import Ids

NGRAM_SIZES = (1, 2, 3, 4)
REPETITION_SIZE = 4
"""Size of the n-grams whose repetition inside a sample is counted."""


class MeanWithError(NamedTuple):
    """A mean over samples and its standard error."""

    value: float
    stderr: float | None
    """None if there is one sample only."""


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
            if not math.isfinite(getattr(self, name).value):
                raise ValueError(
                    f"{name} is {getattr(self, name).value}; the judge assigns probability 0 to a sample: use another "
                    "judge"
                )


def compute_metrics(scores: Sequence[SampleScore]) -> QualityMetrics:
    """Compute all metrics of samples that a judge has scored."""
    rows = [score.ids for score in scores]
    nats = np.array([score.nats for score in scores], dtype=float)
    counts = np.array([score.scored_tokens for score in scores], dtype=float)
    with np.errstate(over="ignore", invalid="ignore"):  # `QualityMetrics` refuses what is not finite
        by_token, by_sample = _exp_of_ratio(nats, counts), _mean(np.exp(nats / counts))
    counted = (_count_ngrams([row], REPETITION_SIZE) for row in rows)
    repeated = [1 - different / total for different, total in counted if total]
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
    different, total = _count_ngrams(rows, n)
    return different / total if total else None


def _count_ngrams(rows: Sequence[Ids], n: int) -> tuple[int, int]:
    """Count different n-grams and all n-grams."""
    found = [tuple(row[i : i + n]) for row in (row.tolist() for row in rows) for i in range(len(row) - n + 1)]
    return len(set(found)), len(found)


def _mean(values: np.ndarray) -> MeanWithError:
    n = len(values)
    return MeanWithError(float(values.mean()), float(values.std(ddof=1) / n**0.5) if n > 1 else None)


def _exp_of_ratio(nats: np.ndarray, counts: np.ndarray) -> MeanWithError:
    """Return exp(r), r = Σ nats/Σ tokens, with the standard error from the residuals nats − r·tokens (delta method)."""
    n, ratio = len(nats), nats.sum() / counts.sum()
    value, residuals = float(np.exp(ratio)), nats - ratio * counts
    stderr = value * float((n / (n - 1) * (residuals**2).sum()) ** 0.5 / counts.sum()) if n > 1 else None
    return MeanWithError(value, stderr)
