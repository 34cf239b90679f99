"""Checkpoints: whole or not there, the best among the last, and nothing that is good removed for what is not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sedd import checkpoint
from sedd.training import TrainingState

Refuses = Callable[..., None]


def save(root: Path, step: int, value: float = 1.0) -> Path:
    tensors = {"model": {"w": torch.full((3,), value)}}
    return checkpoint.save(root, f"step-{step:08d}", tensors, {"state": {"step": step}})


def names(root: Path) -> list[str]:
    return sorted(path.name.replace("step-0000000", "") for path in root.iterdir())


def test_what_is_saved_comes_back_and_is_not_written_twice(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    assert checkpoint.corruption(folder) is None
    assert torch.equal(checkpoint.load_tensors(folder, "model")["w"], torch.ones(3))
    assert checkpoint.load_json(folder, "state") == {"step": 1}
    assert save(tmp_path, 1, value=2.0) == folder  # it is whole
    assert torch.equal(checkpoint.load_tensors(folder, "model")["w"], torch.ones(3))
    (folder / "model.safetensors").write_bytes(b"damaged")
    save(tmp_path, 1, value=2.0)
    assert torch.equal(checkpoint.load_tensors(folder, "model")["w"], torch.full((3,), 2.0))
    assert names(tmp_path) == ["1"]


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, 2, "step-00000002")
    assert names(tmp_path) == ["2", "4", "5"]
    checkpoint.prune(tmp_path, 1, None)
    assert names(tmp_path) == ["5"]


def test_the_best_is_the_lowest_bound_that_is_a_number() -> None:
    done, best = TrainingState(), []
    for done.step, bound in enumerate([float("nan"), 3.0, 2.0, float("nan"), 2.5, float("-inf"), 1.5]):
        if done.update_best(bound):
            best.append((done.best_step, done.best))
    assert best == [(1, 3.0), (2, 2.0), (6, 1.5)]


def test_damaged_ones_do_not_push_whole_ones_out(tmp_path: Path) -> None:
    """A run that went back from step 5 to step 3 saves step 4, and keeps one."""
    for step in (3, 5):
        save(tmp_path, step)
    (tmp_path / "step-00000005" / "state.json").unlink()
    (tmp_path / f"{checkpoint.PARTIAL_PREFIX}step-00000009").mkdir()
    heard: list[str] = []
    found = checkpoint.newest(tmp_path, heard.append)
    assert found == tmp_path / "step-00000003"
    assert heard == ["checkpoint step-00000005 is damaged (state.json is missing); trying the one before it"]
    checkpoint.set_aside_corrupted(tmp_path, found)
    save(tmp_path, 4)
    checkpoint.prune(tmp_path, 1, None)
    assert names(tmp_path) == ["4", "damaged-5"]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, refuses: Refuses) -> None:
    save(tmp_path, 1)

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    refuses(lambda: checkpoint.save(tmp_path, "step-00000002", {}, {}, extra=full), "No space left", "untouched")
    assert names(tmp_path) == ["1"]
    refuses(lambda: checkpoint.write_json(tmp_path / "1" / "2.json", {}), "2.json could not be written")
    refuses(lambda: checkpoint.write_tensors(tmp_path / "step-00000001", {"w": torch.ones(2)}), "could not be written")


def test_a_record_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> None:
    path = tmp_path / "config.json"
    checkpoint.write_json(path, {"seed": 0})
    monkeypatch.setattr(Path, "rename", lambda self, target: full())

    def full() -> None:
        raise OSError(28, "No space left on device")

    refuses(lambda: checkpoint.write_json(path, {"seed": 1}), "No space left")
    assert checkpoint.load_json(tmp_path, "config") == {"seed": 0}
    assert list(tmp_path.iterdir()) == [path]
