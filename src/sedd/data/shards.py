"""Tokenize sources into shards of token ids; the output folder is complete or absent."""

import contextlib
import hashlib
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from io import BufferedWriter
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import UInt

from sedd import files
from sedd.data.packing import FORMAT, LABELS, LENGTHS, Index, Labels, Shard, TokenBlocks, is_prepared, shard_name
from sedd.data.readers import Chunk, Source, expand_sources, has_several_documents, read_chunks, read_documents
from sedd.data.tables import TextOrIds
from sedd.data.text_file import TextEncoding
from sedd.data.token_files import companions
from sedd.schema import MAX_SAMPLES, check_choice, check_count
from sedd.terminal import warn
from sedd.tokenizer import BPE, Ids, Integers, Tokenizer, build_tokenizer
from sedd.tokenizer.base import utf8

SHARD = 1 << 27  # tokens per file
READER = 3  # version of the reading of sources, of which the cache holds the results
NO_LABEL = 2**16 - 1
MAX_USUAL = 0.75  # a length that leaves out long records is named if it is at most this share of the longest
NOTES = "notes.txt"
MAX_NOTES = 2**12  # bytes of the notes that are read; their author may be anyone

OnBytesRead = Callable[[int, int], None]  # bytes of the sources read so far, and in total


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
    sources: Sequence[str], tokenizer: str, column: str | None = None, encoding: str = "utf-8", fraction: float = 1.0
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


