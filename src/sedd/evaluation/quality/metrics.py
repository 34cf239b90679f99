"""From costs and tokens to numbers: two generative perplexities, and what shows whether they were earned.  [§10]

All is counted in the judge's tokens, so that models with different tokens can be compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from sedd.evaluation.quality.judge import Scored
from sedd.tokenizer import Ids

GRAMS = (1, 2, 3, 4)
REPEATED = 4
"""The length of what counts as repeated inside a sample."""


class Mean(NamedTuple):
    """A mean over samples, and how far it may be from that over all samples of their kind."""

    value: float
    stderr: float | None
    """None for one sample alone."""

    def __str__(self) -> str:
        return f"{self.value:.4g}" if self.stderr is None else f"{self.value:.4g} ± {self.stderr:.2g}"


@final
@dataclass(frozen=True)
class Quality:
    """The generative perplexity of samples under a judge, in both conventions in use, beside their entropy."""

    gen_ppl_by_token: Mean
    """exp(Σ nats/Σ tokens): one mean over all tokens of all samples."""
    gen_ppl_by_sample: Mean
    """The mean over samples of exp(nats/tokens): more than the other if samples are equally long, and moved by few."""
    entropy: Mean
    """−Σ_w f_w log f_w in nats, f_w the share of token w in a sample; the mean over samples."""
    distinct: tuple[float | None, ...]
    """Of 1, 2, 3, 4 tokens in a row in all samples, the share that are different; it falls with their number."""
    repetition: Mean | None
    """Of 4 tokens in a row in a sample, the share that stood in it before; the mean over samples."""
    samples: int
    tokens: int

    def __post_init__(self) -> None:
        for name in ("gen_ppl_by_token", "gen_ppl_by_sample", "entropy"):
            if not math.isfinite(getattr(self, name).value):
                raise ValueError(f"{name} is {getattr(self, name).value}; the judge finds a sample impossible")


def measure(scored: Sequence[Scored]) -> Quality:
    """What samples are worth that a judge has read."""
    rows = [one.ids for one in scored]
    nats, counted = (np.array([getattr(one, name) for one in scored], dtype=float) for name in ("nats", "counted"))
    with np.errstate(over="ignore", invalid="ignore"):  # refused by name, by `Quality`
        by_token, by_sample = _of_ratio(nats, counted), _mean(np.exp(nats / counted))
    repeated = [1 - different / total for different, total in (_grams([row], REPEATED) for row in rows) if total]
    return Quality(
        gen_ppl_by_token=by_token,
        gen_ppl_by_sample=by_sample,
        entropy=_mean(np.array([entropy(row) for row in rows])),
        distinct=tuple(distinct(rows, n) for n in GRAMS),
        repetition=_mean(np.array(repeated)) if repeated else None,
        samples=len(rows),
        tokens=sum(map(len, rows)),
    )


def entropy(row: Ids) -> float:
    """−Σ_w f_w log f_w of the tokens of one sample, in nats."""
    share = np.unique(row, return_counts=True)[1] / len(row)
    return float(-(share * np.log(share)).sum()) + 0.0  # no −0


def distinct(rows: Sequence[Ids], n: int) -> float | None:
    """Different n-grams over all n-grams of all rows; None where no row has one."""
    different, total = _grams(rows, n)
    return different / total if total else None


def _grams(rows: Sequence[Ids], n: int) -> tuple[int, int]:
    found = [tuple(row[i : i + n]) for row in (row.tolist() for row in rows) for i in range(len(row) - n + 1)]
    return len(set(found)), len(found)


def _mean(values: np.ndarray) -> Mean:
    n = len(values)
    return Mean(float(values.mean()), float(values.std(ddof=1) / n**0.5) if n > 1 else None)


def _of_ratio(nats: np.ndarray, counted: np.ndarray) -> Mean:
    """exp(ratio), ratio = Σ nats/Σ tokens; the error of a ratio is told by its residuals nats − ratio·tokens."""
    n, ratio = len(nats), nats.sum() / counted.sum()
    value, left = float(np.exp(ratio)), nats - ratio * counted
    return Mean(value, value * float((n / (n - 1) * (left**2).sum()) ** 0.5 / counted.sum()) if n > 1 else None)
