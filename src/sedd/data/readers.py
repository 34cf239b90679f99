"""Reading: files, folders and data sets of the Hub become texts, a piece at a time."""

import codecs
import contextlib
import csv
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from sedd.data.compression import COMPRESSED, decompressed, extra, seekable
from sedd.tokenizer import Ids

PIECE = 1 << 18  # bytes read, and characters encoded, at a time; four times as many take a BPE twice the memory
LONGEST_LINE = 1 << 26

KINDS = (".txt", ".tokens", ".jsonl", ".csv", ".parquet", ".npy")
TABLES = (".jsonl", ".csv", ".parquet")
OBVIOUS = ("text", "content", "document", "sentence", "smiles", "selfies", "sequence", "seq")  # column names

Text = str | Ids
Row = tuple[str | None, str | None]  # a text and its label


@final
class Group(NamedTuple):
    """Neighbouring texts."""

    texts: Sequence[Text]
    continues: bool = False  # the first goes on with the document before
    labels: Sequence[str | None] = ()  # where they were asked for


@final
class Source(NamedTuple):
    """What was named, and the files it stands for; a data set of the Hub has none."""

    name: str
    files: tuple[Path, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.files)


@final
class Chunk(NamedTuple):
    """Neighbouring texts of one file, about a piece of it."""

    source: str
    first: int  # the number of the first text among the records of the file, from 1
    texts: Sequence[Text]
    continues: bool  # the first text goes on with the document of the chunk before
    done: int  # bytes of all sources read by then
    labels: Sequence[str | None] = ()  # of the texts, where they were asked for


def documents(sources: Sequence[str | Path], column: str | None = None, records: str = "packed") -> Iterator[str]:
    """The texts of ``sources`` in order, long files in pieces: what a tokenizer is fitted to."""
    for chunk in chunks(expand(sources), column, records):
        for text in chunk.texts:
            yield text if isinstance(text, str) else " ".join(map(str, text.tolist()))


def expand(sources: Sequence[str | Path]) -> list[Source]:
    """Each source with its files, those of a folder in the order of their paths."""
    if not sources:
        raise ValueError(f"no source was given; name files ({', '.join(KINDS)}), folders, or hf:NAME")
    return [Source(str(source), tuple(_files(source))) for source in sources]


def several(sources: Sequence[Source]) -> bool:
    """Whether there may be more than one document."""
    files = [file for source in sources for file in source.files]
    return len(files) != 1 or _kind(files[0]) in TABLES


def chunks(sources: Sequence[Source], column: str | None, records: str, label: str | None = None) -> Iterator[Chunk]:
    """The texts of ``sources`` in order; of a text file its ``lines``, or pieces of it to be ``packed``.

    ``label`` is the column of a table that holds the texts' labels.
    """
    done = 0
    for source in sources:
        empty = True
        hub = source.name.startswith("hf:")
        for chunk in _hub(source.name, column, label) if hub else _local(source.files, column, records, label):
            empty = False
            yield chunk._replace(done=done + chunk.done)
        if empty:
            raise ValueError(f"{source.name} holds no text; name a source that does")
        done += source.size


def _files(source: str | Path) -> list[Path]:
    if str(source).startswith("hf:"):
        return []
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) in KINDS)
        if not files:
            raise ValueError(f"the folder {path} holds no file that ends in {', '.join(KINDS)}; name one that does")
        return files
    if not path.exists():
        raise ValueError(f"{path} does not exist; name a file, a folder, or hf:NAME for a Hugging Face data set")
    if _kind(path) not in (*KINDS, ""):
        raise ValueError(
            f"{path} ends in {_kind(path)}; known are {', '.join(KINDS)}, "
            f"also followed by {', '.join(COMPRESSED)}, and text without an ending"
        )
    return [path]


