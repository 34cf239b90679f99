"""The log of a training run: JSON lines, TensorBoard where it is installed, and the environment it ran in."""

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


class RunLog:
    """Writer of a run's ``log.jsonl`` and of its TensorBoard events."""

    def __init__(self, folder: Path, after: int) -> None:
        """Open the log for appending and drop records after step ``after``.

        A killed run may have logged steps that its last checkpoint does not contain.
        """
        self.path = folder / "log.jsonl"
        lines = [line for line in self._lines() if json.loads(line)["step"] <= after]
        temporary = self.path.with_suffix(".writing")
        temporary.write_text("".join(line + "\n" for line in lines))
        temporary.rename(self.path)
        self._board: Any = None
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)

    def _lines(self) -> list[str]:
        """Return the complete lines: a killed run may have left half of the last one."""
        if not self.path.exists():
            return []
        text = self.path.read_text()
        return text[: text.rfind("\n") + 1].splitlines()

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, which has a field ``step``."""
        fields = {key: value for key, value in record.items() if value is not None}
        with self.path.open("a") as file:
            file.write(json.dumps(fields) + "\n")
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
    path = folder / "log.jsonl"
    if not path.exists():
        raise ValueError(f"{folder} holds no log.jsonl; it is not the folder of a run")
    try:
        text = path.read_text()
        records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not all(isinstance(record, dict) and isinstance(record.get("step"), int) for record in records):
        raise ValueError(f"{path} holds a line that is not a record of a step; it is not the log of a run")
    return records


def environment() -> dict[str, str]:
    """Return versions, commit and hardware."""
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
    """Return the name of the processor, from /proc where the system has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of this source tree, or None if it is not under version control."""

    def git(*args: str) -> str | None:
        try:
            result = subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True)
        except OSError:
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    return (
        git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
        if git("ls-files", Path(__file__).name)
        else None
    )
