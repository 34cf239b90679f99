"""Checkpoints: written atomically, checked against their manifest, pruned to the newest and the best."""

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


def test_a_saved_checkpoint_loads_and_is_not_written_twice(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    assert checkpoint.corruption(folder) is None
    assert torch.equal(checkpoint.load_tensors(folder, "model")["w"], torch.ones(3))
    assert checkpoint.load_json(folder, "state") == {"step": 1}
    assert save(tmp_path, 1, value=2.0) == folder  # it is intact
    assert torch.equal(checkpoint.load_tensors(folder, "model")["w"], torch.ones(3))
    (folder / "model.safetensors").write_bytes(b"damaged")
    save(tmp_path, 1, value=2.0)
    assert torch.equal(checkpoint.load_tensors(folder, "model")["w"], torch.full((3,), 2.0))
    assert names(tmp_path) == ["1"]


def test_the_newest_and_the_best_are_not_pruned(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, 2, "step-00000002")
    assert names(tmp_path) == ["2", "4", "5"]
    checkpoint.prune(tmp_path, 1, None)
    assert names(tmp_path) == ["5"]


def test_the_best_is_the_lowest_finite_bound() -> None:
    state, best = TrainingState(), []
    for state.step, bound in enumerate([float("nan"), 3.0, 2.0, float("nan"), 2.5, float("-inf"), 1.5]):
        if state.update_best(bound):
            best.append((state.best_step, state.best))
    assert best == [(1, 3.0), (2, 2.0), (6, 1.5)]


def test_damaged_checkpoints_do_not_count_as_newest(tmp_path: Path) -> None:
    """A run that resumed from step 3 because step 5 was damaged saves step 4, and keeps one checkpoint."""
    for step in (3, 5):
        save(tmp_path, step)
    (tmp_path / "step-00000005" / "state.json").unlink()
    (tmp_path / f"{checkpoint.PARTIAL_PREFIX}step-00000009").mkdir()
    warnings: list[str] = []
    found = checkpoint.newest(tmp_path, warnings.append)
    assert found == tmp_path / "step-00000003"
    assert warnings == ["checkpoint step-00000005 is damaged (state.json is missing); trying the one before it"]
    checkpoint.set_aside_corrupted(tmp_path, found)
    save(tmp_path, 4)
    checkpoint.prune(tmp_path, 1, None)
    assert names(tmp_path) == ["4", "damaged-5"]


def test_a_failed_write_leaves_no_files(tmp_path: Path, refuses: Refuses) -> None:
    save(tmp_path, 1)

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    refuses(lambda: checkpoint.save(tmp_path, "step-00000002", {}, {}, extra=full), "No space left", "untouched")
    assert names(tmp_path) == ["1"]
    refuses(lambda: checkpoint.write_json(tmp_path / "1" / "2.json", {}), "2.json could not be written")
    refuses(lambda: checkpoint.write_tensors(tmp_path / "step-00000001", {"w": torch.ones(2)}), "could not be written")


def test_a_json_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> None:
    path = tmp_path / "config.json"
    checkpoint.write_json(path, {"seed": 0})
    monkeypatch.setattr(Path, "rename", lambda self, target: full())

    def full() -> None:
        raise OSError(28, "No space left on device")

    refuses(lambda: checkpoint.write_json(path, {"seed": 1}), "No space left")
    assert checkpoint.load_json(tmp_path, "config") == {"seed": 0}
    assert list(tmp_path.iterdir()) == [path]
