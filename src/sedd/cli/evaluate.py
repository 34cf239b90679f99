"""``sedd eval`` and ``sedd score``: likelihoods, by a protocol that has a name."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sedd.cli.root import AsJson, app

if TYPE_CHECKING:
    from sedd.evaluation import Corpus, Protocol
    from sedd.factory import LoadedModel
    from sedd.likelihood.estimate import OnProgress

ModelFolder = Annotated[Path, typer.Argument(help="The folder of a run, or one of its checkpoints.")]
ProtocolName = Annotated[
    str | None, typer.Option("--protocol", help="How text is cut and counted: strict, held-out, text8p, sedd, mdlm.")
]
Draws = Annotated[
    int | None, typer.Option(help="Looks at each sequence, an even number; they decide the error, not the value.")
]
Batch = Annotated[int, typer.Option(help="Looks at a time on each process; decides speed and nothing else.")]
Seed = Annotated[int, typer.Option(help="Decides times and noise.")]
EstimatorName = Annotated[
    str | None, typer.Option("--estimator", help="bound; any-order, forward, backward, random for denoisers of masks.")
]
LabelName = Annotated[
    str | None, typer.Option("--label", help="Score given this label; without it, as if nothing were known.")
]


@contextmanager
def watched(label: str, shown: bool) -> "Iterator[OnProgress]":
    """A progress bar on stderr, for what is told how far it is."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@app.command("eval")
def evaluate(
    model: ModelFolder,
    data: Annotated[
        str | None,
        typer.Argument(help="A file, a folder, or prepared data; without it, what the run kept from its training."),
    ] = None,
    protocol: ProtocolName = None,
    suite: Annotated[str | None, typer.Option(help="zero-shot: every data set of the protocol, from a folder.")] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Which benchmark a file is, or which of a suite: lambada, ptb. Repeatable.")
    ] = None,
    estimator: EstimatorName = None,
    draws: Draws = None,
    batch: Batch = 16,
    seed: Seed = 0,
    label: LabelName = None,
    column: Annotated[str | None, typer.Option(help="The column that holds the text.")] = None,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="A file for the record as JSON; of a suite, one a line.")] = None,
) -> None:
    """The likelihood of a data set: the bound, its three terms, its standard error, and what they depend on.

    Examples: `sedd eval run test.txt`, `sedd eval run text8.xz --protocol text8p --json`,
    `sedd eval run corpora --suite zero-shot --protocol sedd`; on many processes
    `torchrun --nproc-per-node 8 -m sedd eval run test.txt`, with the same result.
    """
    from sedd import evaluation, factory
    from sedd.runtime import distributed

    if out is not None and not out.parent.is_dir():
        raise ValueError(f"{out.parent} does not exist; make it, or choose another --out")
    chosen = evaluation.get_protocol(protocol or ("strict" if data else "held-out"))
    look = partial(evaluation.evaluate, estimator=estimator, draws=draws, batch=batch, seed=seed)
    with distributed.process_group() as ranks:
        loaded = factory.labelled(factory.load(model, device=str(ranks.device)), label)
        published = chosen.published_vocab_size
        if published not in (None, size := loaded.tokenizer.vocab_size) and ranks.is_main:
            note = f"published numbers of protocol {chosen.name} count tokens of a vocabulary of {published:,}"
            print(f"sedd: {note}; this model has {size:,}: compare bits_per_char alone", file=sys.stderr)
        records = []
        for corpus in corpora(loaded, data, chosen, suite, dataset, column):
            with watched(corpus.dataset or "evaluating", shown=ranks.is_main) as on_progress:
                records.append(look(loaded, corpus, chosen, ranks, on_progress=on_progress))
        first = ranks.is_main
    if first:
        if out is not None:
            out.write_text("".join(json.dumps(record) + "\n" for record in records))
        _print(records, as_json, as_table=suite is not None)


