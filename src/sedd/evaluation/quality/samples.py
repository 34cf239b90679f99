"""Samples: drawn from a model, or read from a file with what they cost."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from sedd import checkpoint, generate
from sedd.evaluation.quality.judge import Judge, OnProgress
from sedd.factory import LoadedModel
from sedd.sampling import Prompt
from sedd.tokenizer import Ids

CARRIED = (
    *("sampler", "steps", "grid", "seed", "temperature", "top_p", "top_k", "options", "label", "guidance"),
    *("draw_precision", "length", "model", "model_sha256"),
)
"""How samples were drawn: what `generate.SamplingRun.facts` says, and of which model."""


class Sample(NamedTuple):
    """A text, or the ids of one, or both."""

    text: str | None
    ids: list[int] | None


@final
@dataclass(frozen=True)
class Samples:
    """Samples of one kind, and what each cost in the mean; None where nobody said."""

    rows: Sequence[Sample]
    source: str
    nfe: float | None = None
    """How often the network ran for one of them."""
    seconds: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError(f"{self.source} holds no sample; name a file that does")

    def checked(self) -> "Samples":
        """Itself, if no sample is empty: none is left out unseen."""
        for number, row in enumerate(self.rows):
            if not (row.ids if row.text is None else row.text):
                raise ValueError(
                    f"sample {number} of {self.source} is empty; nothing can be said of it, and leaving it out would "
                    "flatter the rest"
                )
        return self


def draw(
    loaded: LoadedModel, job: generate.SamplingRun, prompt: Prompt, batch: int, source: str, on_progress: OnProgress
) -> Samples:
    """Samples of a model, as many as the canvas has rows."""
    rows: list[Sample] = []
    (count, length), device = prompt.given.shape, next(loaded.network.parameters()).device
    steps = len(job.times) - 1 if len(job.times) else length
    for first in range(0, count, batch):
        piece = prompt.rows(slice(first, first + batch)).to(device)
        for last in job.states(piece, first):
            on_progress(first * steps + len(piece.given) * min(last.step, steps), count * steps)
        rows += (Sample(loaded.tokenizer.decode(row.ids), row.ids) for row in generate.finished(last, piece))
    facts = {"model": str(loaded.folder), "model_sha256": checkpoint.sha256(loaded.folder / "ema.safetensors")}
    done = job.tally
    return Samples(rows, source, done.rows / count, done.seconds / count, job.facts() | {"length": length} | facts)


def lines(samples: Samples) -> Iterator[str]:
    """The file that `read` reads, a line at a time."""
    spent = {"calls": samples.nfe, "seconds": samples.seconds, **samples.facts}
    for number, row in enumerate(samples.rows):
        yield json.dumps({"text": row.text, "ids": row.ids, "sample": number, **spent})


def read(path: Path) -> Samples:
    """JSON records as ``sedd sample --json`` writes them, text with a sample a line, or a folder with one a file."""
    return _read(path).checked()


def _read(path: Path) -> Samples:
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise ValueError(f"{path} holds neither a model nor .txt files, one for each sample; name what does")
        return Samples([Sample(text_of(file), None) for file in files], str(path))
    if (records := records_of(path)) is None:
        return Samples([Sample(line, None) for line in _lines(text_of(path))], str(path))
    return Samples(
        [_sample(record, path) for record in records],
        str(path),
        _mean(records, "calls"),
        _mean(records, "seconds"),
        {name: _common(records, name) for name in CARRIED},
    )


def records_of(path: Path) -> list[Any] | None:
    """What a JSON file holds, in one list or a line each; None if its name says that it is text."""
    if path.suffix not in (".json", ".jsonl"):
        return None
    text = text_of(path)
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        return [_parsed(line, path) for line in _lines(text) if line.strip()]
    return whole if isinstance(whole, list) else [whole]


def text_of(path: Path) -> str:
    """A text file, or a sentence."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} could not be read: {error}") from None


