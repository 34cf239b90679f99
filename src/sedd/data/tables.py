"""Records of tables (JSON, CSV, Parquet): which columns hold texts and labels, and lists of integers.

A small file may stand for any number of characters, so what is in memory at a time has a limit.
"""

import csv
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from itertools import chain, islice, zip_longest
from pathlib import Path
from reprlib import repr as shorten
from typing import Any

import numpy as np

from sedd.data.text_file import COMPRESSED, import_optional
from sedd.files import parse_json
from sedd.tokenizer import Ids

LONGEST_LINE = 1 << 26  # characters of a line, a row or a cell
LONGEST_WHOLE = 1 << 28  # characters of what is in memory as a whole: a JSON document, a FASTA sequence, a row group
MAX_EXPANSION = 100  # how many times its stored size a longer row group may have; text compresses to about a tenth
VALUE = 8  # bytes that a value of Parquet takes at least, however short its encoding is
TEXT_COLUMNS = ("text", "content", "document", "sentence", "smiles", "selfies", "sequence", "seq")
RECORDS = 'a text, a list of integers such as [60, 62, -1], or an object with columns, such as {"text": "a"}'
_INTEGER_LIST = re.compile(r"(large_|fixed_size_)?list<\w+: u?int\d+[^<>]*>(\[\d+\])?")
"""How Arrow writes the type of a column of lists of integers."""

TextOrIds = str | Ids
Row = tuple[TextOrIds | None, str | None]  # a text or integers, and its label


def parse_lines(path: Path, lines: Iterable[str]) -> Iterator[Any]:
    """Yield the value of each line of JSON; empty lines are skipped."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
            if "\\ud" in line.lower():
                json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no character
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is not JSON: {error}") from None
        yield value


def parse_array(path: Path, text: str) -> list[Any]:
    """Return the values of a JSON array."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; for one record per line, name it .jsonl") from None
    if not isinstance(found, list):
        raise ValueError(f"{path} holds {shorten(found)}; it must be an array, of which each record is {RECORDS}")
    return found


def records(
    source: str, values: Iterator[Any], column: str | None, label: str | None, is_typed: bool = True
) -> Iterator[Row]:
    """Yield the records of JSON or CSV: texts, lists of integers, or one column of objects, and the labels.

    Where values have no types, as in CSV, a column that begins with a number is not found to be of text.
    """
    if not (head := list(islice(values, 1))):
        return
    wanted = first = None
    if isinstance(head[0], dict):
        others = {key: value for key, value in head[0].items() if key != label}
        texts = [key for key, value in others.items() if isinstance(value, str) and (is_typed or not _is_number(value))]
        lists = [key for key, value in others.items() if isinstance(value, list)]
        wanted = _choose_column(source, list(head[0]), texts or lists, column, label)
    else:
        reject_columns(source, column, label)
    for number, value in enumerate(chain(head, values), 1):
        where, row_label = f"record {number} of {source}", None
        if wanted is not None:
            if not isinstance(value, dict):
                raise ValueError(f"{where} is {shorten(value)}; it must be an object with columns, as the first is")
            row_label = _label_of(value, label, where)
            where, value = f"{wanted!r} in {where}", value.get(wanted)
        first = value if first is None else first
        is_missing = value is None and wanted is not None
        yield None if is_missing else _check_record(value, where, first), row_label


def _check_record(value: Any, where: str, first: Any) -> TextOrIds:
    """Return a text, or a list of integers as ids; reject any other value, and a kind that the first does not have."""
    if isinstance(value, str) and isinstance(first, str):
        return value
    found = _integers(value) if isinstance(value, list) and not isinstance(first, str) else None
    if found is not None:
        return found
    same = f", and the first is {shorten(first)}" if isinstance(value, str | list) and value is not first else ""
    raise ValueError(f"{where} is {shorten(value)}{same}; each record must be {RECORDS}")


def _integers(values: list[Any]) -> Ids | None:
    """Return integers, also those written as 67.0; None if there are other values."""
    whole = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    if not all(type(value) is int and -(2**63) <= value < 2**63 for value in whole):
        return None
    return np.array(whole, np.int64)


def parse_csv(file: Path, lines: Iterator[str]) -> Iterator[dict[str, str | None]]:
    """Yield the rows of a CSV file by column; None stands for a cell that a short row leaves out."""
    csv.field_size_limit(LONGEST_LINE)  # Python's default is 128 KiB, less than a long document
    try:
        rows = short_rows(file, lines)
        header = next(rows, [])
        for row in rows:
            yield dict(zip_longest(header, row[: len(header)]))
    except csv.Error as error:
        raise ValueError(f"{file} is not CSV: {error}") from None