def corpora(
    loaded: "LoadedModel",
    data: str | None,
    protocol: "Protocol",
    suite: str | None = None,
    dataset: list[str] | None = None,
    column: str | None = None,
) -> "Iterator[Corpus]":
    """What was asked to be scored; all files of a suite are found before the first is."""
    from sedd import evaluation
    from sedd.training import prepare_data

    if suite is not None:
        names = evaluation.suite_datasets(suite, protocol, dataset)
        paths = [protocol.find_file(Path(data or "."), name) for name in names]
        for path, name in zip(paths, names, strict=True):
            yield evaluation.read_corpus(str(path), protocol, loaded, name, column)
    elif dataset and len(dataset) > 1:
        raise ValueError(f"dataset is {' and '.join(dataset)}; a file is one of them, several go with --suite")
    elif protocol.uses_validation_split:
        if data is not None:
            raise ValueError(f"protocol {protocol.name} scores what the run kept from its own data; leave DATA out")
        yield evaluation.validation_corpus(prepare_data(loaded.config), loaded)
    elif data is None:
        raise ValueError(
            f"protocol {protocol.name} needs DATA: name a file, or leave --protocol out to score what the run kept"
        )
    else:
        yield evaluation.read_corpus(data, protocol, loaded, dataset[0] if dataset else None, column)


DESCRIBED = (
    *("bits_per_token", "bits_per_char", "bits_per_byte", "ppl_bound", "stderr_population_nats_per_token"),
    *("tokens", "sequences", "draws", "seed", "protocol", "split", "data"),
)
SHOWN = ("dataset", "split", "tokens", "ppl_bound", "nats_per_token", "stderr_nats_per_token", "bits_per_char")


def _print(records: list[dict[str, Any]], as_json: bool, as_table: bool) -> None:
    from sedd import evaluation

    rows = evaluation.likelihood_table(records, SHOWN)
    if as_json:
        for record in records:
            print(json.dumps(record))
    elif as_table:
        shown = Table(*(name.replace("_", " ") for name in SHOWN), box=None, title=f"protocol {records[0]['protocol']}")
        for row in rows:
            shown.add_row(*("" if value is None else str(value) for value in row))
        Console().print(shown)
    else:
        _describe(records[0])


def _describe(record: dict[str, Any]) -> None:
    """A record for people: what it says first, then what it depends on."""
    kind = "exactly" if record["is_exact"] else "at most" if None not in record["terms"].values() else "as published,"
    error = "" if record["is_exact"] else f" ± {record['stderr_nats_per_token']:.5f}"
    print(f"{kind} {record['nats_per_token']:.5f}{error} nats a token")
    for name in DESCRIBED:
        print(f"{name.replace('_', ' '):34s} {record[name]}")
    for name, value in record["terms"].items():
        print(f"{name:34s} {'not counted' if value is None else value}")


@app.command()
def score(
    model: ModelFolder,
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; - reads them from stdin, one a line.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file of texts, one a line.")] = None,
    estimator: EstimatorName = None,
    draws: Draws = None,
    batch: Batch = 16,
    seed: Seed = 0,
    label: LabelName = None,
    as_json: AsJson = False,
) -> None:
    """The likelihood of each text by itself, a line each; what is longer than the model reads is refused.

    Example: `sedd score run "the cat sat on the mat" "mat the on sat cat the"`. A text's number depends on no other.
    """
    from sedd import evaluation, factory
    from sedd.runtime import distributed

    given = _lines(texts, file)
    look = partial(evaluation.evaluate, estimator=estimator, draws=draws, batch=batch, seed=seed)
    with distributed.process_group() as ranks:
        loaded = factory.labelled(factory.load(model, device=str(ranks.device)), label)
        for text, corpus in zip(given, evaluation.text_corpora(given, loaded), strict=True):
            record = look(loaded, corpus, evaluation.SINGLE_TEXT, ranks)
            if ranks.is_main:
                _score_line({"text": text, **record}, as_json)


def _lines(texts: list[str] | None, file: Path | None) -> list[str]:
    found = [line for text in texts or [] for line in (sys.stdin.read().splitlines() if text == "-" else [text])]
    if file is not None:
        if not file.is_file():
            raise ValueError(f"{file} does not exist; name a file of texts, one a line")
        found += file.read_text(encoding="utf-8").splitlines()
    if not found:
        raise ValueError("no text was given; name some, or --file FILE, or - to read them from stdin")
    return found


def _score_line(record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(record), flush=True)
        return
    error = "exact" if record["is_exact"] else f"± {record['stderr_nats_per_token']:.5f}"
    nats = record["nats_per_token"]
    print(f"{nats:9.5f} {error} nats a token, {record['tokens']} tokens: {record['text']}", flush=True)
