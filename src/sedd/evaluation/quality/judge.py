"""Judges: language models that say what each token of a text costs, given those before it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from sedd.tokenizer import Ids

OnProgress = Callable[[int, int], None]
"""Told how many rows are done, and how many there are."""


class Judge(ABC):
    """A causal language model with its own tokens."""

    name: str
    sha256: str
    """Of its weights and its tokens: two judges of one name may differ."""
    precision: str
    vocab_size: int
    context: int | None
    """The most tokens that it reads; None: any number."""
    skips_first: bool
    """Whether a text's first token is read and not counted, as in published tables; if not, it is counted, given the
    token with which the judge starts a text."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The judge's tokens of each text, with nothing added."""

    @abstractmethod
    def decode(self, ids: ArrayLike) -> str:
        """The text of the judge's tokens; specials have none."""

    @abstractmethod
    def costs(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b L"]:
        """−log p of every token given those before it, in nats; anything where it is not valid, 0 where not counted."""

    @abstractmethod
    def features(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b h"]:
        """What the judge has in mind at the last token of each row."""


class Scored(NamedTuple):
    """A sample, as its judge read it."""

    ids: Ids
    nats: float
    counted: int
    """How many tokens cost them."""


@torch.no_grad()
def score(
    judge: Judge, rows: Sequence[Ids], batch: int = 8, on_progress: OnProgress = lambda done, total: None
) -> list[Scored]:
    """What each row costs; neither its mates nor the size of a batch matter, but for the last bits."""
    nats, done = np.zeros(len(rows)), 0
    for numbers, x, valid in _batches(rows, batch):
        costs = torch.where(valid, judge.costs(x, valid), 0).double().sum(-1)
        nats[numbers] = costs.cpu().numpy()
        on_progress(done := done + len(numbers), len(rows))
    return [Scored(row, float(n), len(row) - judge.skips_first) for row, n in zip(rows, nats, strict=True)]


@torch.no_grad()
def features(judge: Judge, rows: Sequence[Ids], batch: int = 8) -> Float[np.ndarray, "n h"]:
    """What the judge has in mind at the end of each row."""
    found: dict[int, np.ndarray] = {}
    for numbers, x, valid in _batches(rows, batch):
        found.update(zip(numbers, judge.features(x, valid).float().cpu().numpy(), strict=True))
    return np.stack([found[number] for number in range(len(rows))])


def _batches(rows: Sequence[Ids], size: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Rows of like lengths side by side, filled up on the right: what comes after a token is never seen by it."""
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))  # the longest first: memory fails at once
    for start in range(0, len(order), size):
        numbers = order[start : start + size]
        x = np.zeros((len(numbers), len(rows[numbers[0]])), dtype=np.int64)
        for row, number in zip(x, numbers, strict=True):
            row[: len(rows[number])] = rows[number]
        lengths = torch.tensor([len(rows[number]) for number in numbers])
        yield numbers, torch.from_numpy(x), torch.arange(x.shape[-1]) < lengths[:, None]
