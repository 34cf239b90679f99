"""Files of token ids: NumPy arrays, and what Megatron, datatrove and dolma write.

- Megatron: ``NAME.bin``, the ids, and ``NAME.idx``, their dtype and the lengths of sequences and documents.
- datatrove (Nanosets): ``NAME.ds``, the ids, ``NAME.ds.index``, where documents end, and ``NAME.ds.metadata``, whose
  first line ends in the bytes per token.
- dolma: ``NAME.npy``, the ids without the header of NumPy, and ``NAME.csv.gz``, where documents begin and end.

All are little-endian. Their end-of-text tokens are among the ids, which are kept as they are.
"""

import csv
import gzip
import math
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from io import BufferedIOBase
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from sedd.data.tables import short_rows
from sedd.files import read_text
from sedd.tokenizer import Ids

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, entries of the list of documents
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # integers by their codes in an .idx file
BLOCK = 1 << 17  # characters of a list of documents read at a time
LONGEST_DOCUMENT = 1 << 26  # most tokens of a document that is read as one record
Ends = Int[np.ndarray, " documents"]  # where the documents of a file end, in tokens
Rows = tuple[Sequence[Ids], bool]  # consecutive rows of ids, and whether the first continues the row before it


def is_token_file(path: Path) -> bool:
    """Return whether a file was written by Megatron, datatrove or dolma; the latter's arrays have no header."""
    if path.suffix.lower() == ".npy" and path.with_suffix(".csv.gz").is_file():
        with path.open("rb") as file:
            return file.read(6) != b"\x93NUMPY"
    return path.suffix.lower() in (".bin", ".ds")


def companions(path: Path) -> list[Path]:
    """Return the files that describe a file of tokens."""
    stem, kind = path.with_suffix(""), path.suffix.lower()
    names = {".bin": [f"{stem}.idx"], ".ds": [f"{path}.index", f"{path}.metadata"]}.get(kind, [f"{stem}.csv.gz"])
    return [file for file in map(Path, names) if file.is_file()] if is_token_file(path) else []


