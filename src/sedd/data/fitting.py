"""Fit a tokenizer to the beginning of the data, which training sees; held-out text stays unseen."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from sedd.data.readers import read_documents
from sedd.data.text_file import UTF8, TextEncoding
from sedd.tokenizer import Tokenizer, build_tokenizer


def fit_tokenizer(
    spec: str,
    sources: Sequence[str | Path],
    column: str | None = None,
    packing: str = "packed",
    encoding: TextEncoding = UTF8,
    fraction: float = 1.0,
) -> Tokenizer:
    """Build the tokenizer called ``spec``, fitted to ``sources`` if it has to be.

    Args:
        spec: As for `tokenizer.build_tokenizer`.
        sources: Files, folders or ``hf:NAME``.
        column: The column of a table that holds the text.
        packing: ``packed``, or ``lines`` for records.
        fraction: The first part of the characters, or of the records, that the tokenizer sees.
    """

    def read() -> Iterator[str]:
        return read_documents(sources, column, packing, encoding)

    return build_tokenizer(spec, lambda: read() if fraction == 1 else _beginning(read, fraction, packing == "lines"))


def _beginning(read: Callable[[], Iterator[str]], fraction: float, by_record: bool) -> Iterator[str]:
    """Yield the first ``fraction`` of the records, or of the characters of a text that comes in pieces."""
    if by_record:
        yield from islice(read(), max(1, int(fraction * sum(1 for _ in read()))))
        return
    rest = max(1, int(fraction * sum(map(len, read()))))
    for text in read():
        yield text[:rest]
        rest -= len(text)
        if rest <= 0:
            return
