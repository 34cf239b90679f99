"""Prepared datasets: their index, their tokens as fixed-length blocks, and the order in which training visits these."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np
from jaxtyping import Bool, Int

from sedd import files
from sedd.schema import check_choice, from_dict
from sedd.tokenizer import Integers, load_tokenizer

FORMAT = 2
INDEX = "index.json"
LENGTHS = "lengths.bin"
LABELS = "labels.bin"
SPLITS = ("train", "validation", "all")
PREPARE_AGAIN = "remove the folder and prepare the data again"
COUNTED = 1 << 22  # tokens that are read at a time to count something


@final
@dataclass(frozen=True)
class Shard:
    """A file of token ids."""

    name: str
    tokens: int
    sha256: str


@final
@dataclass(frozen=True)
class Labels:
    """The label names of a dataset; each record stores the index of its label in labels.bin."""

    names: list[str]
    sha256: str


@final
@dataclass(frozen=True)
class Index:
    """The contents of a prepared folder, stored as index.json."""

    format: int
    packing: str  # packed: one stream of tokens; lines: one record per line or row, with their lengths
    dtype: str
    vocab_size: int
    tokens: int  # in the shards: end-of-text tokens count, padding is not stored
    records: int  # documents if packed
    characters: int
    bytes: int
    length: int | None  # of a record with its padding; None if packed
    pad: str | None  # model, ignore, or None if no record is padded
    tokenizer: str  # its fingerprint
    shards: list[Shard]
    lengths: str | None  # SHA-256 of lengths.bin; None if packed
    sha256: str  # of all other fields
    labels: Labels | None = None  # not stored if there are none
    fitted: int | None = None  # characters, or of lines records, that the tokenizer was fitted to; not stored if all

    @staticmethod
    def read(folder: Path) -> "Index":
        """Read the index of ``folder`` and check it: its author may be anyone."""
        path = folder / INDEX
        try:
            found = files.read_json(path)
            if isinstance(found, dict) and found.get("format") != FORMAT:
                raise ValueError(f"its format is {found.get('format')}, and this version reads format {FORMAT}")
            index = from_dict(Index, found)
            if index.sha256 != index.content_hash():
                raise ValueError("its SHA-256 does not match")
            sizes = [shard.tokens for shard in index.shards]
            if (
                index.dtype not in ("<u2", "<u4")
                or index.packing not in ("packed", "lines")
                or index.pad not in (None, "model", "ignore")
                or min(index.tokens, index.records, index.characters, index.bytes, *sizes) < 0
                or not 1 <= index.vocab_size < 2**32
                or sum(sizes) != index.tokens
                or [shard.name for shard in index.shards] != list(map(shard_name, range(len(sizes))))
                or any((value is None) != (index.packing == "packed") for value in (index.lengths, index.length))
                or (index.length or 1) < 1
            ):
                raise ValueError("its values contradict each other")
        except OSError as error:
            raise ValueError(f"{folder} is not a prepared dataset ({error.strerror}); run sedd data prepare") from None
        except (ValueError, TypeError) as error:  # a TypeError: of a missing field
            raise ValueError(f"{path} is damaged: {error}; remove the folder and prepare the data again") from None
        return index

    def content_hash(self) -> str:
        """Return the SHA-256 of all other fields, which include the hashes of the shards and so cover every token."""
        return hashlib.sha256(json.dumps({**self._plain(), "sha256": ""}, sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write index.json into ``folder``."""
        files.write_text(folder / INDEX, json.dumps(self._plain(), indent=1) + "\n")

    def files(self) -> Iterator[tuple[str, int, str]]:
        """Yield the name, the size in bytes and the SHA-256 of each file."""
        for shard in self.shards:
            yield shard.name, np.dtype(self.dtype).itemsize * shard.tokens, shard.sha256
        if self.lengths:
            yield LENGTHS, 4 * self.records, self.lengths
        if self.labels:
            yield LABELS, 2 * self.records, self.labels.sha256

    def _plain(self) -> dict[str, Any]:
        found = asdict(self).items()
        return {name: value for name, value in found if value is not None or name not in ("labels", "fitted")}


def shard_name(number: int) -> str:
    """Return the name of the file of a shard."""
    return f"tokens-{number:05d}.bin"


def is_prepared(folder: str | Path) -> bool:
    """Return whether ``folder`` was written by `prepare`."""
    return (Path(folder) / INDEX).is_file()