def read_token_file(path: Path, stream: BufferedIOBase, packing: str, piece: int) -> Iterator[Rows]:
    """Yield the ids of a file, about ``piece`` at a time: as one stream if ``packed``, else a row for each document."""
    dtype, ends = {".bin": _megatron, ".ds": _datatrove, ".npy": _dolma}[path.suffix.lower()](path)
    lengths, total = np.diff(ends, prepend=0), int(ends[-1]) if len(ends) else 0
    if (lengths < 0).any():
        raise ValueError(f"{path} has documents that end before they begin; write its index again")
    size, expected = path.stat().st_size, total * dtype.itemsize
    if size != expected:
        raise ValueError(f"{path} has {size:,} bytes, and its index describes {expected:,}; copy both files again")

    def take(count: int) -> Ids:
        content = stream.read(count * dtype.itemsize)
        if len(content) != count * dtype.itemsize:
            raise EOFError("it ends before its last token")
        return np.frombuffer(content, dtype).astype(np.int64)

    if packing == "packed":
        for start in range(0, total, piece):
            yield [take(min(piece, total - start))], start > 0
        return
    if (lengths > LONGEST_DOCUMENT).any():
        raise ValueError(f"{path} has a document of {lengths.max()} tokens; read it with packing packed")
    for _, group in groupby(zip(lengths.tolist(), (ends // piece).tolist(), strict=True), itemgetter(1)):
        if rows := [take(length) for length, _ in group if length]:
            yield rows, False


def _megatron(path: Path) -> tuple[np.dtype[Any], Ends]:
    index = path.with_suffix(".idx")
    if not index.is_file():
        raise ValueError(f"{path} has no {index.name} beside it, which holds the dtype of its tokens; copy it there")
    content = np.memmap(index, np.uint8, "r") if index.stat().st_size >= HEADER.size else np.zeros(0, np.uint8)
    magic, version, code, sequences, entries = HEADER.unpack(bytes(content[: HEADER.size]).ljust(HEADER.size, b"\0"))
    if magic != MAGIC or version != 1:
        raise ValueError(f"{index} is not an index of Megatron, version 1; name files that its preprocessing wrote")
    if code not in DTYPES:
        raise ValueError(f"{index} has the dtype code {code}; those of integers are {', '.join(map(str, DTYPES))}")
    needed = HEADER.size + 12 * sequences + 8 * entries
    if len(content) not in (needed, needed + sequences):  # one more byte each where there are modes
        raise ValueError(f"{index} has {len(content):,} bytes, and its header describes {needed:,}; copy it again")
    dtype, at = np.dtype(DTYPES[code]), HEADER.size
    lengths = content[at : at + 4 * sequences].view("<i4")
    pointers = content[at + 4 * sequences : at + 12 * sequences].view("<i8")
    documents = content[at + 12 * sequences : needed].view("<i8")
    ends = np.cumsum(lengths, dtype=np.int64)
    if (lengths < 0).any() or not np.array_equal(pointers, (ends - lengths) * dtype.itemsize):
        raise ValueError(f"{index} has sequences that are not stored one after the other; write the files again")
    if not entries or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise ValueError(f"{index} has documents that do not cover sequences 0 to {sequences}; write the files again")
    return dtype, np.concatenate([[0], ends])[documents[1:]]


def _datatrove(path: Path) -> tuple[np.dtype[Any], Ends]:
    index, metadata = (path.with_name(f"{path.name}.{name}") for name in ("index", "metadata"))
    if not index.is_file() or index.stat().st_size % 8:
        raise ValueError(f"{path} has no {index.name} beside it that lists where documents end; copy it there")
    ends = np.fromfile(index, "<u8")
    total, size = int(ends[-1]) if len(ends) else 0, path.stat().st_size
    width = read_text(metadata).split("\n")[0].rpartition("|")[2].strip() if metadata.is_file() else ""
    width = width or ("4" if total and size == 4 * total else "2")  # older versions do not write it
    if width not in ("2", "4"):
        raise ValueError(f"{metadata} has {width[:20]!r} bytes per token; datatrove writes 2 or 4")
    if (ends > size).any():
        raise ValueError(f"{index} has a document that ends after the {size:,} bytes of {path.name}; copy both again")
    return np.dtype(f"<u{width}"), ends.astype(np.int64)


def _dolma(path: Path) -> tuple[np.dtype[Any], Ends]:
    table, ends, size = path.with_suffix(".csv.gz"), array("q", [0]), path.stat().st_size
    try:
        with gzip.open(table, "rt", encoding="utf-8", newline="") as text:
            for number, row in enumerate(short_rows(table, iter(partial(text.readline, BLOCK), "")), 1):
                if number > size:
                    raise ValueError(f"it has more documents than {path.name} has bytes")
                if len(row) < 2 or row[0] != str(ends[-1]) or not row[1].isdecimal():
                    raise ValueError(f"line {number} does not begin with {ends[-1]}, the end of the document before it")
                ends.append(int(row[1]))
    except (OSError, EOFError, OverflowError, ValueError, csv.Error, zlib.error) as error:
        raise ValueError(f"{table} cannot be read as dolma's list of documents: {error}; copy it again") from None
    return np.dtype("<u4" if size == 4 * ends[-1] else "<u2"), np.array(ends[1:], np.int64)


def read_array(path: Path, stream: BufferedIOBase, packing: str, piece: int) -> Iterator[Rows]:
    """Yield the integers of a NumPy array: one-dimensional, it is one document; two-dimensional, a record per row."""
    try:
        version = np.lib.format.read_magic(stream)
        read_header = getattr(np.lib.format, f"read_array_header_{1 if version == (1, 0) else 2}_0")
        shape, fortran_order, dtype = read_header(stream)
    except Exception as error:  # damaged bytes may raise anything: the header is Python's syntax
        raise ValueError(f"{path} is not an .npy file: {error}") from None
    if dtype.kind not in "iu" or len(shape) not in (1, 2):
        raise ValueError(f"{path} holds {dtype} of shape {shape}; it must hold integers in one or two dimensions")
    if fortran_order and len(shape) == 2:
        raise ValueError(f"{path} is stored column by column; save it again with numpy.ascontiguousarray")
    width = shape[1] if len(shape) == 2 else 1
    if min(shape) < 0 or width > LONGEST_DOCUMENT:
        raise ValueError(f"{path} has the shape {shape}; rows have {LONGEST_DOCUMENT:,} integers or fewer")
    step = max(1, piece // max(1, width)) * width * dtype.itemsize
    left, continues = math.prod(shape) * dtype.itemsize, False
    while left:
        block = stream.read(min(step, left))
        if not block:
            raise EOFError(f"{left} bytes are missing at its end")
        left -= len(block)
        row = np.frombuffer(block, dtype).astype(np.int64)
        yield list(row.reshape(-1, width)) if len(shape) == 2 else [row], continues
        continues = len(shape) == 1


def holds_ids(files: Sequence[Path]) -> bool:
    """Return whether some of these files hold token ids, and no text."""
    return any(is_token_file(file) or ".npy" in file.suffixes[-2:] for file in files)


def refuse_fitting(files: Sequence[Path], tokenizer: str) -> None:
    """Reject a tokenizer to be fitted to files of token ids, which need the one that made them."""
    name, _, size = tokenizer.partition(":")
    if (name == "chars" or (name == "bpe" and size)) and holds_ids(files):
        raise ValueError(f"{files[0]} holds token ids; name their tokenizer.json, or their number as in ints:50257")