def prepare(
    sources: Sequence[str | Path],
    out: str | Path,
    tokenizer: Tokenizer,
    *,
    packing: str = "packed",
    length: int | None = None,
    pad: str | None = None,
    column: str | None = None,
    label: str | None = None,
    encoding: str = "utf-8",
    fraction: float = 1.0,
    workers: int | None = None,
    on_progress: OnBytesRead | None = None,
) -> Index:
    """Tokenize ``sources`` into the folder ``out``, which appears only when it is complete.

    Args:
        sources: Files, folders, or ``hf:NAME[:SPLIT]``.
        out: The folder to write; it must be new or empty.
        tokenizer: The special ids that the options need are added to it, and it is saved beside the tokens.
        packing: ``packed`` joins all documents into one stream, with end-of-text tokens between them; ``lines`` keeps
            one record per line or row.
        length: The most tokens of a record with ``lines``; longer records are left out. By default that of the longest.
        pad: Padding where records are shorter: ``model``, a token that the model learns (default), or ``ignore``, left
            out of the loss. Where no record is shorter there is none, and no token for it.
        column: The column of a table that holds the text.
        label: The column of a table that holds the label; a record in which it is empty has none.
        encoding: The encoding of text files; tokenizers of bytes and byte-level BPE keep bytes that are not UTF-8.
        fraction: The first part of the characters, or of the records, that the tokenizer was fitted to.
        workers: Chunks encoded in parallel, by default one per core; the result does not depend on it.
        on_progress: Called with the bytes read so far and in total.
    """
    check_choice("packing", packing, ("packed", "lines"))
    for name, value in (("pad", pad), ("length", length), ("label", label)):
        if packing == "packed" and value is not None:
            raise ValueError(f"{name} applies to packing lines only; leave it out, or choose packing lines")
    check_choice("pad", pad or "model", ("model", "ignore"))
    for name, count, most in (("length", length, MAX_SAMPLES), ("workers", workers, 2**10)):
        if count is not None:
            check_count(name, count, most=most)
    expanded, text_encoding = expand_sources(sources), TextEncoding.for_tokenizer(tokenizer, encoding)
    total, out = sum(source.size for source in expanded), Path(out)
    tokenizer = tokenizer.with_specials(eos=packing == "packed" and has_several_documents(expanded), pad=False)
    try:
        with files.atomic_folder(out) as folder, _DatasetWriter(folder, tokenizer, packing, length) as writer:
            files.require_empty_folder(out)
            chunks = enumerate(read_chunks(expanded, column, packing, label, text_encoding))
            for encoded in _in_order(writer.encode, chunks, workers or _cores()):
                writer.add(encoded, labelled=label is not None)
                if on_progress is not None:
                    on_progress(encoded.done, total)
            index = writer.finish(pad, fraction)
            if notes := text_encoding.messages() + writer.messages():
                (folder / NOTES).write_text("".join(note + "\n" for note in notes), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{out} could not be written: {error.strerror or error}; choose another folder") from None
    repeat_notes(out)
    return index


def repeat_notes(folder: Path) -> None:
    """Warn of what was read in another way than it is in the files that a folder was prepared from."""
    if (path := folder / NOTES).is_file():
        with path.open("rb") as file:
            for note in file.read(MAX_NOTES).decode(errors="replace").splitlines():
                warn(note)


def prepare_cached(
    sources: Sequence[str | Path],
    spec: str,
    make: Callable[[], Tokenizer],
    *,
    cache: Path,
    workers: int | None = None,
    on_progress: OnBytesRead | None = None,
    **options: Any,
) -> Path:
    """Return the folder in ``cache`` with ``sources`` prepared by the options of `prepare`, made if it is missing.

    ``make`` builds the tokenizer that ``spec`` names and is called only if the folder is missing. The cache key covers
    the names and contents of the files and all options; a dataset of the Hugging Face Hub is identified by its name.
    A folder that is not complete, or whose contents do not match their SHA-256, is prepared again. Another process that
    prepares the same folder is waited for.
    """
    is_file = Path(spec).exists()
    tokenizer_files = [path for path in sorted([Path(spec), *Path(spec).rglob("*")]) if path.is_file()]
    used = [*expand_sources(sources), *([Source(spec, tuple(tokenizer_files))] if is_file else [])]
    used_files = (path for source in used for file in source.files for path in (file, *companions(file)))
    contents = [(file.name, files.sha256(file)) for file in used_files]
    names = [source.name for source in used if not source.files]
    settings = [FORMAT, READER, "" if is_file else spec, options.get("packing", "packed")]  # a file is its content
    settings += [options.get(name) for name in ("length", "pad", "column")]
    settings += [label] if (label := options.get("label")) else []
    settings += [f"encoding {encoding}"] if (encoding := options.get("encoding", "utf-8")) != "utf-8" else []
    settings += [f"fitted to {fraction}"] if (fraction := options.get("fraction", 1)) < 1 else []
    key = hashlib.sha256(json.dumps([contents, names, settings]).encode()).hexdigest()[:32]
    folder = cache / key
    if not _is_damaged(folder):
        repeat_notes(folder)
        return folder
    try:
        with files.locked_folder(cache / f".making-{key}", f"the cache {cache}", wait=True):
            if folder.exists() and _is_damaged(folder):
                warn(f"the cached copy of {', '.join(map(str, sources))} is damaged; preparing it again")
                shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                prepare(sources, folder, make(), workers=workers, on_progress=on_progress, **options)
    except ValueError as error:
        if _is_damaged(folder):  # else another process has made it meanwhile, on a file system without locks
            named = str(error).replace(f"{folder} c", f"the cache {cache} c")
            raise ValueError(named.replace("choose another --out", "set SEDD_CACHE to another folder")) from None
    return folder


def _is_damaged(folder: Path) -> bool:
    """Whether the contents of a prepared folder do not match its index, or it has none."""
    try:
        length = 1 if Index.read(folder).packing == "packed" else None
        TokenBlocks.open(folder, length, "all", check=True)
    except ValueError:
        return True
    return False


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Encoded(NamedTuple):
    """The token ids of a chunk, and counts of its text."""

    ids: UInt[np.ndarray, " tokens"]
    lengths: UInt[np.ndarray, " records"]
    labels: Sequence[str | None]
    records: int
    characters: int
    bytes: int
    done: int
    too_long: int  # records left out


def _in_order(
    work: Callable[[tuple[int, Chunk]], _Encoded], items: Iterable[tuple[int, Chunk]], workers: int
) -> Iterator[_Encoded]:
    """Yield results in the order of the items, holding at most ``workers + 1`` of them in memory.

    Threads suffice: the slow parts, the `tokenizers` library and numpy, release the GIL.
    """
    pool, waiting = ThreadPoolExecutor(workers), deque[Future[_Encoded]]()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


@final
class _DatasetWriter(contextlib.ExitStack):
    """Encodes chunks of texts, and writes shards, lengths, labels, tokenizer and index into a folder."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, packing: str, length: int | None) -> None:
        super().__init__()
        self.folder, self.tokenizer, self.length = folder, tokenizer, length
        self.is_packed = packing == "packed"
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self.open: dict[str, BufferedWriter] = {}
        self.shards: list[Shard] = []
        self.labels: dict[str, int] = {}
        self.tokens = self.records = self.characters = self.bytes = self.longest = self.too_long = 0

    def encode(self, numbered: tuple[int, Chunk]) -> _Encoded:
        """Encode a chunk; called in worker threads."""
        number, chunk = numbered
        try:
            rows = self._encode_texts(chunk.texts)
        except ValueError as error:
            where = chunk.source if self.is_packed else f"{chunk.source}, from record {chunk.first} on"
            raise ValueError(f"{where}: {error}") from None
        fits = [self.length is None or len(row) <= self.length for row in rows]
        rows, texts = list(compress(rows, fits)), list(compress(chunk.texts, fits))
        labels = list(compress(chunk.labels, fits))
        if self.is_packed:
            count, lengths = len(rows) - chunk.continues, np.zeros(0, np.uint32)
            if self.tokenizer.eos is not None:  # between documents
                eos = np.array([self.tokenizer.eos])
                rows = [part for row in rows for part in (eos, row)][number == 0 or chunk.continues :]
        else:
            lengths = np.array([len(row) for row in rows if len(row)], np.uint32)
            count = len(lengths)
            labels = [label for row, label in zip(rows, labels, strict=False) if len(row)]
        # every id fits: see dtype
        ids = np.concatenate(rows or [np.zeros(0, np.int64)], dtype=self.dtype, casting="unsafe")
        return _Encoded(ids, lengths, labels, count, *self._count_text(texts), chunk.done, fits.count(False))

    def _encode_texts(self, texts: Sequence[TextOrIds]) -> list[Ids]:
        if all(isinstance(text, str) for text in texts):
            return self.tokenizer.encode_batch([str(text) for text in texts])
        if isinstance(self.tokenizer, Integers):
            return [self.tokenizer.encode_integers(row) for row in texts]
        if isinstance(self.tokenizer, BPE):
            return [self.tokenizer.check_ids(row) for row in texts]
        raise ValueError(f"the tokenizer {self.tokenizer.kind} reads no integers; choose ints, or their tokenizer.json")

    def _count_text(self, texts: Sequence[TextOrIds]) -> tuple[int, int]:
        """Count characters and bytes, for ids those of their text; an integer counts as one of each."""
        characters = size = 0
        for text in texts:
            if not isinstance(text, str) and not isinstance(self.tokenizer, Integers):
                text = self.tokenizer.decode_bytes(text).decode(errors="surrogateescape")
            characters += len(text)
            is_wide = isinstance(text, str) and not text.isascii()
            size += len(utf8(str(text), keeps_bytes=True)) if is_wide else len(text)
        return characters, size

    def add(self, encoded: _Encoded, labelled: bool) -> None:
        """Append an encoded chunk."""
        ids = encoded.ids
        while ids.size:
            part, ids = np.split(ids, [SHARD - self.tokens % SHARD])
            self._append(shard_name(len(self.shards)), part.data)
            self.tokens += part.size
            if self.tokens % SHARD == 0:
                self._close_shard()
        if not self.is_packed:
            self._append(LENGTHS, encoded.lengths.astype("<u4").data)
        if labelled:
            known = self.labels  # names are numbered in order of appearance
            numbers = [NO_LABEL if name is None else known.setdefault(name, len(known)) for name in encoded.labels]
            if len(known) > NO_LABEL:
                raise ValueError(f"there are more than {NO_LABEL} labels; choose a column with fewer distinct values")
            self._append(LABELS, np.array(numbers, "<u2").data)
        self.records += encoded.records
        self.characters += encoded.characters
        self.bytes += encoded.bytes
        self.too_long += encoded.too_long
        self.longest = max(self.longest, int(encoded.lengths.max(initial=0)))

    def finish(self, pad: str | None, fraction: float) -> Index:
        """Save the tokenizer and write the index."""
        if self.tokens == 0 and self.too_long:
            raise ValueError(f"length is {self.length}, and all {self.too_long:,} records are longer; leave length out")
        if self.tokens == 0:
            raise ValueError("the sources hold no token; name sources that do")
        if LABELS in self.open and not self.labels:
            raise ValueError("no record of the sources has a label; choose another column, or leave label out")
        if self.tokens % SHARD:
            self._close_shard()
        length = None if self.is_packed else self.length or self.longest
        is_padded = length is not None and self.tokens < self.records * length
        pad = (pad or "model") if is_padded else None
        tokenizer = self.tokenizer.with_specials(eos=False, pad=pad == "model")
        tokenizer.save(self.folder)
        seen = self.characters if self.is_packed else self.records + self.too_long
        index = Index(
            format=FORMAT,
            packing="packed" if self.is_packed else "lines",
            dtype=self.dtype.str,
            vocab_size=tokenizer.vocab_size,
            tokens=self.tokens,
            records=self.records,
            characters=self.characters,
            bytes=self.bytes,
            length=length,
            pad=pad,
            tokenizer=tokenizer.fingerprint(),
            shards=self.shards,
            lengths=None if self.is_packed else self._close(LENGTHS),
            sha256="",
            labels=Labels(list(self.labels), self._close(LABELS)) if self.labels else None,
            fitted=max(1, int(fraction * seen)) if fraction < 1 else None,
        )
        index = replace(index, sha256=index.content_hash())
        index.write(self.folder)
        return index

    def messages(self) -> list[str]:
        """Return one line about records that were left out, if there are any."""
        if not self.too_long:
            return []
        total = self.too_long + self.records
        return [f"{self.too_long:,} of {total:,} records have more than {self.length} tokens and are left out"]

    def _append(self, name: str, content: memoryview) -> None:
        if name not in self.open:
            self.open[name] = self.enter_context((self.folder / name).open("wb"))
        self.open[name].write(content)

    def _close(self, name: str) -> str:
        """Flush a file to the disk, close it and return its SHA-256."""
        self.open.pop(name).close()
        files.fsync(self.folder / name)
        return files.sha256(self.folder / name)

    def _close_shard(self) -> None:
        name, before = shard_name(len(self.shards)), SHARD * len(self.shards)
        self.shards.append(Shard(name, self.tokens - before, self._close(name)))
