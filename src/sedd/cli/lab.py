"""``sedd lab``: demonstrations."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sedd.cli.root import app

lab = typer.Typer(help="Demonstrations on laws small enough to know everything about.", no_args_is_help=True)
app.add_typer(lab, name="lab")


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
