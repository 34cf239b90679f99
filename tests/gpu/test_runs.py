"""On a GPU: a whole run keeps the wall clock's time, and never waits for the device because of a log or a budget."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sedd.training import loop
from sedd.training.config import RunConfig
from sedd.training.datasets import prepare_data
from sedd.training.loop import OnEvent, TrainingResult

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))


def run(folder: Path, on_event: OnEvent, optimizer: str = "adamw", **parts: dict[str, Any]) -> TrainingResult:
    (folder / "text.txt").write_text("one two buckle my shoe\n" * 3000)
    config = RunConfig.from_dict(
        {
            "data": {"sources": [str(folder / "text.txt")]},
            "model": {"width": 512, "depth": 8, "heads": 8, "seq_len": 128},
            "optim": {"name": optimizer},
            **parts,
        }
    ).resolved()
    return loop.run(config, lambda: prepare_data(config), folder / "run", False, on_event)


def test_budget_minutes_are_wall_clock_minutes(tmp_path: Path) -> None:
    """Half a minute of training takes half a minute; with evaluation and saving it takes all the time there was."""
    seen: list[float] = []

    def on_event(kind: str, record: dict[str, Any]) -> None:
        if kind == "log":
            seen.append(time.perf_counter())

    start = time.perf_counter()
    options = {"batch_size": 256, "precision": "bfloat16", "eval_every": 200, "save_every": 500}
    state = run(tmp_path, on_event, budget={"minutes": 0.5}, train=options).state
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
    assert 30 <= state.seconds < 31
    assert seen[-1] - seen[0] <= state.seconds + state.eval_seconds + state.save_seconds <= wall


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_host_does_not_wait(tmp_path: Path, optimizer: str) -> None:
    """Between validations, though every step is logged and the budget is in minutes."""
    checked: list[int] = []

    def on_event(kind: str, record: dict[str, Any]) -> None:
        if kind == "log":
            torch.cuda.set_sync_debug_mode("error" if 5 <= record["step"] < 25 else "default")
            checked.append(torch.cuda.get_sync_debug_mode())

    options = {"batch_size": 32, "precision": "bfloat16", "log_every": 1, "eval_every": 0, "save_every": 0}
    try:
        result = run(tmp_path, on_event, optimizer, budget={"minutes": 10.0, "steps": 30}, train=options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.state.step == 30
    assert checked.count(2) >= 20
