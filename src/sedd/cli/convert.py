"""``sedd import`` and ``sedd export``: convert published checkpoints."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sedd.cli.root import AsJson, ModelFolder, app, print_record
from sedd.config import check_choice

FORMATS = ("sedd", "radd", "mdlm")
"""The published formats, the keys of `hub.convert.LAYOUTS`."""


@app.command("import")
def import_checkpoint(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, weights file, or Hub id (owner/name).")],
    out: Annotated[Path, typer.Option(help="Model folder to write; it must be new or empty.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="gpt2, a tokenizer.json, or a folder with one; by default the one beside SRC.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a published SEDD, RADD or MDLM checkpoint into a model folder.

    The format is recognized from the files. Pickles are read without executing code, or refused. A run of SEDD's or
    RADD's own training code (checkpoint.pth and .hydra/config.yaml) is read too. All other commands accept the folder.
    Example:
    - `sedd import owner/name --out model`
    - `sedd sample model`
    """
    from sedd import checkpoint, hub

    checkpoint.require_empty(out)
    if not Path(source).exists() and not hub.is_repo_id(source):
        raise ValueError(f"{source} does not exist; give a folder, a file or a Hub id such as owner/name")
    from sedd.hub import convert

    with Console(stderr=True).status("reading"):
        local = Path(source)
        if not local.exists() and hub.is_repo_id(source):
            local = hub.download(source, revision, pickles=True)
        found = convert.read_published(local)
        tokens = hub.find_tokenizer(found, tokenizer)
        folder = convert.save_model_folder(found, tokens, out, hub.source_name(source))
    if tokens is None:
        print("sedd: no tokenizer was found, tokens are shown as integers; name one with --tokenizer", file=sys.stderr)
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
    print_record(record, as_json)


@app.command()
def export(
    model: ModelFolder,
    out: Annotated[Path, typer.Option(help="Folder to write; it must be new or empty.")],
    format: Annotated[
        str | None, typer.Option(help="sedd, radd or mdlm; by default the one that fits the model.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model of the reference architecture in a published format: config.json and model.safetensors."""
    from sedd import checkpoint

    checkpoint.require_empty(out)
    if format is not None:
        check_choice("format", format, FORMATS)
    from sedd.hub import convert

    with Console(stderr=True).status("writing"):
        layout = convert.export_model(model, out, format)
    print_record({"checkpoint": str(out), "layout": layout.name}, as_json)
