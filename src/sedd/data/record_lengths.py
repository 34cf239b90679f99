"""The lengths of records in tokens, found by one scan of the sources before anything is written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from sedd.data.fitting import fit_tokenizer
from sedd.data.index import Index, is_prepared
from sedd.data.readers import TextOrIds, expand_sources, read_chunks
from sedd.data.text_file import TextEncoding
from sedd.tokenizer.base import Tokenizer, utf8


@final
class RecordLengths(NamedTuple):
    """The number of records, and the tokens of the shortest and of the longest; of prepared data the longest alone."""

    records: int
    shortest: int | None
    longest: int

    def __str__(self) -> str:
        if self.shortest == self.longest:
            return f"{self.records:,} records of {self.longest} tokens each"
        span = "up to" if self.shortest is None else f"{self.shortest} to"
        return f"{self.records:,} records of {span} {self.longest} tokens"


def scan_record_lengths(
    sources: Sequence[str],
    tokenizer: str,
    column: str | None = None,
    encoding: str = "utf-8",
    fraction: float = 1.0,
) -> RecordLengths:
    """Count the tokens of every record of ``sources``, one per line or row.

    Args:
        sources: Files, folders, ``hf:NAME``, or one prepared folder, whose index has the length.
        tokenizer: As for `fit_tokenizer`; one that must be fitted, other than to characters, is fitted.
        column: The column of a table that holds the text.
        encoding: The encoding of text files.
        fraction: The part of the records that the tokenizer is fitted to.
    """
    if len(sources) == 1 and is_prepared(sources[0]):
        index = Index.read(Path(sources[0]))
        equal = index.length is not None and index.tokens == index.records * index.length
        return RecordLengths(index.records, index.length if equal else None, int(index.length or 0))
    text_encoding = TextEncoding.for_tokenizer(tokenizer, encoding)
    count = _counter(tokenizer, lambda: fit_tokenizer(tokenizer, sources, column, "lines", text_encoding, fraction))
    records, shortest, longest = 0, None, 0
    for chunk in read_chunks(expand_sources(sources), column, "lines", encoding=text_encoding):
        lengths = [length for length in count(chunk.texts) if length]
        if lengths:
            records += len(lengths)
            longest = max(longest, *lengths)
            shortest = min(lengths) if shortest is None else min(shortest, *lengths)
    if not records:
        raise ValueError(f"{', '.join(sources)} holds no record; name a source that does")
    return RecordLengths(records, shortest, longest)


def _counter(tokenizer: str, build: Callable[[], Tokenizer]) -> Callable[[Sequence[TextOrIds]], Sequence[int]]:
    """Return a function from texts to their numbers of tokens; characters and bytes are counted without encoding."""
    match tokenizer:
        case "chars":
            return lambda texts: [len(text) for text in texts]
        case "bytes":
            return lambda texts: [
                len(utf8(text, keeps_bytes=True) if isinstance(text, str) else text) for text in texts
            ]
    built = build()
    return lambda texts: [len(built.encode(text) if isinstance(text, str) else np.asarray(text)) for text in texts]
