"""The clock of a run: every second is counted once, and the budget's minutes are the wall clock's."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from sedd.training import loop
from sedd.training.config import RunConfig
from sedd.training.datasets import prepare_data
from sedd.training.loop import Clock, TrainingResult
from sedd.training.trainer import Trainer, TrainingState


def test_every_second_is_counted_once() -> None:
    """Each reading of the clock is a second after the last; resumed runs go on counting."""
    state, ticks = TrainingState(seconds=10.0, eval_seconds=20.0, save_seconds=30.0), itertools.count(0.0)
    clock = Clock(state, now=lambda: next(ticks))
    clock.count_training()
    assert state.seconds == 11
    with clock.count_apart("eval_seconds"):
        pass
    with pytest.raises(OSError, match="full"), clock.count_apart("save_seconds"):
        raise OSError("the disk is full")
    clock.count_training()
    assert (state.seconds, state.eval_seconds, state.save_seconds) == (14, 21, 31)
    assert state.seconds + state.eval_seconds + state.save_seconds - 60 == next(ticks) - 1


Records = list[tuple[float, dict[str, Any]]]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, minutes: float) -> tuple[TrainingResult, Records]:
    """Train with slow validation and saving; return the result, and when each record came."""
    (folder / "text.txt").write_text("one two buckle my shoe\n" * 60)
    slow = {"validation_bound": 0.05, "save": 0.03}
    for name, seconds in slow.items():
        method = getattr(Trainer, name)

        def slowly(self: Any, *words: Any, method: Any = method, seconds: float = seconds) -> Any:
            time.sleep(seconds)
            return method(self, *words)

        monkeypatch.setattr(Trainer, name, slowly)
    config = RunConfig.from_dict(
        {
            "data": {"sources": [str(folder / "text.txt")]},
            "model": {"width": 16, "depth": 1, "heads": 2, "seq_len": 8},
            "train": {"batch_size": 4, "log_every": 1, "eval_every": 4, "save_every": 8, "eval_sequences": 4},
            "budget": {"minutes": minutes},
        }
    ).resolved()
    monkeypatch.setenv("SEDD_CACHE", str(folder / "cache"))
    records: Records = []

    def on_event(kind: str, record: dict[str, Any]) -> None:
        if kind == "log":
            records.append((time.perf_counter(), record))

    return loop.run(config, lambda: prepare_data(config), folder / "run", False, on_event), records


def test_budget_minutes_are_wall_clock_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training takes the budget and at most a step more; with evaluation and saving it takes all the time there was."""
    minutes = 1 / 60
    start = time.perf_counter()
    result, records = run(tmp_path, monkeypatch, minutes)
    wall = time.perf_counter() - start
    state = result.state
    assert 60 * minutes <= state.seconds
    logged = [record["seconds"] for _, record in records]
    assert logged[-2] <= 60 * minutes  # the step before the last was not yet at the end
    assert logged == sorted(logged)
    assert state.eval_seconds >= 0.05 * (state.step // 4)
    assert state.save_seconds >= 0.03 * (state.step // 8)
    total = state.seconds + state.eval_seconds + state.save_seconds
    assert records[-1][0] - records[0][0] <= total <= wall


def test_tokens_per_second_exclude_evaluation_and_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a step over its seconds of training, without the slow evaluation and saving."""
    _, records = run(tmp_path, monkeypatch, 0.4 / 60)
    for (_, a), (_, b) in itertools.pairwise(records):
        seconds = b["seconds"] - a["seconds"]  # rounded to milliseconds
        rate, tokens = b["tokens_per_second"], b["tokens"] - a["tokens"]  # the rate is rounded to a whole number
        assert tokens / (seconds + 1.1e-3) <= rate + 0.5
        assert seconds <= 1.1e-3 or rate - 0.5 <= tokens / (seconds - 1.1e-3)
