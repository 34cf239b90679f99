"""Writing: texts become shards of token ids, in a folder that is complete or not there."""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import UInt

from sedd.data.index import FORMAT, LABELS, LENGTHS, Index, Labels, Shard, is_prepared, settle
from sedd.data.readers import Chunk, Source, Text, chunks, expand, several
from sedd.tokenizer import Ids, Integers, Tokenizer

SHARD = 1 << 27  # tokens in a file
RECORDS = ("packed", "lines")
PADS = ("model", "ignore")
NO_LABEL = 2**16 - 1

Progress = Callable[[int, int], None]  # bytes of the sources read so far, and in all


def prepare(
    sources: Sequence[str | Path],
    out: str | Path,
    tokenizer: Tokenizer,
    *,
    records: str = "packed",
    length: int | None = None,
    pad: str | None = None,
    column: str | None = None,
    label: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Index:
    """Encode ``sources`` into the folder ``out``, which appears when it is complete and not before.

    ``packed`` makes one stream, with end-of-text between documents; ``lines`` keeps records apart, one a line or row,
    none longer than ``length`` (that of the longest, where it is not given). ``pad`` says what a shorter record is
    filled up with: ``model``, a token to be learned; ``ignore``, nothing that counts. ``label`` is the column of a
    table that says what each record is; a record in which it is empty has no label. The tokenizer gets the special
    ids that this needs, and is saved beside the tokens. ``workers`` pieces are encoded at a time, as many as there
    are cores by default; the result does not depend on their number.
    """
    _check(records, length, pad, label, workers)
    expanded = expand(sources)
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; remove it or choose another folder")
    total = sum(source.size for source in expanded)
    encoder = _Encoder(
        tokenizer.with_specials(eos=records == "packed" and several(expanded), pad=pad == "model"),
        records,
        length,
        labelled=label is not None,
    )
    try:
        with _workplace(out) as folder, contextlib.closing(_Written(folder, encoder)) as written:
            found = enumerate(chunks(expanded, column, records, label))
            for encoded in _in_order(encoder, found, workers or _cores()):
                written.add(encoded)
                if progress is not None:
                    progress(encoded.done, total)
            index = written.finish(pad)
            folder.rename(out)  # an empty folder is replaced, any other refuses
    except OSError as error:
        raise ValueError(
            f"{out} could not be written: {error.strerror or error}; choose a folder that can be, with room enough"
        ) from None
    return index


def cached(
    sources: Sequence[str | Path],
    spec: str,
    make: Callable[[], Tokenizer],
    *,
    cache: Path,
    records: str = "packed",
    length: int | None = None,
    pad: str | None = None,
    column: str | None = None,
    label: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder in ``cache`` with ``sources`` prepared so: found there by its content, or made now.

    ``make`` is asked for the tokenizer ``spec`` stands for only where there is nothing yet. The key is the content and
    the names of the files and of all settings; a data set of the Hub is known by its name alone.
    """
    _check(records, length, pad, label, workers)
    known = Path(spec)
    used = [*expand(sources), *([Source(spec, tuple(sorted(_below(known))))] if known.exists() else [])]
    files = [(file.name, _sha256(file)) for source in used for file in source.files]
    names = [source.name for source in used if not source.files]
    settings = [FORMAT, spec if not known.exists() else "", records, length, pad, column, *([label] if label else [])]
    key = hashlib.sha256(json.dumps([files, names, settings]).encode()).hexdigest()[:32]
    folder = cache / key
    if not is_prepared(folder):
        options = {"records": records, "length": length, "pad": pad, "column": column, "label": label}
        try:
            prepare(sources, folder, make(), **options, workers=workers, progress=progress)  # type: ignore[arg-type]
        except ValueError:
            if not is_prepared(folder):  # another process may have been first
                raise
    return folder


@contextlib.contextmanager
def _workplace(out: Path) -> Iterator[Path]:
    """A hidden folder beside ``out``, locked while we live; what killed processes left there goes first."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{glob.escape(out.name)}.preparing-*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)
    name = secrets.token_hex(8)
    folder, later = out.parent / f".{out.name}.new-{name}", out.parent / f".{out.name}.preparing-{name}"
    try:
        folder.mkdir()
        with _locked(folder):  # before it has the name that others look for
            folder.rename(later)
            yield later
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(later, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which the system opens when a process ends, however; OSError if another holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _below(path: Path) -> Iterator[Path]:
    return (file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(records: str, length: int | None, pad: str | None, label: str | None, workers: int | None) -> None:
    if records not in RECORDS:
        raise ValueError(f"records is {records!r}; choose one of {', '.join(RECORDS)}")
    if pad is not None and pad not in PADS:
        raise ValueError(f"pad is {pad!r}; choose one of {', '.join(PADS)}, or leave it out")
    of_records = {"pad": pad, "length": length, "label": label}
    if records == "packed" and (given := [name for name, value in of_records.items() if value is not None]):
        raise ValueError(f"{given[0]} was given, but packed records have none; leave it out or choose records lines")
    if length is not None and length < 1:
        raise ValueError(f"length is {length}; a record needs 1 token or more")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; at least 1 is needed")


class _Encoded(NamedTuple):
    ids: UInt[np.ndarray, " tokens"]
    lengths: UInt[np.ndarray, " records"]
    labels: Sequence[str | None]
    records: int
    characters: int
    bytes: int
    done: int


@final
@dataclass(frozen=True)
class _Encoder:
    """What a worker does with a chunk."""

    tokenizer: Tokenizer
    records: str
    length: int | None
    labelled: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """Wide enough for every id that is stored."""
        return np.dtype("<u2" if self.tokenizer.vocab_size <= 1 << 16 else "<u4")

    def __call__(self, numbered: tuple[int, Chunk]) -> _Encoded:
        number, chunk = numbered
        try:
            rows = self._rows(chunk.texts)
        except ValueError as error:
            where = chunk.source if self.records == "packed" else f"{chunk.source}, from record {chunk.first} on"
            raise ValueError(f"{where}: {error}") from None
        if self.records == "packed":
            count, labels = len(rows) - chunk.continues, chunk.labels
            rows, lengths = self._packed(rows, opened=number == 0 or chunk.continues), np.zeros(0, np.uint32)
        else:
            lengths = np.array([len(row) for row in rows if len(row)], np.uint32)
            count = len(lengths)
            labels = [label for row, label in zip(rows, chunk.labels, strict=False) if len(row)]
            self._refuse_longer(chunk, rows)
        ids = np.concatenate(rows, dtype=self.dtype, casting="unsafe")  # every id fits: see dtype
        return _Encoded(ids, lengths, labels, count, *_sizes(chunk.texts), chunk.done)

    def _rows(self, texts: Sequence[Text]) -> list[Ids]:
        if all(isinstance(text, str) for text in texts):
            return self.tokenizer.encode_batch([str(text) for text in texts])
        if not isinstance(self.tokenizer, Integers):
            raise ValueError(f"these are integers, which the tokenizer {self.tokenizer.kind} cannot read; choose ints")
        return [self.tokenizer.checked(row) for row in texts]

    def _packed(self, rows: list[Ids], opened: bool) -> list[Ids]:
        """The rows, end-of-text before each but a first one that needs none."""
        if self.tokenizer.eos is None:
            return rows
        eos = np.array([self.tokenizer.eos])
        return [part for row in rows for part in (eos, row)][opened:]

    def _refuse_longer(self, chunk: Chunk, rows: list[Ids]) -> None:
        longest = max(rows, key=len)
        if self.length is not None and len(longest) > self.length:
            at = chunk.first + next(i for i, row in enumerate(rows) if len(row) > self.length)
            raise ValueError(
                f"record {at} of {chunk.source} has {len(rows[at - chunk.first])} tokens and length is {self.length}; "
                f"choose {len(longest)} or more, leave length out to take the longest, or shorten the records"
            )


def _sizes(texts: Sequence[Text]) -> tuple[int, int]:
    """Characters and bytes; an integer counts as one of each."""
    return sum(map(len, texts)), sum(
        len(text) if not isinstance(text, str) or text.isascii() else len(text.encode()) for text in texts
    )


def _in_order(
    work: Callable[[tuple[int, Chunk]], _Encoded], items: Iterable[tuple[int, Chunk]], workers: int
) -> Iterator[_Encoded]:
    """The results in the order of the items, with no more than a few of them in memory.

    Threads are enough: what takes time, the `tokenizers` library and numpy, runs beside Python and not in it.
    """
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[_Encoded]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@final
class _File:
    """A file and the SHA-256 of what was written to it."""

    def __init__(self, path: Path) -> None:
        self.stream, self.digest = path.open("wb"), hashlib.sha256()

    def add(self, content: memoryview) -> None:
        self.stream.write(content)
        self.digest.update(content)

    def finish(self) -> str:
        settle(self.stream)
        return self.digest.hexdigest()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the error that matters has been raised before
            self.stream.close()


@final
class _Written:
    """The folder as it grows."""

    def __init__(self, folder: Path, encoder: _Encoder) -> None:
        self.folder, self.encoder = folder, encoder
        self.shards: list[Shard] = []
        self.open: _File | None = None
        self.room = SHARD
        self.lengths = _File(folder / LENGTHS) if encoder.records == "lines" else None
        self.labels = _File(folder / LABELS) if encoder.labelled else None
        self.names: dict[str, int] = {}
        self.tokens = self.records = self.characters = self.bytes = self.longest = 0

    def add(self, encoded: _Encoded) -> None:
        """Append a chunk."""
        ids = encoded.ids
        while ids.size:
            self.open = self.open or _File(self.folder / self._name())
            now, ids = ids[: self.room], ids[self.room :]
            self.open.add(now.data)
            self.room -= now.size
            if self.room == 0:
                self._close_shard()
        if self.lengths is not None:
            self.lengths.add(encoded.lengths.astype("<u4").data)
        if self.labels is not None:
            self.labels.add(np.array([self._number(label) for label in encoded.labels], "<u2").data)
        self.tokens += encoded.ids.size
        self.records += encoded.records
        self.characters += encoded.characters
        self.bytes += encoded.bytes
        self.longest = max(self.longest, int(encoded.lengths.max(initial=0)))

    def finish(self, pad: str | None) -> Index:
        """Save the tokenizer and the index."""
        if self.tokens == 0:
            raise ValueError("the sources hold no token; name some that do")
        if self.labels is not None and not self.names:
            raise ValueError("no record of the sources has a label; choose another column, or leave label out")
        self._close_shard()
        lengths = self.lengths.finish() if self.lengths else None
        length = (self.encoder.length or self.longest) if self.lengths else None
        if length is not None and pad is None and self.tokens < self.records * length:
            pad = "model"  # some record is shorter, and a model should know where records end
        tokenizer = self.encoder.tokenizer.with_specials(eos=False, pad=pad == "model")
        tokenizer.save(self.folder)
        index = Index(
            format=FORMAT,
            mode=self.encoder.records,
            dtype=self.encoder.dtype.str,
            vocab_size=tokenizer.vocab_size,
            tokens=self.tokens,
            records=self.records,
            characters=self.characters,
            bytes=self.bytes,
            length=length,
            pad=pad,
            tokenizer=tokenizer.fingerprint(),
            shards=tuple(self.shards),
            lengths=lengths,
            sha256="",
            labels=Labels(tuple(self.names), self.labels.finish()) if self.labels else None,
        )
        index = replace(index, sha256=index.content())
        index.write(self.folder)
        return index

    def close(self) -> None:
        """Let go of files that a failure has left open."""
        for file in (self.open, self.lengths, self.labels):
            if file is not None:
                file.close()

    def _number(self, label: str | None) -> int:
        """Labels are numbered as they come."""
        number = NO_LABEL if label is None else self.names.setdefault(label, len(self.names))
        if len(self.names) > NO_LABEL:
            raise ValueError(f"there are more than {NO_LABEL} labels; choose a column that says what kind a record is")
        return number

    def _name(self) -> str:
        return f"tokens-{len(self.shards):05d}.bin"

    def _close_shard(self) -> None:
        if self.open is not None:
            self.shards.append(Shard(self._name(), SHARD - self.room, self.open.finish()))
            self.open, self.room = None, SHARD
