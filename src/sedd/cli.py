"""The command line. Data goes to stdout, everything else to stderr; torch is imported by the commands."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from sedd import __version__

app = typer.Typer(
    help="Score entropy discrete diffusion: learn the ratios of discrete data, follow them back from noise.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
lab = typer.Typer(help="Demonstrations on laws small enough to know everything about.", no_args_is_help=True)
app.add_typer(lab, name="lab")
data = typer.Typer(help="Corpora, as token ids on disk.", no_args_is_help=True)
app.add_typer(data, name="data")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sedd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@lab.command("bound")
def lab_bound(
    vocab_size: Annotated[int, typer.Option(help="How many tokens there are.")] = 3,
    length: Annotated[int, typer.Option(help="How long a sequence is.")] = 3,
    seed: Annotated[int, typer.Option(help="Which random law.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record a line.")] = False,
) -> None:
    """The likelihood bound of the exact score equals the entropy: every process, every schedule.

    A random law of short sequences is written down; its true score at every noise level is known by
    enumeration, and so is every term of the bound. The gap is what quadrature and rounding leave.
    """
    from sedd import build
    from sedd import lab as demonstrations

    rows = demonstrations.bound(vocab_size, length, seed)
    total = len(build.PROCESSES) * len(build.SCHEDULES)
    shown = list(track(rows, "enumerating", total, console=Console(stderr=True), transient=True))
    if as_json:
        for row in shown:
            print(json.dumps(row._asdict()))
        return
    columns = [name for name in shown[0]._fields if name != "bound"]
    title = f"nats a sequence, {vocab_size} tokens, length {length}, seed {seed}"
    table = Table(*columns, box=None, pad_edge=False, title=title)
    for row in shown:
        terms = (f"{round(getattr(row, name), 6) + 0.0:.6f}" for name in columns[2:-1])  # + 0: no −0
        table.add_row(row.process, row.schedule, *terms, f"{row.gap:+.1e}")
    Console().print(table)


@data.command("prepare")
def data_prepare(
    sources: Annotated[
        list[str],
        typer.Argument(help="Files (.txt .jsonl .csv .parquet .npy, also compressed), folders, or hf:NAME[:SPLIT]."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, chars, bpe:SIZE, gpt2, ints, or the path of a tokenizer.json.")
    ] = "bytes",
    records: Annotated[
        str, typer.Option(help="packed: one stream, cut into blocks; lines: a record a line or row.")
    ] = "packed",
    length: Annotated[
        int | None, typer.Option(help="Tokens in a record of lines; the longest where it is left out.")
    ] = None,
    pad: Annotated[
        str | None, typer.Option(help="Padding of shorter records: model, to be learned; ignore, not to count.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="The column that holds the text.")] = None,
    workers: Annotated[int | None, typer.Option(help="Pieces encoded at a time; as many as cores by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record.")] = False,
) -> None:
    """Turn a corpus into token shards with an index: memory-mapped, hashed, the tokenizer beside them."""
    from sedd import build
    from sedd import data as corpora

    console = Console(stderr=True)
    with Progress(
        *Progress.get_default_columns(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("fitting the tokenizer", total=None)
        made = build.tokenizer(tokenizer, lambda: corpora.documents(sources, column, records))
        if not made.is_exact:
            console.print(f"note: {tokenizer} changes some texts; what it decodes may differ from what it was given")
        bar.update(task, description="encoding")
        index = corpora.prepare(
            sources,
            out,
            made,
            records=records,
            length=length,
            pad=pad,
            column=column,
            workers=workers,
            progress=lambda done, total: bar.update(task, completed=done, total=total or None),
        )
    row = {
        "folder": str(out),
        "tokens": index.tokens,
        "records": index.records,
        "vocab_size": index.vocab_size,
        "bytes_per_token": round(index.bytes / index.tokens, 4),
        "length": index.length,
        "pad": index.pad,
        "sha256": index.sha256,
    }
    if as_json:
        print(json.dumps(row))
    else:
        print(
            f"{out}: {index.tokens} tokens in {index.records} records, {row['bytes_per_token']:.4f} bytes a token, "
            f"vocabulary of {index.vocab_size}"
        )


def main() -> None:
    """Run the command line; a refusal is a sentence and exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"sedd: {error}", file=sys.stderr)
        raise SystemExit(2) from None
