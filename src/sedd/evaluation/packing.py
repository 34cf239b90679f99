"""Packing: how the token rows of a data set are cut into the sequences that are scored."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from sedd.tokenizer import Ids


class Packing(ABC):
    """A rule that cuts rows of tokens into sequences."""

    @abstractmethod
    def __call__(self, rows: Sequence[Ids], length: int) -> list[Ids]:
        """Cut the rows, in order, into sequences of ``length`` tokens."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the description stored with results."""


@final
@dataclass(frozen=True)
class KeepRemainder(Packing):
    """All rows in one stream; the tokens left at its end form a shorter sequence."""

    def __call__(self, rows: Sequence[Ids], length: int) -> list[Ids]:
        """Cut the stream, the remainder included."""
        return _blocks(rows, length, keep_remainder=True)

    def __str__(self) -> str:
        return "one stream, nothing dropped"


@final
@dataclass(frozen=True)
class DropRemainder(Packing):
    """All rows in one stream; the tokens left at its end are dropped."""

    def __call__(self, rows: Sequence[Ids], length: int) -> list[Ids]:
        """Cut the stream into full sequences."""
        return _blocks(rows, length, keep_remainder=False)

    def __str__(self) -> str:
        return "one stream, the rest at its end dropped"


@final
@dataclass(frozen=True)
class ShardedBatches(Packing):
    """As published: rows in 8 contiguous shards, each in batches of 1000, and the remainder of every batch dropped.

    Eight was the number of worker processes of the published code; here it is fixed, whatever the machine has.
    """

    rows: int = 1000
    shards: int = 8

    def __call__(self, rows: Sequence[Ids], length: int) -> list[Ids]:
        """Cut every batch of every shard into full sequences."""
        ends = np.cumsum([len(part) for part in np.array_split(np.arange(len(rows)), self.shards)]).tolist()
        shards = itertools.pairwise([0, *ends])
        batches = (rows[i : min(i + self.rows, end)] for start, end in shards for i in range(start, end, self.rows))
        return [block for batch in batches for block in _blocks(batch, length, keep_remainder=False)]

    def __str__(self) -> str:
        return f"{self.shards} shards, batches of {self.rows} rows, the rest of every batch dropped"


def _blocks(rows: Sequence[Ids], length: int, keep_remainder: bool) -> list[Ids]:
    stream = rows[0] if len(rows) == 1 else np.concatenate([*rows, np.zeros(0, np.int64)])
    stop = len(stream) if keep_remainder else len(stream) - length + 1
    return [stream[i : i + length] for i in range(0, stop, length)]
