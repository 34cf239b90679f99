"""Judges: causal language models that assign a cost, −log p, to each token of a text; scoring of samples by them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Real
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedd.likelihood.estimate import OnProgress
from sedd.likelihood.precision_check import FIRST, PrecisionCheck, check_precision
from sedd.tokenizer import Ids

Numbers = Real[np.ndarray, " n"]


class Judge(ABC):
    """A causal language model with its own tokenizer."""

    name: str
    sha256: str  # of its weights and vocabulary: judges of the same name may differ
    precision: str
    low_precision: "Judge | None" = None  # the same judge, to be tried first; see `score_in_low_precision`
    vocab_size: int
    context_length: int | None  # the longest sequence it reads, in tokens; None: unlimited
    skips_first_token: bool
    """Whether a text's first token is context only and not counted, as in published tables; else it is counted, given
    the judge's beginning-of-text token."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Encode each text without special tokens."""

    @abstractmethod
    def decode(self, ids: ArrayLike) -> str:
        """Decode tokens, leaving out special ones."""

    @abstractmethod
    def token_nll(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b L"]:
        """Return −log p of every token given the preceding ones, in nats.

        Tokens that are not counted have 0; entries that are not valid are arbitrary.
        """

    @abstractmethod
    def features(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b h"]:
        """Return the hidden state at the last token of each row."""


def count_tokens(judge: Judge, rows: Sequence[Ids]) -> Numbers:
    """Return the number of tokens of each row that are counted."""
    return np.array([len(row) - judge.skips_first_token for row in rows], dtype=float)


@torch.no_grad()
def score_samples(
    judge: Judge, rows: Sequence[Ids], batch: int = 8, on_progress: OnProgress = lambda done, total: None
) -> Numbers:
    """Return −log p of each row in nats; up to rounding it does not depend on the other rows or the batch size."""
    nats, done = np.zeros(len(rows)), 0
    for indices, x, valid in _padded_batches(rows, batch):
        nats[indices] = torch.where(valid, judge.token_nll(x, valid), 0).double().sum(-1).cpu().numpy()
        on_progress(done := done + len(indices), len(rows))
    return nats


def score_in_low_precision(
    judge: Judge, rows: Sequence[Ids], batch: int, on_progress: OnProgress
) -> tuple[Numbers, PrecisionCheck | None]:
    """Return −log p of each row in low precision if the difference is negligible, else as `score_samples` does.

    Negligible is less than a tenth of the standard error of the mean over samples, in nats per token.
    """
    if judge.low_precision is None or len(rows) < 4 * FIRST:
        return score_samples(judge, rows, batch, on_progress), None
    nats, tokens = score_samples(judge.low_precision, rows, batch, on_progress), count_tokens(judge, rows)
    per_row = len(rows) / tokens.sum()  # the mean over rows is then in nats per token
    low = nats * per_row
    residuals = low - low.mean() * tokens / tokens.mean()
    check = check_precision(
        low,
        lambda chosen: score_samples(judge, [rows[index] for index in chosen], batch) * per_row,
        float(residuals.std(ddof=1) / len(rows) ** 0.5),
    )
    is_negligible = check is not None and check.is_negligible
    return nats if is_negligible else score_samples(judge, rows, batch, on_progress), check


@torch.no_grad()
def extract_features(judge: Judge, rows: Sequence[Ids], batch: int = 8) -> Float[np.ndarray, "n h"]:
    """Return the judge's hidden state at the end of each row."""
    found: dict[int, np.ndarray] = {}
    for indices, x, valid in _padded_batches(rows, batch):
        found.update(zip(indices, judge.features(x, valid).float().cpu().numpy(), strict=True))
    return np.stack([found[index] for index in range(len(rows))])


def _padded_batches(rows: Sequence[Ids], size: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Batch rows of similar lengths, padded on the right, where padding does not affect a causal model."""
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))  # longest first: out of memory fails at once
    for start in range(0, len(order), size):
        indices = order[start : start + size]
        x = pad_sequence([torch.from_numpy(rows[index]) for index in indices], batch_first=True)
        lengths = torch.tensor([len(rows[index]) for index in indices])
        yield indices, x, torch.arange(x.shape[-1]) < lengths[:, None]
