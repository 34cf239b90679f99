"""Look at data before it is prepared: fit a tokenizer to it, and count the tokens of its records."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from sedd.data.index import Index, is_prepared
from sedd.data.readers import expand_sources, read_chunks, read_documents
from sedd.data.text_file import TextEncoding
from sedd.tokenizer import Tokenizer, build_tokenizer

MAX_USUAL = 0.75  # a length that leaves out long records is named if it is at most this share of the longest


def fit_tokenizer(
    spec: str,
    sources: Sequence[str | Path],
    column: str | None = None,
    packing: str = "packed",
    encoding: str = "utf-8",
    fraction: float = 1.0,
) -> Tokenizer:
    """Build the tokenizer called ``spec``, fitted to the beginning of ``sources`` if it has to be.

    Training sees that part, and held-out text stays unseen.

    Args:
        spec: As for `tokenizer.build_tokenizer`; other arguments as for `prepare`.
        fraction: The first part of the characters, or of the records, that the tokenizer sees.
    """

    def read() -> Iterator[str]:
        return read_documents(sources, column, packing, TextEncoding.for_tokenizer(spec, encoding))

    def beginning() -> Iterator[str]:
        if packing == "lines":
            yield from islice(read(), max(1, int(fraction * sum(1 for _ in read()))))
            return
        rest = max(1, int(fraction * sum(map(len, read()))))
        for text in read():
            yield text[:rest]
            rest -= len(text)
            if rest <= 0:
                return

    return build_tokenizer(spec, read if fraction == 1 else beginning)


@final
class RecordLengths(NamedTuple):
    """The number of records, and the tokens of the shortest and of the longest; of prepared data the longest alone."""

    records: int
    shortest: int | None
    longest: int
    padding: float = 0.0  # share of padding in sequences as long as the longest record
    usual: int = 0  # the length that 99 % of the records do not exceed; 0 if unknown
    longer: int = 0  # number of records above it

    def advice(self) -> str:
        """Return what share is padding, and which length leaves out few records."""
        share = f", {self.padding:.0%} of them padding" if self.padding else ""
        if not 0 < self.usual <= MAX_USUAL * self.longest:
            return f"{share}; --seq-len sets another length"
        return f"{share}; --seq-len {self.usual} leaves out {self.longer:,} longer records"

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
    """Count the tokens of every record of ``sources``, one per line or row, or take them from a prepared folder."""
    if len(sources) == 1 and is_prepared(sources[0]):
        index = Index.read(Path(sources[0]))
        equal = index.length is not None and index.tokens == index.records * index.length
        return RecordLengths(index.records, index.length if equal else None, int(index.length or 0))
    built = None  # characters need no tokenizer to be counted
    if tokenizer != "chars":
        built = fit_tokenizer(tokenizer, sources, column, "lines", encoding, fraction)
    text_encoding, counts = TextEncoding.for_tokenizer(tokenizer, encoding), Counter[int]()
    for chunk in read_chunks(expand_sources(sources), column, "lines", encoding=text_encoding):
        rows = [built.encode(text) if built and isinstance(text, str) else text for text in chunk.texts]
        counts.update(filter(None, map(len, rows)))
    if not counts:
        raise ValueError(f"{', '.join(sources)} holds no record; name a source that does")
    lengths = sorted(counts)
    up_to = np.cumsum([counts[length] for length in lengths])
    records, longest = int(up_to[-1]), lengths[-1]
    place = int(np.searchsorted(up_to, 0.99 * records))
    padding = 1 - sum(length * number for length, number in counts.items()) / (records * longest)
    return RecordLengths(records, lengths[0], longest, padding, lengths[place], records - int(up_to[place]))
