"""What the studies share: commands of ``sedd`` in one process, results stored at once, a limit of seconds, figures.

A study is a list of rows that are measured one after the other. Each is stored in a JSON file as soon as it is
measured; started again, a study skips the rows that are there. So it can be made in parts on a machine that is lent by
the minute.
"""

import contextlib
import datetime
import gc
import hashlib
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from box import describe_machine, shell
from matplotlib.figure import Figure

from sedd import plot
from sedd.cli import main


class Printed(NamedTuple):
    """What a command printed, and how long it took."""

    command: str
    code: int
    records: list[dict[str, Any]]
    """The lines of JSON on stdout."""
    seconds: float

    @property
    def record(self) -> dict[str, Any]:
        """The last line."""
        return self.records[-1]


def run_command(*words: object, stop_after: float | None = None) -> Printed:
    """Run ``sedd`` with ``--json`` in this process, where torch is imported and kernels are compiled once.

    Training is stopped by a signal after ``stop_after`` seconds, saves a checkpoint and ends with code 143.
    """
    start, output, before = time.perf_counter(), io.StringIO(), sys.argv
    sys.argv = ["sedd", *map(str, words), "--json"]
    code: Any = 0
    timer = threading.Timer(stop_after or 0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    try:
        if stop_after is not None:
            timer.start()
        with contextlib.redirect_stdout(output):
            main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        timer.cancel()
        sys.argv = before
    gc.collect()
    free_gpu_memory()
    records = [json.loads(line) for line in output.getvalue().splitlines() if line.startswith("{")]
    records = [record | {"data": Path(record["data"]).name} if record.get("data") else record for record in records]
    seconds = round(time.perf_counter() - start, 1)
    return Printed(shell(words), code if isinstance(code, int) else 1, records, seconds)


def free_gpu_memory() -> None:
    """Return the memory of earlier models to the GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def has_gpu() -> bool:
    """Return whether commands run on a GPU."""
    import torch

    return torch.cuda.is_available()


def set_options(config: Mapping[str, object]) -> list[object]:
    """Return the words ``--set key=value`` of a configuration."""
    return [word for key, value in config.items() for word in ("--set", f"{key}={value}")]


def parse_config(assignments: Sequence[str]) -> dict[str, str]:
    """Read ``key=value`` words, as given to ``--set``."""
    return dict(assignment.split("=", 1) for assignment in assignments)


class Results:
    """The record of a study: a JSON file that is written whole after every row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def describe(self, **facts: Any) -> None:
        """Store facts of the whole study, the day and the machine; rows of other facts are not mixed with these.

        Rows that were measured before keep their day and commit.
        """
        machine = describe_machine()._asdict()
        self._describe(facts, {"date": datetime.date.today().isoformat(), "machine": machine})

    def take_facts(self, other: "Results") -> None:
        """Store the facts, the day and the machine of another record, as `describe` does those of this run."""
        stamp = {name: other.record[name] for name in ("date", "machine")}
        facts = {name: value for name, value in other.record.items() if name not in (*stamp, "rows")}
        self._describe(facts, stamp)

    def _describe(self, facts: Mapping[str, Any], stamp: Mapping[str, Any]) -> None:
        for name, value in facts.items() if self.record.get("rows") else ():
            if (before := self.record.get(name, value)) != value:
                raise SystemExit(
                    f"{self.path} holds rows with {name} {before}, and this run has {value}; give the same, or choose "
                    "another --out"
                )
        self._stamp_rows()
        self.record |= {**facts, **stamp}
        self.save()

    def _stamp_rows(self) -> None:
        """Give rows without a day and a commit those of the study."""
        if "machine" in self.record:
            stamp = {"date": self.record["date"], "commit": self.record["machine"]["commit"]}
            self.record["rows"] = {name: stamp | row for name, row in self.record.get("rows", {}).items()}

    def __contains__(self, name: str) -> bool:
        """Whether a row is there; one that failed is not."""
        row = self.record.get("rows", {}).get(name)
        return row is not None and "failed" not in row

    def store(self, name: str, row: Mapping[str, Any]) -> None:
        """Add a row, and write the file."""
        self.record.setdefault("rows", {})[name] = dict(row)
        self._stamp_rows()
        self.save()

    def save(self) -> None:
        """Write the file; an interruption leaves the earlier one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        text = json.dumps(self.record, indent=1, ensure_ascii=False)
        for folder in {str(self.path.parent), str(self.path.parent.resolve())}:
            text = text.replace(f'"{folder}/', '"')  # files of the study are named without its folder
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(self.path)


class TimeLimit:
    """Seconds since the start of the study, and whether another row fits into the limit; None: it always does."""

    def __init__(self, limit: float | None) -> None:
        self.limit, self.start = limit, time.perf_counter()

    @property
    def left(self) -> float | None:
        """The seconds that are left; None: there is no limit."""
        return None if self.limit is None else max(0.0, self.limit - (time.perf_counter() - self.start))

    def allows(self, seconds: float) -> bool:
        """Return whether ``seconds`` more are within the limit."""
        return self.left is None or seconds < self.left


def report_skipped(names: Sequence[str]) -> None:
    """Name on stderr the rows that there was no time for."""
    if names:
        print(f"no time for {len(names)} rows; start this again to continue: {', '.join(names)}", file=sys.stderr)


def thin(points: Sequence[Any], most: int = 40) -> list[Any]:
    """Return at most about ``most`` of the points, evenly spaced, with the first and the last."""
    step = max(1, -(-len(points) // most))
    kept = list(points[::step])
    return kept if not points or kept[-1] is points[-1] else [*kept, points[-1]]


def digest(data: object) -> str:
    """Return a hash of plain data, by which a figure states what it was drawn from."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


@plot.Style()
def save_figure(figure: Figure, path: Path, data: object = None) -> Path:
    """Write a figure as SVG or PNG; the SVG holds the digest of its data."""
    if path.suffix == ".png":
        return plot.save_png(figure, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(path, format="svg", metadata={**nothing, "Identifier": digest(data)}, facecolor="white")
    path.write_text("\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()) + "\n")
    return path
