"""The root of the command line, and what its commands share."""

import json
from typing import Annotated, Any

import typer

from sedd import __version__

app = typer.Typer(
    help="Score entropy discrete diffusion: learn the ratios of discrete data, follow them back from noise.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def _version(wanted: bool | None) -> None:
    if wanted:
        print(f"sedd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool | None, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = None,
) -> None:
    pass


def show(record: dict[str, Any], as_json: bool) -> None:
    """A line for every entry, or one JSON record."""
    if as_json:
        print(json.dumps(record))
        return
    for name, value in record.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if isinstance(value, float) else str(value)
        print(f"{name.replace('_', ' '):26s} {shown}")