def short_rows(file: Path, lines: Iterator[str]) -> Iterator[list[str]]:
    """Yield the rows of a CSV file; one between quotes may have any number of lines, but not of characters."""
    size = 0

    def counted() -> Iterator[str]:
        nonlocal size
        for line in lines:
            size += len(line)
            if size > LONGEST_LINE:
                raise ValueError(f"{file} has a row of more than {LONGEST_LINE:,} characters; a quote may be missing")
            yield line

    for row in csv.reader(counted(), strict=True):
        yield row
        size = 0


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def parquet_rows(file: Path, stream: BufferedIOBase, column: str | None, label: str | None) -> Iterator[Row]:
    """Yield the column of texts or lists of integers of a Parquet file, and the labels."""
    parquet = import_optional("pyarrow.parquet", str(file))
    with tempfile.TemporaryFile() as copy:
        is_compressed = file.suffix.lower() in COMPRESSED
        if is_compressed:  # its columns are not read in their order
            shutil.copyfileobj(stream, copy)
        try:
            parquet_file = parquet.ParquetFile(copy if is_compressed else stream)
        except import_optional("pyarrow", str(file)).ArrowInvalid as error:
            raise ValueError(f"{file} is not a Parquet file: {error}") from None
        schema = parquet_file.schema_arrow
        texts = [field.name for field in schema if str(field.type) in ("string", "large_string")]
        lists = [field.name for field in schema if _INTEGER_LIST.fullmatch(str(field.type))]
        usable = [name for name in texts if name != label] or lists
        text_column = _choose_column(str(file), schema.names, usable, column, label)
        kind = schema.field(text_column).type
        if text_column not in texts + lists:
            raise ValueError(f"column {text_column!r} of {file} is {kind}; it must be text, or lists of integers")
        columns = list({text_column, label or text_column})
        for group in range(parquet_file.num_row_groups):
            size = rows_at_a_time(file, parquet_file.metadata.row_group(group), columns)
            for batch in parquet_file.iter_batches(batch_size=size, row_groups=[group], columns=columns):
                for row in batch.to_pylist():
                    value = row[text_column]
                    if len(value or "") > LONGEST_LINE:
                        raise ValueError(f"{file} has a text of more than {LONGEST_LINE:,} characters; split it")
                    record = _check_record(value, str(file), value) if isinstance(value, list) else value
                    yield record, _label_of(row, label, str(file))


def rows_at_a_time(file: Path, group: Any, columns: list[str]) -> int:
    """Return how many rows of a row group of Parquet fit into memory, even if each repeats the longest text in it."""
    every = map(group.column, range(group.num_columns))
    chunks = [chunk for chunk in every if chunk.path_in_schema.split(".")[0] in columns]  # ids.list.element of a list
    size = sum(max(int(chunk.total_uncompressed_size), VALUE * int(chunk.num_values)) for chunk in chunks)
    stored = sum(int(chunk.total_compressed_size) for chunk in chunks)
    if size > LONGEST_WHOLE and size > MAX_EXPANSION * stored:
        raise ValueError(f"{file} has a row group of {stored:,} bytes for {size:,}; write it with smaller row groups")
    return max(1, min(1024, 2 * LONGEST_WHOLE // max(1, size)))


def reject_columns(source: str, column: str | None, label: str | None) -> None:
    """Reject the name of a column where there are none."""
    for name, wanted in (("column", column), ("label", label)):
        if wanted is not None:
            raise ValueError(f"{name} is {wanted!r}, but {source} has no columns; leave it out, or name a table")


def _choose_column(source: str, columns: list[str], usable: list[str], wanted: str | None, label: str | None) -> str:
    """Return the requested column; by default one of `TEXT_COLUMNS`, or the only usable column."""
    if label is not None and label not in columns:
        raise ValueError(f"label is {label!r}; {source} has the columns {', '.join(columns)}")
    if wanted is not None:
        if wanted not in columns:
            raise ValueError(f"column is {wanted!r}; {source} has {', '.join(columns)}")
        return wanted
    obvious = [name for usual in TEXT_COLUMNS for name in usable if name.lower() == usual]
    if obvious or len(usable) == 1:
        return (obvious or usable)[0]
    raise ValueError(f"{source} has the columns {', '.join(columns)}; name the one that holds the text: --column NAME")


def _label_of(row: dict[str, Any], label: str | None, where: str) -> str | None:
    """Return the label of a row as text, None if it is missing or empty."""
    value = None if label is None else row.get(label)
    if value is not None and not isinstance(value, str | int):
        raise ValueError(f"{where} has a {type(value).__name__} as {label!r}; a label must be text or an integer")
    return None if value is None else str(value) or None
