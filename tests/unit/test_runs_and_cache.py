"""`sedd runs` and `sedd cache`, without torch; completion of commands and names in a shell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import save_file
from typer.testing import CliRunner

from sedd.cli import app

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from sedd.cli import main
sys.argv = ["sedd", *sys.argv[1:]]
main()
"""


def sedd(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


def start_without_torch(*words: object, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, words)]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)


def write_run(folder: Path, step: int, bounds: list[float], data: str, time: float) -> None:
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"data": {"sources": [data]}, "objective": "lambda-dce"}))
    (folder / "log.jsonl").write_text("".join(f'{{"step": {i}, "bound": {b}}}\n' for i, b in enumerate(bounds, 1)))
    state = {"step": step, "tokens": 1, "best": min(bounds, default=None), "best_step": step}
    (checkpoint / "state.json").write_text(json.dumps(state))
    (checkpoint / "config.json").write_text("{}")  # a checkpoint is no run
    save_file({"a": np.zeros((3, 4)), "rotary.inv_freq": np.zeros(5)}, checkpoint / "ema.safetensors")
    for name in ("config.json", "log.jsonl"):
        os.utime(folder / name, (time, time))


def test_runs_are_listed(tmp_path: Path) -> None:
    """Newest first, at any depth; damaged and unfinished ones too, other folders not."""
    write_run(tmp_path / "old", 40, [2.5, 2.25, 2.75], "/data/book.txt", 1e9)
    write_run(tmp_path / "sub" / "new", 7, [], "mols.smi.gz", 1.5e9)
    write_run(tmp_path / ".hidden", 7, [], "x", 1.5e9)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text("{damaged")
    (tmp_path / "begun" / "log.jsonl").write_text('{"step": 3')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    done = start_without_torch("runs", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    begun, new, old = map(json.loads, done.stdout.splitlines())
    assert (old["run"], old["data"], old["parameters"], old["step"]) == ("old", "book.txt", 12, 40)
    assert (old["best_bound"], old["objective"], old["date"][:4]) == (2.25, "lambda-dce", "2001")
    assert (new["run"], new["best_bound"]) == ("sub/new", None)
    assert (begun["run"], begun["parameters"], begun["step"], begun["data"]) == ("begun", None, 0, "")
    table = [[cell.strip() for cell in row.split("|")] for row in sedd("runs", tmp_path).stdout.splitlines()]
    assert table[0][1:-1] == ["run", "data", "objective", "parameters", "step", "best bound", "date"]
    assert table[4][1:7] == ["old", "book.txt", "lambda-dce", "12", "40", "2.2500"]


def test_a_folder_without_runs(tmp_path: Path) -> None:
    assert "is not a folder" in str(sedd("runs", tmp_path / "nowhere").exception)
    assert "there is no run in" in str(sedd("runs", tmp_path).exception)
    done = sedd("runs", tmp_path, "--json")
    assert (done.exit_code, done.stdout) == (0, "")


def test_the_cache_is_measured_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process is writing, and what the user put there, stays."""
    for path, size in (("data/a/x.bin", 3000), ("data/.b.preparing-1/x", 7), ("models/c/y", 500), ("gpt2/t.json", 9)):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_bytes(b"0" * size)
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path))
    sizes = {"data_bytes": 3000, "models_bytes": 500, "total_bytes": 3500}
    assert json.loads(start_without_torch("cache", "--json").stdout) == {"folder": str(tmp_path), **sizes}
    assert "total                      0.0 MiB" in sedd("cache").stdout
    cleared = json.loads(sedd("cache", "--clear", "--json").stdout)
    assert cleared == {"folder": str(tmp_path), "removed": 2, **sizes}
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["data/.b.preparing-1/x", "gpt2/t.json"]
    assert json.loads(sedd("cache", "--json").stdout)["total_bytes"] == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [("sedd ru", "runs"), ("sedd train --recipe mol", "molecules")],
)
def test_shells_complete_commands_and_names(words: str, expected: str) -> None:
    count = len(words.split(" ")) - 1
    done = start_without_torch(_SEDD_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(count))
    assert done.stdout.strip() == expected, done.stderr