def _kind(path: Path) -> str:
    """The ending that says what is inside, below that of a compression."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()


def _local(files: Sequence[Path], column: str | None, records: str, label: str | None) -> Iterator[Chunk]:
    done = 0
    for file in files:
        with _sentences_for(file), file.open("rb") as raw, decompressed(file, raw) as stream:
            first = 1
            for texts, continues, labels in _texts(file, stream, column, records, label):
                yield Chunk(str(file), first, texts, continues, done + raw.tell(), labels)
                first += len(texts)
        done += file.stat().st_size


def _hub(name: str, column: str | None, label: str | None) -> Iterator[Chunk]:
    first = 1
    for texts, continues, labels in _grouped(_column_of_rows(name, _hub_rows(name), column, label), label):
        yield Chunk(name, first, texts, continues, 0, labels)
        first += len(texts)


def _hub_rows(name: str) -> Iterator[dict[str, Any]]:
    datasets = extra("datasets", name)
    path, _, split = name.removeprefix("hf:").partition(":")
    try:
        yield from datasets.load_dataset(path, split=split or "train", streaming=True)
    except Exception as error:  # network, names, scripts: the library raises anything, at the start and later
        raise ValueError(f"{name} could not be loaded: {error}") from None


@contextlib.contextmanager
def _sentences_for(file: Path) -> Iterator[None]:
    """What the readers of a file raise, as a sentence that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f"{file} is not UTF-8 text (it holds the byte 0x{byte:02x}); convert it, or name a text file"
        ) from None
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise ValueError(f"{file} could not be read: {error}; it may be damaged") from None


def _texts(file: Path, stream: BufferedIOBase, column: str | None, records: str, label: str | None) -> Iterator[Group]:
    kind = _kind(file)
    for name, wanted in (("column", column), ("label", label)):
        if kind not in TABLES and wanted is not None:
            raise ValueError(f"{name} is {wanted!r}, but {file} has no columns; leave it out, or give a table")
    match kind:
        case ".jsonl":
            return _grouped(_column_of_rows(str(file), _json_rows(file, stream), column, label), label)
        case ".csv":
            return _grouped(_csv_texts(file, stream, column, label), label)
        case ".parquet":
            return _grouped(_parquet_texts(file, stream, column, label), label)
        case ".npy":
            return _arrays(file, stream)
    return _lines(file, stream) if records == "lines" else _pieces(file, stream)


def _grouped(rows: Iterator[Row], label: str | None) -> Iterator[Group]:
    """Texts that are there, a piece at a time."""
    group: list[str] = []
    labels: list[str | None] = []
    size = 0
    for text, known in rows:
        if text:
            group.append(text)
            labels += [] if label is None else [known]
            size += len(text)
        if size >= PIECE:
            yield Group(group, labels=labels)
            group, labels, size = [], [], 0
    if group:
        yield Group(group, labels=labels)


