"""What a run leaves to read: one JSON record a line, TensorBoard where it is installed, a progress bar."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

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
    """The records of a run."""
    path = folder / "log.jsonl"
    if not path.exists():
        raise ValueError(f"{folder} holds no log.jsonl; it is not the folder of a run")
    return [json.loads(line) for line in path.read_text().splitlines()]
