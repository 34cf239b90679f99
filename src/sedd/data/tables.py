"""Records of tables and of JSON: which columns hold texts and labels, and lists of integers."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from sedd.files import parse_json
from sedd.tokenizer import Ids

TEXT_COLUMNS = ("text", "content", "document", "sentence", "smiles", "selfies", "sequence", "seq")
RECORDS = 'a text, a list of integers such as [60, 62, -1], or an object with columns, such as {"text": "a"}'

TextOrIds = str | Ids
Row = tuple[TextOrIds | None, str | None]
"""A text or integers, and its label."""


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
        raise ValueError(f"{path} holds {_describe(found)}; it must be an array, of which each record is {RECORDS}")
    return found


def records(source: str, values: Iterable[Any], column: str | None, label: str | None) -> Iterator[Row]:
    """Yield the records of JSON: texts, lists of integers, or one column of objects."""
    rest = iter(values)
    head = list(islice(rest, 1))
    if any(isinstance(value, dict) for value in head):
        yield from column_of_rows(source, chain(head, rest), column, label)
        return
    for name, wanted in (("column", column), ("label", label)):
        if wanted is not None:
            raise ValueError(
                f"{name} is {wanted!r}, but {source} holds no objects with columns; leave it out, or name a table"
            )
    for number, value in enumerate(chain(head, rest), 1):
        yield check_record(value, f"record {number} of {source}", head[0]), None


def column_of_rows(source: str, rows: Iterable[Any], column: str | None, label: str | None) -> Iterator[Row]:
    """Yield a column of texts or lists of integers, and that of the labels."""
    rest = iter(rows)
    head = list(islice(rest, 1))
    if not head:
        return
    check_label_column(source, list(head[0]), label)
    others = {key: value for key, value in head[0].items() if key != label}
    texts = [key for key, value in others.items() if isinstance(value, str)]
    lists = [key for key, value in others.items() if isinstance(value, list)]
    wanted = choose_column(source, list(head[0]), texts or lists, column)
    first = None
    for number, row in enumerate(chain(head, rest), 1):
        where = f"record {number} of {source}"
        if not isinstance(row, Mapping):
            raise ValueError(f"{where} is {_describe(row)}; it must be an object with columns, as the first is")
        value = row.get(wanted)
        first = value if first is None else first
        record = None if value is None else check_record(value, f"{wanted!r} in {where}", first)
        yield record, None if label is None else label_of(row.get(label), where, label)


def check_record(value: Any, where: str, first: Any) -> TextOrIds:
    """Return a text, or a list of integers as ids; reject any other value, and another kind than the first has."""
    if isinstance(value, str) and isinstance(first, str):
        return value
    found = _integers(value) if isinstance(value, list) and not isinstance(first, str) else None
    if found is not None:
        return found
    same = f", and the first is {_describe(first)}" if isinstance(value, str | list) and value is not first else ""
    raise ValueError(f"{where} is {_describe(value)}{same}; each record must be {RECORDS}")


def _integers(values: list[Any]) -> Ids | None:
    """Return integers, also those written as 67.0; None if there are other values."""
    whole = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    if not all(type(value) is int and -(2**63) <= value < 2**63 for value in whole):
        return None
    return np.array(whole, np.int64)


def _describe(value: Any) -> str:
    """Return what kind of value of JSON this is, in a few words."""
    match value:
        case None:
            return "null"
        case dict():
            return "an object"
        case list():
            others = [item for item in value if _integers([item]) is None]
            kind = "a list" if others and isinstance(others[0], list) else _describe(others[0]) if others else ""
            return f"a list that holds {kind}" if others else "a list of integers"
        case str():
            return "a text"
    return f"the value {value!r}"


def choose_column(source: str, columns: list[str], usable: list[str], wanted: str | None) -> str:
    """Return the requested column; by default one of `TEXT_COLUMNS`, or the only usable column."""
    if wanted is not None:
        if wanted not in columns:
            raise ValueError(f"column is {wanted!r}; {source} has {', '.join(columns)}")
        return wanted
    obvious = [name for usual in TEXT_COLUMNS for name in usable if name.lower() == usual]
    if obvious or len(usable) == 1:
        return (obvious or usable)[0]
    raise ValueError(f"{source} has the columns {', '.join(columns)}; name the one that holds the text: --column NAME")


def check_label_column(source: str, columns: list[str], label: str | None) -> None:
    """Refuse a label that is no column."""
    if label is not None and label not in columns:
        raise ValueError(f"label is {label!r}; {source} has the columns {', '.join(columns)}")


def label_of(value: Any, where: str, label: str) -> str | None:
    """Return a label as text, None if it is missing or empty."""
    if value is not None and not isinstance(value, str | int):
        raise ValueError(f"{where} has a {type(value).__name__} as {label!r}; a label must be text or an integer")
    return None if value is None else str(value) or None
