"""Progress on stderr: a bar on a terminal, with messages above it; elsewhere a line now and then.

All commands show their progress by this module.
"""

import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from sedd.extras import install_hint
from sedd.runtime.launch import find_launch
from sedd.schema import check_choice
from sedd.terminal import visible
from sedd.training.config import RunConfig

if TYPE_CHECKING:
    from sedd.training.loop import OnEvent

OnProgress = Callable[[int, int], None]  # called with the work done and the total
MIN_SECONDS, MAX_SECONDS = 10.0, 60.0  # least and most time between two lines of progress where there is no terminal


class LineTimer:
    """Decides when a line of progress is due: at each tenth of the work, but at most and at least so often."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.tenth, self.last = clock, 0, clock()
        self.start, self.begun = self.last, 0.0

    def is_due(self, fraction: float) -> bool:
        """Return whether to print a line now that this fraction of the work is done."""
        waited, tenth = self.clock() - self.last, int(10 * fraction)
        if waited < MIN_SECONDS or (tenth == self.tenth and waited < MAX_SECONDS):
            return False
        self.last, self.tenth = self.clock(), tenth
        return True

    def describe(self, fraction: float) -> str:
        """Return the percentage that is done, and the time that is left at the average speed."""
        if not self.begun < fraction < 1:
            return f"{fraction:.0%}"
        left = (self.clock() - self.start) * (1 - fraction) / (fraction - self.begun)
        return f"{fraction:.0%}, {format_duration(left)} left"


def format_duration(seconds: float) -> str:
    """Format a duration: 41.8 s, 5 min 2 s, 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def progress_on_stderr(label: str, shown: bool = True) -> Iterator[OnProgress]:
    """Show the progress of one piece of work; yields the callback."""
    console, timer = Console(stderr=True), LineTimer()
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(escape(visible(label)), total=None)

        def on_progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if shown and not console.is_terminal and total and timer.is_due(done / total):
                _print_line(console, f"{label}: {timer.describe(done / total)}")

        yield on_progress


@contextmanager
def progress_bar() -> Iterator[tuple["OnEvent", OnProgress]]:
    """Yield the progress callbacks of training and of data preparation; rank 0 alone prints."""
    note = TextColumn("{task.fields[note]}")
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), note)
    console, is_main = Console(stderr=True), find_launch().rank == 0
    with (
        progress_on_stderr("preparing the data", shown=is_main and not console.is_terminal) as print_preparation,
        Progress(*columns, console=console, disable=not (is_main and console.is_terminal)) as bar,
    ):
        preparing = bar.add_task("preparing", visible=False, note="")

        def show_preparation(done: int, total: int) -> None:
            bar.update(preparing, completed=done, total=total or None, visible=done != total)

        on_event = _training_callback(bar) if is_main else lambda kind, record: None
        yield on_event, show_preparation if console.is_terminal else print_preparation


def _training_callback(bar: Progress) -> "OnEvent":
    task, timer, latest = bar.add_task("training", total=1.0, visible=False, note=""), LineTimer(), ""
    has_begun = False

    def on_event(kind: str, record: dict[str, Any]) -> None:
        with suppress(OSError):  # of a terminal that was closed: the run must be saved
            _print_line(bar.console, record["text"]) if kind == "note" else show(record)

    def show(record: dict[str, Any]) -> None:
        nonlocal latest, has_begun
        if not has_begun:  # a resumed run begins with a part of its work done
            timer.start, timer.begun, has_begun = timer.clock(), record["spent"], True
        if "loss" in record:
            loss = _describe_bits(record, "bits_per_char", "loss")
            latest = f"step {record['step']}  {loss}  {record['tokens_per_second']:,} tok/s"
        bar.update(task, completed=record["spent"], visible=True, note=latest)
        if "bound" in record:
            bound = _describe_bits(record, "bound_bits_per_char", "bound")
            _print_line(bar.console, f"step {record['step']}: validation bound {bound}")
        if latest and not bar.console.is_terminal and (record["spent"] >= 1 or timer.is_due(record["spent"])):
            _print_line(bar.console, f"{timer.describe(record['spent'])}: {latest}")

    return on_event


def _describe_bits(record: dict[str, Any], bits: str, nats: str) -> str:
    """Return bits per character or, where the tokens are not text, nats per token."""
    return f"{record[bits]:.3f} bits/char" if record.get(bits) is not None else f"{record[nats]:.3f} nats/token"


def _print_line(console: Console, text: str) -> None:
    console.print(visible(text), markup=False, highlight=False, soft_wrap=True)


def import_tracker(name: str) -> Any:
    """Import a tracker; reject one that is unknown or not installed."""
    check_choice("track", name, ("wandb", "trackio"))
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"{name} is not installed; install it: {install_hint(name)}") from None


@contextmanager
def track_run(name: str | None, config: RunConfig, out: Path, on_event: "OnEvent") -> Iterator["OnEvent"]:
    """Yield a callback that calls ``on_event`` and, unless ``name`` is None, sends what is measured to a tracker.

    The tracker's run has the name of the folder ``out``, in the project ``sedd`` unless the tracker's own settings name
    another, and the configuration of the run. Only the first process sends.
    """
    if name is None or find_launch().rank != 0:
        yield on_event
        return
    tracker = import_tracker(name)
    project = os.environ.get(f"{name.upper()}_PROJECT", "sedd")
    tracker.init(project=project, name=out.resolve().name, config=config.as_dict())

    def on_tracked_event(kind: str, record: dict[str, Any]) -> None:
        on_event(kind, record)
        if kind == "log" and ("loss" in record or "bound" in record):
            numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k not in ("step", "spent")}
            tracker.log(numbers, step=record["step"])

    try:
        yield on_tracked_event
    finally:
        tracker.finish()
