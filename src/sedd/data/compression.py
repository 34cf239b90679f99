"""Compressed files, as the bytes that are inside them."""

import bz2
import contextlib
import gzip
import importlib
import io
import lzma
import shutil
import tempfile
from collections.abc import Iterator
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import Any, final

from sedd.extras import install_hint

BLOCK = 1 << 17  # bytes at a time
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")


def decompressed(file: Path, raw: BufferedReader) -> contextlib.AbstractContextManager[BufferedIOBase]:
    """What the ending of ``file`` says is inside ``raw``."""
    match file.suffix.lower():
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".bz2":
            return bz2.BZ2File(raw)
        case ".zst":
            return BufferedReader(_Zstd(raw, extra("zstandard", str(file))), BLOCK)
    return contextlib.nullcontext(raw)


@final
class _Zstd(io.RawIOBase):
    """The frames of a file, one after another; the library's own reader takes a file cut short for a whole one."""

    def __init__(self, raw: BufferedIOBase, library: Any) -> None:
        self.raw, self.library = raw, library
        self.frame: Any = None
        self.unused = self.ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            block = self.unused or self.raw.read(BLOCK)
            if not block:
                if self.frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            self.frame = self.frame or self.library.ZstdDecompressor().decompressobj()
            try:
                self.ready = self.frame.decompress(block)
            except self.library.ZstdError as error:
                raise EOFError(str(error)) from None
            self.unused = self.frame.unused_data
            if self.frame.eof:
                self.frame = None
        now, self.ready = self.ready[: len(buffer)], self.ready[len(buffer) :]
        buffer[: len(now)] = now
        return len(now)


def extra(module: str, source: str) -> Any:
    """A package that not everybody needs, or a sentence."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"{source} needs the package {module.partition('.')[0]}; install it: {install_hint('data')}"
        ) from None


@contextlib.contextmanager
def seekable(file: Path, stream: BufferedIOBase) -> Iterator[BufferedIOBase]:
    """The file itself, or a temporary copy of what is compressed in it."""
    if file.suffix.lower() not in COMPRESSED:
        yield stream
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy, BLOCK)
        copy.seek(0)
        yield copy
