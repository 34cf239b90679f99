"""``sedd data``: corpora, as token ids on disk."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from sedd.cli.root import app

data = typer.Typer(help="Corpora, as token ids on disk.", no_args_is_help=True)
app.add_typer(data, name="data")


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
    label: Annotated[str | None, typer.Option(help="The column that says what each record is; for lines.")] = None,
    workers: Annotated[int | None, typer.Option(help="Pieces encoded at a time; as many as cores by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record.")] = False,
) -> None:
    """Turn a corpus into token shards with an index: memory-mapped, hashed, the tokenizer beside them."""
    from sedd import data as corpora
    from sedd.tokenizer import named

    console = Console(stderr=True)
    with Progress(
        *Progress.get_default_columns(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("fitting the tokenizer", total=None)
        made = named(tokenizer, lambda: corpora.documents(sources, column, records))
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
            label=label,
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
        **({"labels": index.labels.names} if index.labels else {}),
        "sha256": index.sha256,
    }
    if as_json:
        print(json.dumps(row))
    else:
        print(
            f"{out}: {index.tokens} tokens in {index.records} records, {row['bytes_per_token']:.4f} bytes a token, "
            f"vocabulary of {index.vocab_size}"
        )