def _lines(text: str) -> list[str]:
    """Line breaks alone end a line: a sample may hold any other separator."""
    return text.removesuffix("\n").split("\n") if text else []


def _parsed(line: str, path: Path) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON, neither as a whole nor line by line: {error}") from None


def _sample(record: Any, path: Path) -> Sample:
    if isinstance(record, str):
        return Sample(record, None)
    text, ids = (record.get(name) for name in ("text", "ids")) if isinstance(record, dict) else (None, None)
    is_row = isinstance(ids, list) and all(isinstance(id, int) for id in ids)
    if not isinstance(text, str | None) or not (is_row or ids is None) or (text is None and ids is None):
        raise ValueError(
            f"{path} holds a record without text or ids; samples are strings, or records as sedd sample --json makes"
        )
    return Sample(text, ids)


def _mean(records: Sequence[Any], name: str) -> float | None:
    found = [record.get(name) if isinstance(record, dict) else None for record in records]
    numbers = [value for value in found if isinstance(value, int | float)]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(found) else None


def _common(records: Sequence[Any], name: str) -> Any:
    """What all records say alike."""
    found = [record.get(name) if isinstance(record, dict) else None for record in records]
    return found[0] if all(value == found[0] for value in found) else None


class Rows(NamedTuple):
    """Samples in the tokens of a judge."""

    ids: list[Ids]
    of: str
    """``text``, read by the judge, or ``ids``, taken as they were drawn."""
    truncated: int


def rows(samples: Samples, judge: Judge, *, by_ids: bool = False, truncate: bool = False) -> Rows:
    """The judge's tokens: of the texts, or the ids of the samples themselves if they mean the same to the judge."""
    texts = [row.text for row in samples.checked().rows if row.text is not None]
    by_ids = by_ids or not texts
    found = _taken(samples, judge) if by_ids else _encoded(texts, samples, judge)
    most = judge.context or max(map(len, found))
    for number, row in enumerate(found):
        if len(row) > most and not truncate:
            raise ValueError(
                f"sample {number} of {samples.source} has {len(row):,} tokens of the judge, which reads {most:,}; "
                "sample shorter texts with --length, choose another judge, or cut what is longer with --truncate"
            )
        if len(row) <= judge.skips_first:
            raise ValueError(
                f"sample {number} of {samples.source} has {len(row)} tokens of the judge, none of which is counted; "
                "give longer texts, or count the first with --first-token scored"
            )
    cut = sum(len(row) > most for row in found)
    return Rows([row[:most] for row in found], "ids" if by_ids else "text", cut)


def _encoded(texts: list[str], samples: Samples, judge: Judge) -> list[Ids]:
    if len(texts) < len(samples.rows):
        raise ValueError(f"{samples.source} has text for some samples and none for others; give it for all")
    try:
        found = judge.encode(texts)
    except ValueError as error:
        raise ValueError(f"judge {judge.name} cannot read {samples.source}: {error}") from None
    return found


def _taken(samples: Samples, judge: Judge) -> list[Ids]:
    """The samples' own ids, which must be tokens of the judge and, where there is text, mean it."""
    found = []
    for number, row in enumerate(samples.rows):
        what = f"sample {number} of {samples.source}"
        if row.ids is None:
            raise ValueError(f"{what} has no ids; leave out --ids, and its text is read")
        if not all(0 <= id < judge.vocab_size for id in row.ids):
            raise ValueError(
                f"{what} holds id {max(row.ids)} and judge {judge.name} has {judge.vocab_size:,} tokens: its tokenizer "
                "is another; give the text"
            )
        if row.text is not None and judge.decode(row.ids) != row.text:
            raise ValueError(
                f"the ids of {what} mean another text to judge {judge.name}, whose tokenizer is another; score the "
                "text, without --ids"
            )
        found.append(np.asarray(row.ids, dtype=np.int64))
    return found
