"""Read texts from files, folders and Hugging Face datasets, a chunk at a time."""

import contextlib
import csv
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, final

from sedd.data.budgets import LONGEST_LINE, LONGEST_WHOLE, rows_at_a_time, short_rows
from sedd.data.compression import COMPRESSED, import_optional, make_seekable, open_decompressed
from sedd.data.tables import TEXT_COLUMNS as TEXT_COLUMNS
from sedd.data.tables import (
    Row,
    check_label_column,
    check_record,
    choose_column,
    column_of_rows,
    label_of,
    parse_array,
    parse_lines,
    records,
)
from sedd.data.tables import TextOrIds as TextOrIds
from sedd.data.text_file import UTF8, Found, TextEncoding, TextFile
from sedd.data.token_files import check_compression, companions, is_token_file, read_array, read_token_file

PIECE = 1 << 18  # bytes read, and characters encoded, at a time; at four times as many a BPE needs twice the memory
_INTEGER_LIST = re.compile(r"(large_|fixed_size_)?list<\w+: u?int\d+[^<>]*>(\[\d+\])?")
"""How Arrow writes the type of a column of lists of integers."""

TABLES = (".jsonl", ".json", ".csv", ".parquet")
SMILES = (".smi", ".smiles")
FASTA = (".fa", ".fasta", ".fna", ".faa")
KINDS = (".txt", ".tokens", *TABLES, *SMILES, *FASTA, ".npy", ".bin", ".ds")


@final
class Group(NamedTuple):
    """Consecutive texts of a file, as a format-specific reader yields them."""

    texts: Sequence[TextOrIds]
    continues: bool = False  # the first text continues the previous document
    labels: Sequence[str | None] = ()  # empty without a label column


@final
class Source(NamedTuple):
    """A source and its files; a dataset of the Hugging Face Hub has none."""

    name: str
    files: tuple[Path, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.files)


@final
class Chunk(NamedTuple):
    """Consecutive texts of one source, about ``PIECE`` characters."""

    source: str
    first: int  # number of the first text among the records of the file, from 1
    texts: Sequence[TextOrIds]
    continues: bool  # the first text continues the last document of the previous chunk
    done: int  # bytes of all sources read so far
    labels: Sequence[str | None] = ()  # one per text; empty without a label column


def read_documents(
    sources: Sequence[str | Path],
    column: str | None = None,
    packing: str = "packed",
    encoding: TextEncoding = UTF8,
) -> Iterator[str]:
    """Yield the texts of ``sources`` in order, long files in pieces. Tokenizers are fitted to them.

    Args:
        sources: Files, folders or ``hf:NAME``.
        column: The column of a table that holds the text; None: recognised by its name.
        packing: ``packed``, or ``lines`` for one text per line or row.
    """
    for chunk in read_chunks(expand_sources(sources), column, packing, encoding=encoding):
        for text in chunk.texts:
            yield text if isinstance(text, str) else " ".join(map(str, text.tolist()))


def expand_sources(sources: Sequence[str | Path]) -> list[Source]:
    """Find the files of each source, those of a folder sorted by path."""
    if not sources:
        raise ValueError(f"no source was given; name files ({', '.join(KINDS)}), folders, or hf:NAME")
    return [Source(str(source), tuple(_files(source))) for source in sources]


def has_several_documents(sources: Sequence[Source]) -> bool:
    """Return whether the sources may hold more than one document."""
    files = [file for source in sources for file in source.files]
    if files and all(map(is_token_file, files)):
        return False  # their ids have end-of-text tokens already
    return len(files) != 1 or file_kind(files[0]) in (*TABLES, *SMILES, *FASTA)


def read_chunks(
    sources: Sequence[Source],
    column: str | None,
    packing: str,
    label: str | None = None,
    encoding: TextEncoding = UTF8,
    found: Found | None = None,
) -> Iterator[Chunk]:
    """Yield the texts of ``sources`` in order, a chunk at a time.

    Args:
        sources: From `expand_sources`.
        column: The column of a table that holds the text; by default one of `TEXT_COLUMNS`, or the only one of strings.
        packing: Text files are read line by line (``lines``) or as one document in pieces (``packed``).
        label: The column of a table that holds the labels.
        encoding: The encoding of text files, JSON lines and CSV.
    """
    done, is_first, found = 0, True, found or Found()
    for source in sources:
        empty = True
        hub = source.name.startswith("hf:")
        chunks = (
            _hub_chunks(source.name, column, label)
            if hub
            else _file_chunks(source.files, column, packing, label, encoding, found)
        )
        for chunk in chunks:
            empty = False
            follows = not is_first and packing == "packed" and is_token_file(Path(chunk.source))
            is_first = False
            yield chunk._replace(done=done + chunk.done, continues=chunk.continues or follows)
        if empty:
            raise ValueError(f"{source.name} holds no text; name a source that does")
        done += source.size
    found.check(encoding)


