"""The cache on disk: prepared data and converted models. No torch here."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

KINDS = ("data", "models")  # corpora as token ids, and published checkpoints in our layout; both can be made again


class CacheEntry(NamedTuple):
    """A folder of the cache."""

    kind: str
    path: Path
    bytes: int


def cache_folder() -> Path:
    """Return the folder of the cache: ``SEDD_CACHE``, by default ``~/.cache/sedd``."""
    return Path(os.environ.get("SEDD_CACHE") or Path.home() / ".cache" / "sedd")


def cache_entries() -> Iterator[CacheEntry]:
    """Yield the finished folders of the cache; those that a process is writing are hidden."""
    for kind in KINDS:
        for path in sorted((cache_folder() / kind).glob("[!.]*/")):
            yield CacheEntry(kind, path, sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))


def clear_cache() -> list[CacheEntry]:
    """Remove all entries, and return them. A run that reads one keeps what it has opened."""
    entries = list(cache_entries())
    for entry in entries:
        try:
            shutil.rmtree(entry.path)
        except OSError as error:
            raise ValueError(f"{entry.path} could not be removed: {error.strerror or error}") from None
    return entries
