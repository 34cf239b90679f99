"""How much of a data file is in memory at a time: a small file may stand for any number of characters."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST_LINE = 1 << 26
"""Characters of a line, a row or a cell."""
LONGEST_WHOLE = 1 << 28
"""Characters of what is in memory as a whole: a JSON document, a FASTA sequence, a row group."""
MAX_EXPANSION = 100
"""How many times its stored size a longer row group may have; text compresses to about a tenth."""


VALUE = 8
"""Bytes that a value takes at least, however short its encoding is."""


def rows_at_a_time(file: Path, group: Any, columns: list[str]) -> int:
    """Return how many rows of a row group of Parquet fit into memory, even if each repeats the longest text in it."""
    every = map(group.column, range(group.num_columns))
    chunks = [chunk for chunk in every if chunk.path_in_schema.split(".")[0] in columns]  # ids.list.element of a list
    size = sum(max(int(chunk.total_uncompressed_size), VALUE * int(chunk.num_values)) for chunk in chunks)
    stored = sum(int(chunk.total_compressed_size) for chunk in chunks)
    if size > LONGEST_WHOLE and size > MAX_EXPANSION * stored:
        raise ValueError(
            f"{file} has a row group of {stored:,} bytes that takes {size:,} in memory; above {LONGEST_WHOLE:,} it may "
            f"take {MAX_EXPANSION} times its size: write the file again with smaller row groups"
        )
    return max(1, min(1024, 2 * LONGEST_WHOLE // max(1, size)))


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
