"""The index of prepared data: what the folder holds, and the hashes of it."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple, final

FORMAT = 1
INDEX = "index.json"
LENGTHS = "lengths.bin"
LABELS = "labels.bin"
AGAIN = "remove the folder and prepare the data again"


@final
class Shard(NamedTuple):
    """A file of tokens."""

    name: str
    tokens: int
    sha256: str


@final
class Labels(NamedTuple):
    """What records are, each by a number."""

    names: tuple[str, ...]
    sha256: str  # of the numbers of the records


@final
@dataclass(frozen=True)
class Index:
    """What a prepared folder holds."""

    format: int
    mode: str  # packed: one stream; lines: records one after another, and their lengths
    dtype: str
    vocab_size: int
    tokens: int  # in the shards: end-of-text counts, padding is not stored
    records: int  # documents where packed
    characters: int
    bytes: int
    length: int | None  # of a record with its padding; None where packed
    pad: str | None  # model, ignore, or None where nothing is padded
    tokenizer: str  # its fingerprint
    shards: tuple[Shard, ...]
    lengths: str | None  # SHA-256 of the lengths of the records; None where packed
    sha256: str  # of all else
    labels: Labels | None = None  # not written where there are none

    @staticmethod
    def read(folder: Path) -> "Index":
        """The index of ``folder``."""
        path = folder / INDEX
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise ValueError(f"it is of format {found['format']}, and this version reads {FORMAT}")
            shards = tuple(Shard(**shard) for shard in found["shards"])
            labels = Labels(tuple(found["labels"]["names"]), found["labels"]["sha256"]) if "labels" in found else None
            index = Index(**{**found, "shards": shards, "labels": labels})
        except OSError as error:
            raise ValueError(
                f"{folder} is no prepared data ({INDEX}: {error.strerror}); make it with sedd data prepare"
            ) from None
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged: {error}; {AGAIN}") from None
        if index.sha256 != index.content():
            raise ValueError(f"{path} is damaged: it does not have its own SHA-256; {AGAIN}")
        return index

    def content(self) -> str:
        """SHA-256 of everything it says but this, and so, through the shards', of all tokens."""
        return hashlib.sha256(json.dumps({**self._plain(), "sha256": ""}, sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write it into ``folder``."""
        with (folder / INDEX).open("wb") as file:
            file.write((json.dumps(self._plain(), indent=1) + "\n").encode())
            settle(file)

    def _plain(self) -> dict[str, Any]:
        plain = {**asdict(self), "shards": [shard._asdict() for shard in self.shards]}
        del plain["labels"]
        return plain if self.labels is None else {**plain, "labels": self.labels._asdict()}


def is_prepared(folder: str | Path) -> bool:
    """Whether `prepare` made this folder."""
    return (Path(folder) / INDEX).is_file()


def settle(file: BufferedIOBase) -> None:
    """Close a file when its content has reached the disk."""
    with file:
        file.flush()
        os.fsync(file.fileno())
