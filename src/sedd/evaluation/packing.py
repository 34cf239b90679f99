"""Packing: from the tokens of rows to the sequences that a model reads, whatever the number of workers."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from sedd.tokenizer import Ids


class Packing(ABC):
    """A way to cut tokens into sequences."""

    @abstractmethod
    def __call__(self, rows: Sequence[Ids], length: int) -> list[Ids]:
        """Sequences of ``length`` tokens, of the rows one after another."""

    @abstractmethod
    def __str__(self) -> str:
        """What it does, for the record."""


@final
@dataclass(frozen=True)
class Whole(Packing):
    """All rows in one stream; what is left at its end is a shorter sequence. Nothing is dropped."""

    def __call__(self, rows: Sequence[Ids], length: int) -> list[Ids]:
        """Blocks and the rest."""
        return _blocks(rows, length, rest=True)

    def __str__(self) -> str:
        return "one stream, nothing dropped"


@final
@dataclass(frozen=True)
class Stream(Packing):
    """All rows in one stream; what is left at its end is dropped."""

    def __call__(self, rows: Sequence[Ids], length: int) -> list[Ids]:
        """Blocks alone."""
        return _blocks(rows, length, rest=False)

    def __str__(self) -> str:
        return "one stream, the rest at its end dropped"


@final
@dataclass(frozen=True)
class Batches(Packing):
    """As published: rows in 8 contiguous shards, each in batches of 1000, and the rest of every batch dropped.

    Eight was the number of workers of those who published; here it is part of the name, whatever the machine has.
    """

    rows: int = 1000
    shards: int = 8

    def __call__(self, rows: Sequence[Ids], length: int) -> list[Ids]:
        """Blocks of every batch of every shard."""
        ends = np.cumsum([len(part) for part in np.array_split(np.arange(len(rows)), self.shards)]).tolist()
        shards = itertools.pairwise([0, *ends])
        batches = (rows[i : min(i + self.rows, end)] for start, end in shards for i in range(start, end, self.rows))
        return [block for batch in batches for block in _blocks(batch, length, rest=False)]

    def __str__(self) -> str:
        return f"{self.shards} shards, batches of {self.rows} rows, the rest of every batch dropped"


def _blocks(rows: Sequence[Ids], length: int, rest: bool) -> list[Ids]:
    stream = np.concatenate([*rows, np.zeros(0, np.int64)])
    stop = len(stream) if rest else len(stream) - length + 1
    return [stream[i : i + length] for i in range(0, stop, length)]