def _files(source: str | Path) -> list[Path]:
    if str(source).startswith("hf:"):
        return []
    path = Path(source)
    if path.is_dir():
        kinds = set(KINDS) - {".json"}  # in a folder of data these mostly describe it
        files = sorted(file for file in path.rglob("*") if file.is_file() and file_kind(file) in kinds)
        described = {table for file in files for table in companions(file)}
        files = [file for file in files if file not in described and (file_kind(file) != ".bin" or companions(file))]
        if not files:
            raise ValueError(f"the folder {path} holds no file that ends in {', '.join(KINDS)}; name one that does")
        return files
    if not path.exists() and Path(f"{path}.idx").is_file():  # Megatron names both files without their endings
        raise ValueError(f"{path} is the name of two files of Megatron; name {path}.bin")
    if not path.exists():
        raise ValueError(f"{path} does not exist; name a file, a folder, or hf:NAME for a Hugging Face dataset")
    if file_kind(path) not in (*KINDS, ""):
        raise ValueError(
            f"{path} ends in {file_kind(path)}; supported are {', '.join(KINDS)}, "
            f"also followed by {', '.join(COMPRESSED)}, and plain text without an ending"
        )
    check_compression(path)
    return [path]


def file_kind(path: Path) -> str:
    """Return the file name's ending without that of a compression."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()


def _file_chunks(
    files: Sequence[Path],
    column: str | None,
    packing: str,
    label: str | None,
    encoding: TextEncoding,
    found: Found,
) -> Iterator[Chunk]:
    done = 0
    for file in files:
        with _named_errors(file), file.open("rb") as raw, open_decompressed(file, raw) as stream:
            first = 1
            text_file = TextFile(file, stream, encoding, found)
            for texts, continues, labels in _read_groups(text_file, column, packing, label):
                yield Chunk(str(file), first, texts, continues, done + raw.tell(), labels)
                first += len(texts)
        done += file.stat().st_size


def _hub_chunks(name: str, column: str | None, label: str | None) -> Iterator[Chunk]:
    first = 1
    for texts, continues, labels in _group_rows(column_of_rows(name, _hub_rows(name), column, label), label):
        yield Chunk(name, first, texts, continues, 0, labels)
        first += len(texts)


def _hub_rows(name: str) -> Iterator[dict[str, Any]]:
    datasets = import_optional("datasets", name)
    path, _, split = name.removeprefix("hf:").partition(":")
    try:
        yield from datasets.load_dataset(path, split=split or "train", streaming=True)
    except Exception as error:  # the library raises many types, while opening and while iterating
        raise ValueError(f"{name} could not be loaded: {error}") from None


@contextlib.contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    """Turn decoding and decompression errors into a ValueError that names the file."""
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise ValueError(f"{file} could not be read: {error}; it may be damaged") from None


def _read_groups(file: TextFile, column: str | None, packing: str, label: str | None) -> Iterator[Group]:
    path, stream = file.path, file.stream
    kind = file_kind(path)
    for name, wanted in (("column", column), ("label", label)):
        if kind not in TABLES and wanted is not None:
            raise ValueError(f"{name} is {wanted!r}, but {path} has no columns; leave it out, or name a table")
    match kind:
        case ".jsonl":
            values = parse_lines(path, chain.from_iterable(_whole_lines(file)))
            return _group_rows(records(str(path), values, column, label), label)
        case ".json":
            array = parse_array(path, _whole_text(file))
            return _group_rows(records(str(path), array, column, label), label)
        case ".smi" | ".smiles":
            return _group_rows(_smiles_rows(file), None)
        case ".fa" | ".fasta" | ".fna" | ".faa":
            return _group_rows(_fasta_rows(file), None)
        case ".csv":
            return _group_rows(_csv_texts(file, column, label), label)
        case ".parquet":
            return _group_rows(_parquet_texts(path, stream, column, label), label)
        case ".bin" | ".ds" | ".npy":
            tokens = is_token_file(path)
            rows = read_token_file(path, stream, packing, PIECE) if tokens else read_array(path, stream, PIECE)
            return (Group(*row) for row in rows)
    return _line_records(file) if packing == "lines" else _document_pieces(file)


def _group_rows(rows: Iterator[Row], label: str | None) -> Iterator[Group]:
    """Group non-empty texts into pieces."""
    group: list[TextOrIds] = []
    labels: list[str | None] = []
    size = 0
    for text, row_label in rows:
        if text is not None and len(text):
            group.append(text)
            labels += [] if label is None else [row_label]
            size += len(text)
        if size >= PIECE:
            yield Group(group, labels=labels)
            group, labels, size = [], [], 0
    if group:
        yield Group(group, labels=labels)


def _document_pieces(file: TextFile) -> Iterator[Group]:
    """Yield one document in pieces whose concatenation is the document."""
    rest, continues = "", False
    for text in file.decode_running_text(PIECE):
        if rest:
            cut = _cut_position(rest)
            yield Group([rest[:cut]], continues)
            rest, continues = rest[cut:], True
        rest += text
    if rest:
        yield Group([rest], continues)


def _cut_position(text: str) -> int:
    """Return where to cut a text with the least effect on tokenization.

    That is after a line end between words, else before the last space, else at the end.
    """
    cut = text.rfind("\n", 1, -1)
    while cut > 0:
        if not (text[cut - 1].isspace() or text[cut + 1].isspace()):
            return cut + 1
        cut = text.rfind("\n", 1, cut)
    cut = text.rfind(" ", 1)
    return cut if cut > 0 else len(text)


def _line_records(file: TextFile) -> Iterator[Group]:
    """Yield one record per line; empty lines are skipped."""
    for group in _whole_lines(file):
        if records := [text for line in group if (text := line.removesuffix("\n").removesuffix("\r"))]:
            yield Group(records)


def _whole_lines(file: TextFile) -> Iterator[list[str]]:
    """Yield all lines with their line ends, a piece at a time."""
    rest = ""
    for text in file.decode(PIECE):
        *whole, rest = (rest + text).split("\n")
        if len(rest) > LONGEST_LINE:
            raise ValueError(
                f"{file.path} has a line of more than {LONGEST_LINE} characters; rename it to .txt, with packing packed"
            )
        yield [line + "\n" for line in whole]
    if rest:
        yield [rest]


def _whole_text(file: TextFile) -> str:
    """Return a text that must be read as a whole."""
    pieces, size = [], 0
    for piece in file.decode(PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > LONGEST_WHOLE:
            raise ValueError(f"{file.path} has more than {LONGEST_WHOLE:,} characters; write it as .jsonl")
    return "".join(pieces)


def _smiles_rows(file: TextFile) -> Iterator[Row]:
    """Yield the first word of every line, a molecule, which its name may follow; "smiles" is the head of a column."""
    for line in chain.from_iterable(_whole_lines(file)):
        word = line.split(maxsplit=1)[:1]
        if word and word[0].lower() != "smiles":
            yield word[0], None


def _fasta_rows(file: TextFile) -> Iterator[Row]:
    """Yield the sequences of a FASTA file: the lines after each line that begins with ">", joined."""
    parts: list[str] = []
    size = 0
    for line in chain.from_iterable(_whole_lines(file)):
        if line.startswith((">", ";")):
            yield "".join(parts), None
            parts, size = [], 0
        else:
            parts.append("".join(line.split()))
            size += len(line)
        if size > LONGEST_WHOLE:
            raise ValueError(f"{file.path} has a sequence of more than {LONGEST_WHOLE:,} characters; split it")
    yield "".join(parts), None


def _csv_texts(file: TextFile, column: str | None, label: str | None) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_LINE)  # Python's default is 128 KiB, less than a long document
    try:
        rows = short_rows(file.path, chain.from_iterable(_whole_lines(file)))
        header = next(rows, [])
        head = list(islice(rows, 1))
        if not head:
            return
        check_label_column(str(file.path), header, label)
        cells = zip(header, head[0], strict=False)
        strings = [name for name, value in cells if name != label and not _is_number(value)]
        text_index = header.index(choose_column(str(file.path), header, strings, column))
        label_index = len(header) if label is None else header.index(label)
        for row in chain(head, rows):
            text = row[text_index] if text_index < len(row) else None
            yield text, (row[label_index] or None) if label_index < len(row) else None
    except csv.Error as error:
        raise ValueError(f"{file.path} is not CSV: {error}") from None


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _parquet_texts(file: Path, stream: BufferedIOBase, column: str | None, label: str | None) -> Iterator[Row]:
    parquet = import_optional("pyarrow.parquet", str(file))
    pyarrow = import_optional("pyarrow", str(file))
    with make_seekable(file, stream) as table:
        try:
            parquet_file = parquet.ParquetFile(table)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{file} is not a Parquet file: {error}") from None
        schema = parquet_file.schema_arrow
        check_label_column(str(file), schema.names, label)
        texts = [field.name for field in schema if str(field.type) in ("string", "large_string")]
        lists = [field.name for field in schema if _INTEGER_LIST.fullmatch(str(field.type))]
        usable = [name for name in texts if name != label] or lists
        text_column = choose_column(str(file), schema.names, usable, column)
        if text_column not in texts + lists:
            raise ValueError(
                f"column {text_column!r} of {file} is of type {schema.field(text_column).type}; it must be text, or "
                "lists of integers"
            )
        columns = list({text_column, label or text_column})
        for group in range(parquet_file.num_row_groups):
            size = rows_at_a_time(file, parquet_file.metadata.row_group(group), columns)
            for batch in parquet_file.iter_batches(batch_size=size, row_groups=[group], columns=columns):
                for row in batch.to_pylist():
                    value = row[text_column]
                    if len(value or "") > LONGEST_LINE:
                        raise ValueError(f"{file} has a text of more than {LONGEST_LINE:,} characters; split it")
                    record = check_record(value, str(file), value) if isinstance(value, list) else value
                    yield record, None if label is None else label_of(row[label], str(file), label)
