"""Checkpoints: written atomically, checked against their manifest, pruned to the newest and the best."""

import shutil
from collections.abc import Callable
from pathlib import Path

import boxed
import pytest
import torch

from sedd import files
from sedd.loading import load_model
from sedd.tokenizer import CONFIG, Bytes
from sedd.training import checkpoint
from sedd.training.trainer import TrainingState

Refuses = Callable[..., None]


def save(root: Path, step: int, value: float = 1.0) -> Path:
    tensors = {stem: {"w": torch.full((3,), value)} for stem in ("model", "ema", "optimizer")}
    return checkpoint.save(root, f"step-{step:08d}", tensors, {"config": {}, "state": {"step": step}}, Bytes().files())


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


def test_a_file_that_may_not_be_read_is_named_and_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: Refuses
) -> None:
    """The checkpoint before it is not taken in its place."""
    save(tmp_path, 1)
    newest, whole = save(tmp_path, 2), Path.open

    def forbid(path: Path, *mode: object, **options: object) -> object:
        if path == newest / "ema.safetensors":
            raise PermissionError(13, "Permission denied")
        return whole(path, *mode, **options)

    monkeypatch.setattr(Path, "open", forbid)
    refuses(lambda: checkpoint.newest(tmp_path, print), "ema.safetensors cannot be read: Permission denied", "may read")


def test_the_newest_and_the_best_are_not_pruned(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, 2, 2)
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
    (tmp_path / f"{files.PARTIAL_PREFIX}step-00000009").mkdir()
    warnings: list[str] = []
    found = checkpoint.newest(tmp_path, warnings.append)
    assert found == tmp_path / "step-00000003"
    assert warnings == ["checkpoint step-00000005 is damaged (state.json is missing); trying the one before it"]
    checkpoint.set_aside_corrupted(tmp_path, found)
    save(tmp_path, 4)
    checkpoint.prune(tmp_path, 1, None)
    assert names(tmp_path) == ["4", "damaged-5"]


def test_a_failed_write_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> None:
    save(tmp_path, 1)

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        refuses(lambda: save(tmp_path, 2), "No space left", "untouched")
    assert names(tmp_path) == ["1"]
    refuses(lambda: checkpoint.write_json(tmp_path / "1" / "2.json", {}), "2.json could not be written")
    refuses(lambda: checkpoint.write_tensors(tmp_path / "step-00000001", {"w": torch.ones(2)}), "could not be written")


def test_no_folder_is_whole_without_what_a_checkpoint_must_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: Refuses
) -> None:
    """Neither sealed nor loaded, whatever its manifest lists."""
    assert CONFIG in checkpoint.MODEL_FILES
    folder = save(tmp_path, 1)
    for name in checkpoint.CHECKPOINT_FILES:
        other = shutil.copytree(folder, tmp_path / "step-00000002")
        (other / name).unlink()
        stated = checkpoint.load_json(other, "manifest")
        checkpoint.write_json(other / "manifest.json", {key: value for key, value in stated.items() if key != name})
        warnings: list[str] = []
        assert checkpoint.newest(tmp_path, warnings.append) == folder
        assert f"its manifest does not have {name}" in warnings[0]
        shutil.rmtree(other)
    write_json = checkpoint.write_json

    def lose(path: Path, value: object) -> None:  # as a second run in the same folder would
        (path.parent / "model.safetensors").unlink(missing_ok=True)
        write_json(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_json", lose)
        refuses(lambda: save(tmp_path, 3), "step-00000003 could not be written", "No such file")
    assert names(tmp_path) == ["1"]


def test_damage_without_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str], refuses: Refuses) -> None:
    """What cannot be read or is not finite is refused; that the rest cannot be noticed is said."""
    folder = boxed.write_model(tmp_path / "model")
    (folder / "manifest.json").unlink()
    weights = load_model(folder).network.state_dict()
    assert "model has no manifest.json" in capsys.readouterr().err
    whole = (folder / "ema.safetensors").read_bytes()
    for damaged in (whole[:-1], whole[:100], whole + b"0", b"\xff" * 8 + whole[8:], b""):
        (folder / "ema.safetensors").write_bytes(damaged)
        refuses(lambda: load_model(folder), "ema.safetensors cannot be read")
    for value in (float("nan"), float("-inf")):
        name = max(weights, key=lambda name: weights[name].numel())
        changed = {key: tensor.clone() for key, tensor in weights.items()}
        changed[name].view(-1)[-1] = value
        checkpoint.write_tensors(folder / "ema.safetensors", changed)
        refuses(
            lambda: load_model(folder),
            f"ema.safetensors: {name} holds a value that is NaN or infinite",
            "another checkpoint",
        )


def test_a_json_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> None:
    path = tmp_path / "config.json"
    checkpoint.write_json(path, {"seed": 0})
    monkeypatch.setattr(Path, "rename", lambda self, target: full())

    def full() -> None:
        raise OSError(28, "No space left on device")

    refuses(lambda: checkpoint.write_json(path, {"seed": 1}), "No space left")
    assert checkpoint.load_json(tmp_path, "config") == {"seed": 0}
    assert list(tmp_path.iterdir()) == [path]
