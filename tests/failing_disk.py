"""A disk that fails: one call of those that write to it raises an error, or all from one on, as when it is full."""

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

CALLS = ("fsync", "ftruncate", "fchmod", "mkdir", "rename", "replace", "write")
"""Functions of `os` that write; removals go on, as they do on a full disk."""


class Disk:
    """Counts the calls that write, and fails the one numbered ``failing``, from 0, and if ``lasting`` all after it."""

    def __init__(self, failing: int, error: int, lasting: bool) -> None:
        self.failing, self.error, self.lasting, self.calls = failing, error, lasting, 0

    @property
    def has_failed(self) -> bool:
        return self.calls > self.failing

    def use(self) -> None:
        """Count a call, and raise the error if it fails."""
        self.calls += 1
        if self.calls == self.failing + 1 or (self.lasting and self.has_failed):
            raise OSError(self.error, os.strerror(self.error))

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.use()
            return function(*arguments, **options)

        return call


class _File(io.FileIO):
    """A file whose writes, truncations and end count; a write that fails has written half."""

    disk: Disk

    def write(self, content: Any) -> int:
        try:
            self.disk.use()
        except OSError:
            super().write(memoryview(content)[: len(content) // 2])
            raise
        return super().write(content)

    def truncate(self, size: int | None = None) -> int:
        self.disk.use()
        return super().truncate(size)

    def close(self) -> None:
        was_open = not self.closed
        super().close()
        if was_open and hasattr(self, "disk"):
            self.disk.use()


@contextmanager
def failing(number: int, error: int = errno.EIO, lasting: bool = False) -> Iterator[Disk]:
    """Fail the write with this number, from 0, of those within, and yield the disk that counts them."""
    disk, plain_open, plain_save = Disk(number, error, lasting), io.open, safetensors.torch.save_file

    def open(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+"):
            return plain_open(file, mode, buffering, *rest, **options)
        disk.use()
        raw = _File(file, mode.replace("b", "").replace("t", ""))
        raw.disk = disk
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, *rest, **options)

    def save_file(tensors: Any, path: Path, metadata: Any = None) -> None:
        content = safetensors.torch.save(tensors, metadata)
        with open(path, "wb") as file:  # the library writes in Rust
            file.write(content)

    with pytest.MonkeyPatch.context() as patches:
        for name in CALLS:
            patches.setattr(os, name, disk.wrap(getattr(os, name)))
        for place, name in ((io, "open"), (builtins, "open")):
            patches.setattr(place, name, open)
        assert plain_save
        patches.setattr(safetensors.torch, "save_file", save_file)
        yield disk
