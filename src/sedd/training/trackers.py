"""Experiment trackers beside the log of a run: Weights & Biases or trackio, through the progress callback.

Both are optional, and have the functions ``init``, ``log`` and ``finish``. No torch here.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sedd.extras import install_hint
from sedd.runtime.launch import find_launch
from sedd.training.config import RunConfig

if TYPE_CHECKING:
    from sedd.training.loop import OnEvent

TRACKERS = ("wandb", "trackio")


def import_tracker(name: str) -> Any:
    """Import a tracker; one that is unknown or not installed is refused."""
    if name not in TRACKERS:
        raise ValueError(f"track is {name!r}; choose one of {', '.join(TRACKERS)}")
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"{name} is not installed; install it: {install_hint(name)}") from None


@contextmanager
def track_run(name: str | None, config: RunConfig, out: Path, on_event: "OnEvent") -> Iterator["OnEvent"]:
    """Yield a progress callback that calls ``on_event`` and sends what is measured to a tracker; None: the former only.

    The tracker's run has the name of the folder ``out``, in the project ``sedd`` unless the tracker's own settings name
    another, and the configuration of the run. Of several processes the first alone sends.
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
