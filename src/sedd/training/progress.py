"""Training progress on stderr: a bar, with messages above it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from sedd.training.loop import OnEvent


@contextmanager
def progress_bar() -> Iterator[tuple[OnEvent, Callable[[int, int], None]]]:
    """Yield the progress callbacks of training and of data preparation, (done, total); rank 0 alone prints."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    disabled = int(os.environ.get("RANK", "0")) != 0
    with Progress(*columns, console=Console(stderr=True), disable=disabled) as bar:
        yield _training_callback(bar), _preparation_callback(bar)


def _preparation_callback(bar: Progress) -> Callable[[int, int], None]:
    task = bar.add_task("preparing", visible=False, note="")
    return lambda done, total: bar.update(task, completed=done, total=total or None, visible=done != total)


def _training_callback(bar: Progress) -> OnEvent:
    task = bar.add_task("training", total=1.0, visible=False, note="")

    def on_event(kind: str, record: dict[str, Any]) -> None:
        if kind == "note":
            bar.console.print(record["text"], markup=False, highlight=False)
            return
        bar.update(task, completed=record["spent"], visible=True)
        if "loss" in record:
            note = f"step {record['step']}  {record['bits_per_char']:.3f} bits/char"
            bar.update(task, note=f"{note}  {record['tokens_per_second']:,} tok/s")
        if "bound" in record:
            bound = f"validation bound {record['bound_bits_per_char']:.3f} bits/char"
            bar.console.print(f"step {record['step']}: {bound}", markup=False, highlight=False)

    return on_event
