"""``sedd import`` and ``sedd export``: published checkpoints, from there and back."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sedd.cli.root import AsJson, app, show


@app.command("import")
def bring(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A folder, a file of weights, or a Hub id: owner/name.")],
    out: Annotated[Path, typer.Option(help="The model folder to write; it must be new or empty.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="gpt2, a tokenizer.json, or a folder with one; else what lies beside SRC.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Of a Hub id: a branch, a tag or a commit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a model folder of a published checkpoint: SEDD, RADD or MDLM.

    The layout is recognised from the files. Pickles are read without running anything in them, or refused. Every other
    command then works: `sedd import owner/name --out model`, `sedd sample model`.
    """
    from sedd import hub
    from sedd.hub import convert

    convert.free(out)
    with Console(stderr=True).status("reading"):
        local = Path(source)
        if not local.exists() and hub.is_id(source):
            local = hub.download(source, revision, pickles=True)
        found = convert.read(local)
        tokens = hub.tokenizer(found, tokenizer)
        folder = convert.save(found, tokens, out, hub.source_name(source))
    if tokens is None:
        print("sedd: no tokenizer was found, so its tokens are integers; name one by --tokenizer", file=sys.stderr)
    record = {
        "model": str(out),
        "layout": found.layout.name,
        "parameters": found.parameters,
        "entries": len(found.weights["ema"]),
        "vocab_size": found.vocab_size,
        "process": found.config.noise.process,
        "time_conditioning": found.config.time_conditioning,
        "tokenizer": "ints" if tokens is None else tokens.kind,
        "weights": " and ".join(found.weights),
        "bytes": (folder / "ema.safetensors").stat().st_size,
    }
    show(record, as_json)


@app.command()
def export(
    model: Annotated[Path, typer.Argument(help="A model folder, the folder of a run, or one of its checkpoints.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must be new or empty.")],
    format: Annotated[str | None, typer.Option(help="sedd, radd or mdlm; by default the one that fits.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model of the reference network in a published layout: config.json and model.safetensors."""
    from sedd.hub import convert

    with Console(stderr=True).status("writing"):
        layout = convert.write(model, out, format)
    show({"checkpoint": str(out), "layout": layout.name}, as_json)
