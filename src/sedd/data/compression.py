"""Transparent decompression of .gz, .xz, .bz2 and .zst files."""

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

BLOCK = 1 << 17  # bytes read at a time
ZSTD_BLOCK = 1 << 12  # a frame has a block of 128 KiB in as little as 4 bytes, and the library decompresses all it gets
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")


def open_decompressed(file: Path, raw: BufferedReader) -> contextlib.AbstractContextManager[BufferedIOBase]:
    """Decompress ``raw`` according to the file name's ending; a file that is not compressed passes through."""
    match file.suffix.lower():
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".bz2":
            return bz2.BZ2File(raw)
        case ".zst":
            return BufferedReader(_Zstd(raw, import_optional("zstandard", str(file))), BLOCK)
    return contextlib.nullcontext(raw)


@final
class _Zstd(io.RawIOBase):
    """A stream of zstd frames that raises EOFError on a truncated file; the library's own reader does not."""

    def __init__(self, raw: BufferedIOBase, library: Any) -> None:
        self.raw, self.library = raw, library
        self.frame: Any = None
        self.unused, self.ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            block = self.unused or self.raw.read(ZSTD_BLOCK)
            if not block:
                if self.frame is not None:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self.frame = self.frame or self.library.ZstdDecompressor().decompressobj()
            try:
                self.ready = memoryview(self.frame.decompress(block))
            except self.library.ZstdError as error:
                raise EOFError(str(error)) from None
            self.unused = self.frame.unused_data
            if self.frame.eof:
                self.frame = None
        part, self.ready = self.ready[: len(buffer)], self.ready[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def import_optional(module: str, source: str) -> Any:
    """Import a package of the extra `data`, or raise ValueError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"{source} needs the package {module.partition('.')[0]}; install it: {install_hint('data')}"
        ) from None


@contextlib.contextmanager
def make_seekable(file: Path, stream: BufferedIOBase) -> Iterator[BufferedIOBase]:
    """Yield a stream that can seek: the file itself, or a temporary decompressed copy."""
    if file.suffix.lower() not in COMPRESSED:
        yield stream
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy, BLOCK)
        copy.seek(0)
        yield copy
