"""The index of a prepared dataset: its contents and their SHA-256 hashes."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple, final

from sedd.files import read_json
from sedd.schema import check_fields

FORMAT = 2
INDEX = "index.json"
LENGTHS = "lengths.bin"
LABELS = "labels.bin"
DTYPES = ("<u2", "<u4")
FIELD_TYPES: dict[str, Any] = {
    **dict.fromkeys(("format", "vocab_size", "tokens", "records", "characters", "bytes"), int),
    **dict.fromkeys(("packing", "dtype", "tokenizer", "sha256"), str),
    **dict.fromkeys(("pad", "lengths"), str | None),
    "length": int | None,
    "shards": list[dict[str, Any]],
    "labels": dict[str, Any] | None,
    "fitted": int | None,
}
OPTIONAL = {"labels", "fitted"}
SHARD_TYPES = {"name": str, "tokens": int, "sha256": str}
LABEL_TYPES = {"names": list[str], "sha256": str}
PREPARE_AGAIN = "remove the folder and prepare the data again"


@final
class Shard(NamedTuple):
    """A file of token ids."""

    name: str
    tokens: int
    sha256: str


@final
class Labels(NamedTuple):
    """The label names of a dataset; each record stores the index of its label."""

    names: tuple[str, ...]
    sha256: str  # of labels.bin


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
    shards: tuple[Shard, ...]
    lengths: str | None  # SHA-256 of lengths.bin; None if packed
    sha256: str  # of all other fields
    labels: Labels | None = None  # not stored if there are none
    fitted: int | None = None  # characters, or of lines records, that the tokenizer was fitted to; not stored if all

    @staticmethod
    def read(folder: Path) -> "Index":
        """Read the index of ``folder`` and check its hash."""
        path = folder / INDEX
        try:
            found = read_json(path)
            if isinstance(found, dict) and found.get("format") != FORMAT:
                raise ValueError(f"its format is {found.get('format')}, and this version reads format {FORMAT}")
            _check_types(found)
            shards = tuple(Shard(**shard) for shard in found["shards"])
            labels = Labels(tuple(found["labels"]["names"]), found["labels"]["sha256"]) if "labels" in found else None
            index = Index(**{**found, "shards": shards, "labels": labels})
        except OSError as error:
            raise ValueError(
                f"{folder} is not a prepared dataset ({INDEX}: {error.strerror}); make it with sedd data prepare"
            ) from None
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged: {error}; {PREPARE_AGAIN}") from None
        if index.sha256 != index.content_hash():
            raise ValueError(f"{path} is damaged: its SHA-256 does not match; {PREPARE_AGAIN}")
        try:
            _check_values(index)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}; {PREPARE_AGAIN}") from None
        return index

    def content_hash(self) -> str:
        """Return the SHA-256 of all other fields, which include the hashes of the shards and so cover every token."""
        return hashlib.sha256(json.dumps({**self._plain(), "sha256": ""}, sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write index.json into ``folder``."""
        with (folder / INDEX).open("wb") as file:
            file.write((json.dumps(self._plain(), indent=1) + "\n").encode())
            close_durably(file)

    def _plain(self) -> dict[str, Any]:
        plain = {**asdict(self), "shards": [shard._asdict() for shard in self.shards]}
        plain |= {"labels": self.labels._asdict()} if self.labels else {}
        return {name: value for name, value in plain.items() if value is not None or name not in OPTIONAL}


def shard_name(number: int) -> str:
    """Return the name of the file of a shard."""
    return f"tokens-{number:05d}.bin"


def _check_types(found: Any) -> None:
    """Refuse an index with fields of other types than `prepare` writes: its author may be anyone."""
    check_fields("it", found, FIELD_TYPES, required=set(FIELD_TYPES) - OPTIONAL, closed=True)
    for shard in found["shards"]:
        check_fields("a shard", shard, SHARD_TYPES, required=SHARD_TYPES, closed=True)
    if found.get("labels") is not None:
        check_fields(
            "labels", found["labels"], {"names": list[str], "sha256": str}, required=("names", "sha256"), closed=True
        )


def _check_values(index: "Index") -> None:
    """Refuse values that contradict each other, or that `prepare` never writes."""
    names = [shard.name for shard in index.shards]
    if names != [shard_name(number) for number in range(len(names))]:
        raise ValueError(f"its shards are {', '.join(names)[:80]!r}; they are called {shard_name(0)!r} and so on")
    sizes = [shard.tokens for shard in index.shards]
    is_packed = index.packing == "packed"
    if (
        index.dtype not in DTYPES
        or index.packing not in ("packed", "lines")
        or index.pad not in (None, "model", "ignore")
        or min(index.tokens, index.records, index.characters, index.bytes, *sizes) < 0
        or not 1 <= index.vocab_size < 2**32
        or sum(sizes) != index.tokens
        or (index.lengths is None) != is_packed
        or (index.length is None) != is_packed
        or (index.length or 1) < 1
    ):
        raise ValueError("its values contradict each other")


def is_prepared(folder: str | Path) -> bool:
    """Return whether ``folder`` was written by `prepare`."""
    return (Path(folder) / INDEX).is_file()


def close_durably(file: BufferedIOBase) -> None:
    """Flush a file to disk (fsync) and close it."""
    with file:
        file.flush()
        os.fsync(file.fileno())
