"""Transparent decompression of .gz, .xz, .bz2 and .zst files."""

import bz2
import gzip
import importlib
import lzma
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import Any

from sedd.extras import install_hint

OPENERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
COMPRESSED = (*OPENERS, ".zst")


def open_decompressed(file: Path, raw: BufferedReader) -> AbstractContextManager[BufferedIOBase]:
    """Decompress ``raw`` according to the file name's ending; a file that is not compressed passes through."""
    suffix = file.suffix.lower()
    opened: AbstractContextManager[BufferedIOBase] = nullcontext(raw)
    if suffix == ".zst":  # Arrow notices a truncated file, which the reader of the library zstandard does not
        opened = import_optional("pyarrow", str(file)).input_stream(raw, compression="zstd")
    elif suffix in OPENERS:
        opened = OPENERS[suffix](raw)
    return opened


def import_optional(module: str, source: str) -> Any:
    """Import a package of the extra `data`, or raise ValueError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ValueError(f"{source} needs the package {package}; install it: {install_hint('data')}") from None
