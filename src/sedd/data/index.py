"""The index of a prepared dataset: its contents and their SHA-256 hashes."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from sedd import files
from sedd.schema import from_dict

FORMAT = 2
INDEX = "index.json"
LENGTHS = "lengths.bin"
LABELS = "labels.bin"
WIDTHS = {"<u2": 2, "<u4": 4}  # bytes of a token id of each dtype


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
            index._check_values()
        except OSError as error:
            raise ValueError(f"{folder} is not a prepared dataset ({error.strerror}); run sedd data prepare") from None
        except (ValueError, TypeError) as error:  # a TypeError: of a missing field
            raise ValueError(f"{path} is damaged: {error}; remove the folder and prepare the data again") from None
        return index

    def _check_values(self) -> None:
        """Reject values that contradict each other, or that `prepare` never writes."""
        sizes = [shard.tokens for shard in self.shards]
        is_packed = self.packing == "packed"
        if (
            self.dtype not in WIDTHS
            or self.packing not in ("packed", "lines")
            or self.pad not in (None, "model", "ignore")
            or min(self.tokens, self.records, self.characters, self.bytes, *sizes) < 0
            or not 1 <= self.vocab_size < 2**32
            or sum(sizes) != self.tokens
            or [shard.name for shard in self.shards] != list(map(shard_name, range(len(sizes))))
            or (self.lengths is None) != is_packed
            or (self.length is None) != is_packed
            or (self.length or 1) < 1
        ):
            raise ValueError("its values contradict each other")

    def content_hash(self) -> str:
        """Return the SHA-256 of all other fields, which include the hashes of the shards and so cover every token."""
        return hashlib.sha256(json.dumps({**self._plain(), "sha256": ""}, sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write index.json into ``folder``."""
        files.write_text(folder / INDEX, json.dumps(self._plain(), indent=1) + "\n")

    def files(self) -> Iterator[tuple[str, int, str]]:
        """Yield the name, the size in bytes and the SHA-256 of each file."""
        for shard in self.shards:
            yield shard.name, WIDTHS[self.dtype] * shard.tokens, shard.sha256
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
