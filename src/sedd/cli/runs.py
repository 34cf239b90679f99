"""``sedd runs``: list the runs below a folder."""

import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sedd.cli.root import AsJson, app
from sedd.files import read_json
from sedd.schema import is_of_type
from sedd.terminal import visible

Run = dict[str, Any]
COLUMNS = ("run", "data", "objective", "parameters", "step", "best_bound", "date")


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder to search, with all folders in it.")] = Path("."),
    as_json: AsJson = False,
) -> None:
    """List the runs below a folder, the newest first: data, parameters, steps, best validation bound, date.

    The bound is in nats per token; runs on different data or with different tokenizers cannot be compared by it.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name one that holds runs")
    found = sorted((_describe(path, folder) for path in _find(folder)), key=lambda run: run["date"], reverse=True)
    if as_json:
        for run in found:
            print(json.dumps(run))
        return
    if not found:
        raise ValueError(f"there is no run in {folder} or below it; train one with: sedd train FILE --out {folder}/run")
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name.replace("_", " "), overflow="fold")
    for run in found:
        table.add_row(*(Text(visible(_cell(run[name]), line_ends=False)) for name in COLUMNS))
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)  # no wrapping in files


def _find(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs; hidden folders, and those inside a run, are left out."""
    for name, folders, files in os.walk(folder):
        if "config.json" in files and ("log.jsonl" in files or "checkpoints" in folders):
            folders.clear()
            yield Path(name)
        folders[:] = sorted(below for below in folders if not below.startswith("."))


def _describe(path: Path, root: Path) -> Run:
    """Read what a run has stored; a run that is damaged or has no checkpoint yet has gaps."""
    config, log = _read_json(path / "config.json"), _read_log(path / "log.jsonl")
    newest = max((path / "checkpoints").glob("step-*"), default=path)
    state = _read_json(newest / "state.json")
    match config:
        case {"data": {"sources": [*sources]}}:
            data = ", ".join(Path(str(source)).name for source in sources)
        case _:
            data = ""
    changed = max(file.stat().st_mtime for file in (path / "config.json", path / "log.jsonl") if file.exists())
    return {
        "run": str(path.relative_to(root)) if path != root else path.resolve().name,
        "folder": str(path),
        "data": data,
        "objective": config.get("objective"),
        "parameters": _count_parameters(newest),
        "step": max([_number(state, "step") or 0, *(record["step"] for record in log[-1:])]),
        "best_bound": _number(state, "best"),
        "date": datetime.fromtimestamp(changed).isoformat(" ", "minutes"),
    }


def _number(state: Run, name: str) -> int | float | None:
    return state[name] if is_of_type(state.get(name), float) else None


def _read_json(path: Path) -> Run:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_log(path: Path) -> list[Run]:
    from sedd.runtime.run_log import read_log

    try:
        return read_log(path.parent)
    except ValueError:
        return []


def _count_parameters(checkpoint_folder: Path) -> int | None:
    from sedd.training import checkpoint

    try:
        return checkpoint.read_header(checkpoint_folder).parameters
    except ValueError:
        return None


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else str(value)