@final
class TokenBlocks:
    """Blocks of ``length`` tokens: consecutive windows of a packed stream, or padded records of a lines dataset.

    The last ``val_fraction`` of the blocks, at least one, is the validation split; the rest is the training split.
    """

    @staticmethod
    def open(
        folder: str | Path,
        length: int | None,
        split: str,
        val_fraction: float = 0.05,
        check: bool = False,
        name: str | None = None,
    ) -> "TokenBlocks":
        """Open a prepared folder.

        Args:
            length: Tokens per block; None: as many as the records have.
            split: One of `SPLITS`.
            name: What messages call the data, where the folder is one of the cache.
        """
        check_choice("split", split, SPLITS)
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction is {val_fraction}; it must lie between 0 and 1")
        blocks = TokenBlocks(Path(folder), length, split, val_fraction, name or str(folder))
        for file, _, expected in blocks.index.files() if check else ():
            if files.sha256(blocks.folder / file) != expected:
                raise ValueError(f"{blocks.folder / file} is damaged: its SHA-256 is wrong; {PREPARE_AGAIN}")
        return blocks

    def __init__(self, folder: Path, length: int | None, split: str, val_fraction: float, name: str) -> None:
        index = Index.read(folder)
        self.folder, self.index, self.tokenizer = folder, index, load_tokenizer(folder)
        self.vocab_size = index.vocab_size
        if self.tokenizer.fingerprint() != index.tokenizer:
            raise ValueError(f"the tokenizer in {folder} does not match its index; {PREPARE_AGAIN}")
        if length is not None and length < 1:
            raise ValueError(f"length is {length}; a block needs 1 token or more")
        own = index.length or length
        if own is None:
            raise ValueError(f"{name} is packed, so it stores no length; give the block length")
        if length is not None and (length < own or (length > own and index.pad is None)):
            allowed = f"{own}, as they have no padding" if index.pad is None else f"{own} or more"
            raise ValueError(f"length is {length}; the records in {name} need {allowed}")
        self.name, self.length = name, length or own
        for file, size, _ in index.files():
            found = (folder / file).stat().st_size if (folder / file).exists() else 0
            if found != size:
                raise ValueError(f"{folder / file} is damaged: it has {found} bytes, not {size}; {PREPARE_AGAIN}")
        self._shards = [np.memmap(folder / shard.name, index.dtype, "r") for shard in index.shards]
        self._ends = np.cumsum([shard.tokens for shard in index.shards])
        self._begins = self._ends - [shard.tokens for shard in index.shards]
        self._starts = np.zeros(0, np.int64)
        if index.packing == "lines":
            lengths = np.fromfile(folder / LENGTHS, "<u4")
            self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            if self._starts[-1] != index.tokens:
                raise ValueError(f"{folder / LENGTHS} is damaged: its lengths do not add up; {PREPARE_AGAIN}")
        self.labels = tuple(index.labels.names) if index.labels else ()
        self._labels = np.fromfile(folder / LABELS, "<u2") if self.labels else None
        packed = index.packing == "packed"
        total = index.tokens // self.length if packed else index.records
        self._split, self._first, self._count, self._total = split, 0, total, total
        if split == "all" and total >= 1:
            return
        if total < 2:
            advice = f"at this size length may be {index.tokens // 2} at most" if packed else "add records"
            raise ValueError(
                f"{name} holds {index.tokens} tokens, {total} blocks of length {self.length}; training and validation "
                f"need one each: {advice}"
            )
        held_out = min(max(1, round(total * val_fraction)), total - 1)
        self._first, self._count = (0, total - held_out) if split == "train" else (total - held_out, held_out)

    def __len__(self) -> int:
        return self._count

    @property
    def padding(self) -> str | None:
        """How records are padded, in a sentence; None if they are not."""
        if self.index.pad is None:
            return None
        what = "with a token that the model learns" if self.index.pad == "model" else "and padding is not learned"
        return f"records shorter than {self.length} tokens are padded, {what} (data.pad={self.index.pad})"

    def text_per_token(self, indices: Int[np.ndarray, " n"] | None = None) -> tuple[float | None, float | None]:
        """Return the characters and bytes per token that counts in the loss, of the split or of some of its blocks.

        None where tokens are integers.
        """
        if isinstance(self.tokenizer, Integers):
            return None, None
        counts = self._split_text if indices is None else self._count_text(self._first + indices)
        tokens, characters, size = counts.tolist()
        return characters / tokens, size / tokens

    @property
    def tokenizer_saw_more(self) -> bool:
        """Whether the tokenizer was fitted to more than this split, from the beginning of the data."""
        seen = self.index.fitted
        return seen is not None and seen > (len(self) if self.index.packing == "lines" else self._split_text[1])

    def bits_per_char(self, nats: float, indices: Int[np.ndarray, " n"] | None = None) -> float | None:
        """Convert nats per token that counts in the loss of the given blocks; None where tokens are no text."""
        characters, _ = self.text_per_token(indices)
        return nats / math.log(2) / characters if characters else None

    @cached_property
    def _split_text(self) -> Int[np.ndarray, " 3"]:
        """Tokens of the split that count in the loss, and the characters and bytes that they encode.

        Only held-out blocks are decoded: the index holds the counts of all text, and training is the difference.
        """
        if self._split == "validation":
            return self._count_text(np.arange(self._first, self._total))
        tokens = self.index.records * self.length if self.index.pad == "model" else self.index.tokens
        counts = np.array([tokens, self.index.characters, self.index.bytes])
        return np.asarray(counts - self._count_text(np.arange(self._count, self._total)))

    def _count_text(self, numbers: Int[np.ndarray, " n"]) -> Int[np.ndarray, " 3"]:
        """Count the tokens of blocks that count in the loss, and the characters and bytes that they decode to."""
        counts = np.zeros(3, np.int64)
        for part in np.array_split(numbers, 1 + len(numbers) * self.length // COUNTED):
            rows, valid = self._read(part)
            text = self.tokenizer.decode_bytes(rows[valid])
            counts += valid.sum(), len(text.decode(errors="surrogateescape")), len(text)
        return counts

    def read(self, indices: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, "n length"], Bool[np.ndarray, "n length"]]:
        """Return the token ids of blocks, and a mask that is False at padding which the loss ignores."""
        if indices.size and not 0 <= indices.min() <= indices.max() < self._count:
            raise ValueError(f"block indices lie in {indices.min()}..{indices.max()}; there are 0..{self._count - 1}")
        return self._read(self._first + indices)

    def _read(self, numbers: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, "n length"], Bool[np.ndarray, "n length"]]:
        """Return what `read` does, by numbers among the blocks of all splits."""
        if self.index.packing == "packed":
            starts, lengths = numbers * self.length, np.full(len(numbers), self.length)
        else:
            starts, lengths = self._starts[numbers], self._starts[numbers + 1] - self._starts[numbers]
        rows = np.zeros((len(numbers), self.length), np.int64)
        shard = np.searchsorted(self._ends[:-1], starts, side="right")
        in_one = starts + lengths <= self._ends[shard]
        for number in np.unique(shard[in_one]).tolist():  # all rows in a shard at once
            chosen, tokens = in_one & (shard == number), self._shards[number]
            offsets = starts[chosen] - self._begins[number]
            rows[chosen] = tokens[np.minimum(offsets[:, None] + np.arange(self.length), len(tokens) - 1)]
        for i in np.flatnonzero(~in_one).tolist():  # one by one those that lie in several
            first, last = (np.maximum(at - self._begins, 0) for at in (starts[i], starts[i] + lengths[i]))
            parts = [tokens[a:b] for tokens, a, b in zip(self._shards, first, last, strict=True)]
            rows[i, : lengths[i]] = np.concatenate(parts)
        valid = np.ones(rows.shape, bool)
        if self.index.packing == "lines":
            inside = np.arange(self.length) < lengths[:, None]
            rows[~inside] = (self.tokenizer.pad or 0) if self.index.pad == "model" else 0
            valid = inside if self.index.pad == "ignore" else valid
        if (top := rows.max(initial=0)) >= self.vocab_size:  # the network's embedding does not check it
            raise ValueError(f"{self.name} holds token {top} of a vocabulary of {self.vocab_size}; {PREPARE_AGAIN}")
        return rows, valid

    def token_counts(self) -> list[int]:
        """Count how often each token of the vocabulary occurs in the split, ignored padding left out."""
        counts = np.zeros(self.vocab_size, np.int64)
        for part in np.array_split(np.arange(len(self)), 1 + len(self) * self.length // COUNTED):
            rows, valid = self.read(part)
            counts += np.bincount(rows[valid], minlength=self.vocab_size)
        return counts.tolist()

    def decode(self) -> list[str]:
        """Return the text of every block."""
        return [self.tokenizer.decode(row) for row in self.read(np.arange(len(self)))[0]]

    def label_ids(self, indices: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return the label index of each block; ``len(labels)`` means no label."""
        if self._labels is None:
            return np.zeros(len(indices), np.int64)
        return np.asarray(np.minimum(self._labels[self._first + indices], len(self.labels), dtype=np.int64))


def block_order(seed: int, start: int, count: int, size: int) -> Int[np.ndarray, " count"]:
    """Return the block indices of the training samples ``start`` … ``start + count − 1``.

    Every epoch visits each of the ``size`` blocks once, in an order that depends on (seed, epoch) alone.
    """
    samples = np.arange(start, start + count)
    indices = np.empty(count, np.int64)
    for epoch in range(start // size, (start + count - 1) // size + 1):
        in_epoch = samples // size == epoch
        indices[in_epoch] = _permutation(seed, epoch, size)[samples[in_epoch] % size]
    return indices


@lru_cache(maxsize=2)  # a batch may lie in two epochs
def _permutation(seed: int, epoch: int, size: int) -> Int[np.ndarray, " size"]:
    """Sort blocks by 64 random bits each: numpy guarantees the stream of Philox, but not of its shuffles."""
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(size)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False  # it is cached
    return order