def _decoded(file: Path, stream: BufferedIOBase) -> Iterator[str]:
    """The text of a file, piece by piece; a character is never cut."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    while block := stream.read(PIECE):
        if 0 in block:
            raise ValueError(f"{file} holds zero bytes and is not text; name a text file, or .npy for integers")
        if text := decoder.decode(block):
            yield text
    decoder.decode(b"", final=True)  # refuses a file that ends inside a character


def _pieces(file: Path, stream: BufferedIOBase) -> Iterator[Group]:
    """One document in pieces that join to it."""
    rest, continues = "", False
    for text in _decoded(file, stream):
        if rest:
            cut = _cut(rest)
            yield Group([rest[:cut]], continues)
            rest, continues = rest[cut:], True
        rest += text
    if rest:
        yield Group([rest], continues)


def _cut(text: str) -> int:
    """Where to cut so that tokenizers hardly notice: after a line end between words, else before a space, else last."""
    at = text.rfind("\n", 1, -1)
    while at > 0:
        if not (text[at - 1].isspace() or text[at + 1].isspace()):
            return at + 1
        at = text.rfind("\n", 1, at)
    at = text.rfind(" ", 1)
    return at if at > 0 else len(text)


def _lines(file: Path, stream: BufferedIOBase) -> Iterator[Group]:
    """A record a line; empty lines are none."""
    for group in _whole_lines(file, stream):
        if kept := [text for line in group if (text := line.removesuffix("\n").removesuffix("\r"))]:
            yield Group(kept)


def _whole_lines(file: Path, stream: BufferedIOBase) -> Iterator[list[str]]:
    """All lines with their ends, a piece at a time."""
    rest = ""
    for text in _decoded(file, stream):
        *whole, rest = (rest + text).split("\n")
        if len(rest) > LONGEST_LINE:
            raise ValueError(f"{file} has a line of more than {LONGEST_LINE} characters; pack it as one text, as .txt")
        yield [line + "\n" for line in whole]
    if rest:
        yield [rest]


def _json_rows(file: Path, stream: BufferedIOBase) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(chain.from_iterable(_whole_lines(file, stream)), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {file} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of {file} is a {type(row).__name__}; each line must be an object")
        yield row


def _column_of_rows(
    source: str, rows: Iterator[dict[str, Any]], column: str | None, label: str | None
) -> Iterator[Row]:
    head = list(islice(rows, 1))
    if not head:
        return
    _check_label(source, list(head[0]), label)
    strings = [key for key, value in head[0].items() if isinstance(value, str) and key != label]
    chosen = _choose_column(source, list(head[0]), strings, column)
    for number, row in enumerate(chain(head, rows), 1):
        text = row.get(chosen)
        if text is not None and not isinstance(text, str):
            raise ValueError(f"record {number} of {source} has a {type(text).__name__} as {chosen!r}; it must be text")
        yield text, None if label is None else _label(row.get(label), f"record {number} of {source}", label)


def _csv_texts(file: Path, stream: BufferedIOBase, column: str | None, label: str | None) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_LINE)  # Python's own is 128 KiB, less than a long document
    try:
        rows = csv.reader(chain.from_iterable(_whole_lines(file, stream)), strict=True)
        header = next(rows, [])
        head = list(islice(rows, 1))
        if not head:
            return
        _check_label(str(file), header, label)
        named = zip(header, head[0], strict=False)
        words = [name for name, value in named if name != label and not _is_number(value)]
        at = header.index(_choose_column(str(file), header, words, column))
        known = len(header) if label is None else header.index(label)
        for row in chain(head, rows):
            yield row[at] if at < len(row) else None, (row[known] or None) if known < len(row) else None
    except csv.Error as error:
        raise ValueError(f"{file} is no CSV: {error}") from None


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _choose_column(source: str, columns: list[str], strings: list[str], wanted: str | None) -> str:
    """The column that was asked for, or the one that can only be meant."""
    if wanted is not None:
        if wanted not in columns:
            raise ValueError(f"column is {wanted!r}; {source} has {', '.join(columns)}")
        return wanted
    obvious = [name for known in OBVIOUS for name in strings if name.lower() == known]
    if obvious or len(strings) == 1:
        return (obvious or strings)[0]
    raise ValueError(f"{source} has the columns {', '.join(columns)}; say which one is the text with column")


def _check_label(source: str, columns: list[str], label: str | None) -> None:
    if label is not None and label not in columns:
        raise ValueError(f"label is {label!r}; {source} has the columns {', '.join(columns)}")


def _label(value: Any, where: str, label: str) -> str | None:
    """A label as text; nothing is none."""
    if value is not None and not isinstance(value, str | int):
        raise ValueError(f"{where} has a {type(value).__name__} as {label!r}; a label is text or a whole number")
    return None if value is None else str(value) or None


def _parquet_texts(file: Path, stream: BufferedIOBase, column: str | None, label: str | None) -> Iterator[Row]:
    parquet = extra("pyarrow.parquet", str(file))
    pyarrow = extra("pyarrow", str(file))
    with seekable(file, stream) as table:
        try:
            found = parquet.ParquetFile(table)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{file} is no Parquet file: {error}") from None
        schema = found.schema_arrow
        _check_label(str(file), schema.names, label)
        texts = [field.name for field in schema if str(field.type) in ("string", "large_string")]
        chosen = _choose_column(str(file), schema.names, [name for name in texts if name != label], column)
        if chosen not in texts:
            raise ValueError(f"column {chosen!r} of {file} is of type {schema.field(chosen).type}; it must be text")
        for batch in found.iter_batches(batch_size=1024, columns=list({chosen, label or chosen})):
            for row in batch.to_pylist():
                yield row[chosen], None if label is None else _label(row[label], str(file), label)


def _arrays(file: Path, stream: BufferedIOBase) -> Iterator[Group]:
    """Integers: a row is one long document, a table has a record a row."""
    with seekable(file, stream) as plain:
        try:
            version = np.lib.format.read_magic(plain)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, by_column, dtype = read(plain)
        except ValueError as error:
            raise ValueError(f"{file} is no .npy file: {error}") from None
        if dtype.kind not in "iu" or len(shape) not in (1, 2):
            raise ValueError(f"{file} holds {dtype} of shape {shape}; it must hold integers, in one row or in a table")
        if by_column and len(shape) == 2:
            raise ValueError(f"{file} is stored column by column; save it again with numpy.ascontiguousarray")
        width = shape[1] if len(shape) == 2 else 1
        step = max(1, PIECE // max(1, width)) * width * dtype.itemsize
        left, continues = int(np.prod(shape)) * dtype.itemsize, False
        while left:
            block = plain.read(min(step, left))
            if not block:
                raise EOFError(f"{left} bytes are missing at its end")
            left -= len(block)
            row = np.frombuffer(block, dtype).astype(np.int64)
            yield Group(list(row.reshape(-1, width)) if len(shape) == 2 else [row], continues)
            continues = len(shape) == 1
