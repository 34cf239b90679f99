"""The log of a training run: JSON lines, TensorBoard where it is installed, and the environment it ran in."""

import importlib.util
import json
import math
import os
import platform
import re
import subprocess
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from sedd import __version__, files
from sedd.files import MAX_TEXT, parse_json, read_bytes
from sedd.schema import check_fields

LOG = "log.jsonl"
FIELD_TYPES = {  # of what others read
    **dict.fromkeys(("step", "tokens"), int),
    **dict.fromkeys(("loss", "seconds", "save_seconds", "bound", "bound_stderr", "bound_bits_per_char"), float),
    "loss_by_time": list[float],
    "samples": list[str],
}
REQUIRED_WITH = {"bound": ("bound_stderr", "tokens"), "seconds": ("tokens",)}


class RunLog:
    """Writer of a run's ``log.jsonl`` and of its TensorBoard events.

    Opening it drops what a killed run left: records after step ``after``, and ``torn``, an incomplete last line.
    """

    def __init__(self, folder: Path, after: int) -> None:
        self.path = folder / LOG
        records, self.torn = _read_records(self.path) if self.path.exists() else ([], "")
        kept = [line for line, record in records if record["step"] <= after]
        files.write_text(self.path, "".join(line + "\n" for line in kept))
        self.records = len(kept)
        self._board: Any = None
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, which has a field ``step``."""
        fields = {key: value for key, value in record.items() if value is not None}
        with self.path.open("a") as file:
            file.write(json.dumps(fields) + "\n")
        self.records += 1
        if self._board is not None:
            for key, value in fields.items():
                if key != "step" and isinstance(value, int | float) and math.isfinite(value):
                    self._board.add_scalar(key, value, fields["step"])

    def close(self) -> None:
        """Flush TensorBoard's events to disk."""
        if self._board is not None:
            self._board.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Read the records of a run, which may still be running: an incomplete last line is ignored."""
    path = folder / LOG
    if not path.is_file():
        raise ValueError(f"{folder} holds no {LOG}; it is not the folder of a run")
    return [record for _, record in _read_records(path)[0]]


def set_aside_log(folder: Path) -> Path | None:
    """Rename the log of a run that starts over, and return its new path; None if it has no record."""
    path = folder / LOG
    if not path.exists() or not path.stat().st_size:
        return None
    number = next(n for n in count(1) if not (folder / f"log-{n}.jsonl").exists())
    return path.rename(folder / f"log-{number}.jsonl")


def _read_records(path: Path) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    """Read the lines of a log with their records, and the last line if a killed process has not written all of it."""
    try:
        *lines, last = read_bytes(path, MAX_TEXT).decode(errors="replace").split("\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
            found = record if isinstance(record, dict) else ()
            required = ["step", *(field for name in found for field in REQUIRED_WITH.get(name, ()))]
            check_fields("it", record, FIELD_TYPES, required=required)
        except ValueError as error:
            what = f"{path}, line {number} is not a record of a step: {error}"
            raise ValueError(f"{what}; remove that line, or restore the file") from None
        records.append((line, record))
    return records, last


def environment() -> dict[str, str]:
    """Return versions, commit and hardware."""
    import torch

    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)", info.read_text(), re.MULTILINE) if info.exists() else None
    processor = found[1].strip() if found else platform.processor() or platform.machine()
    accelerators = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    return {
        "sedd": __version__,
        "commit": _commit() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "processor": f"{processor}, {os.cpu_count()} cores",
        "accelerators": ", ".join(accelerators) or "none",
    }


def _commit() -> str:
    """Return the commit of this source tree, or nothing if it is not under version control."""
    here = Path(__file__)

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=here.parent, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    with suppress(OSError):
        if git("ls-files", here.name):
            return git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    return ""
