"""What a run leaves to read: one JSON record a line, TensorBoard where it is installed, a progress bar."""

import importlib.util
import json
import math
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from sedd import __version__

CLOCK = ("seconds", "tokens_per_second")
"""Fields that depend on the machine and the day; all others are a function of the configuration."""


class Log:
    """``log.jsonl`` of a run, and TensorBoard beside it."""

    def __init__(self, folder: Path, after: int) -> None:
        """Append to what is there, less what lies beyond step ``after``: a killed run wrote ahead of its save."""
        self.path = folder / "log.jsonl"
        kept = [line for line in self._lines() if json.loads(line)["step"] <= after]
        temporary = self.path.with_suffix(".writing")
        temporary.write_text("".join(line + "\n" for line in kept))
        temporary.rename(self.path)
        self._board: Any = None
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)

    def _lines(self) -> list[str]:
        """Whole lines only: the last may have been cut off."""
        if not self.path.exists():
            return []
        text = self.path.read_text()
        return text[: text.rfind("\n") + 1].splitlines()

    def write(self, record: dict[str, Any]) -> None:
        """One record, at its ``step``."""
        clean = {key: value for key, value in record.items() if value is not None}
        with self.path.open("a") as file:
            file.write(json.dumps(clean) + "\n")
        if self._board is not None:
            for key, value in clean.items():
                if key != "step" and isinstance(value, int | float) and math.isfinite(value):
                    self._board.add_scalar(key, value, clean["step"])

    def close(self) -> None:
        """Flush what is not yet on the disk."""
        if self._board is not None:
            self._board.close()


def read(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, which may be going on or have been killed: a last line without its end is not read."""
    path = folder / "log.jsonl"
    if not path.exists():
        raise ValueError(f"{folder} holds no log.jsonl; it is not the folder of a run")
    try:
        text = path.read_text()
        records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not all(isinstance(record, dict) and isinstance(record.get("step"), int) for record in records):
        raise ValueError(f"{path} holds a line that is no record of a step; it is not the log of a run")
    return records


def environment() -> dict[str, str]:
    """Where this runs: versions, commit, hardware."""
    import torch

    cuda = range(torch.cuda.device_count())
    return {
        "sedd": __version__,
        "commit": _commit() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "accelerators": ", ".join(torch.cuda.get_device_name(i) for i in cuda) or "none",
    }


def _processor() -> str:
    """The processor by name, where the system tells it."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of this source, where it is a checkout of its own and not a package in somebody else's."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    return git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*") if git("ls-files", "logs.py") else None
