"""Saves on a disk that fails at each write, fsync and rename in turn: complete or as before; the next one works."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import boxed
import pytest
import torch
from failing_disk import failing

from sedd import data, files, hub
from sedd.tokenizer import Bytes
from sedd.training import checkpoint

Contents = dict[str, bytes]


def contents(folder: Path) -> Contents:
    """Return what other commands see: all files but those that are being written."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if not name.startswith(".") and "/." not in name}


def survive(
    folder: Path,
    save: Callable[[], object],
    check: Callable[[], object],
    error: int,
    lasting: bool,
    gone: Contents | None = None,
) -> int:
    """Fail each write of ``save`` in turn, in a copy of ``folder`` each time, and return how many there are.

    Args:
        folder: Where it saves.
        save: Saves in it.
        check: Raises an error if what is there cannot be used.
        error: The number of the error.
        lasting: Whether all later writes fail too.
        gone: What may be there too after a failure.
    """
    start = folder.with_name("start")
    shutil.copytree(folder, start)
    before = contents(folder)
    save()
    after = contents(folder)
    assert after != before
    number = 0
    while True:
        shutil.rmtree(folder)
        shutil.copytree(start, folder)
        with failing(number, error, lasting) as disk:
            try:
                save()
                is_saved = True
            except (OSError, ValueError):
                is_saved = False
        if not disk.has_failed:
            assert is_saved
            return number
        assert contents(folder) in ((after,) if is_saved else (before, after, gone)), f"at write {number}"
        check()
        save()
        assert contents(folder) == after, f"the save after the one that failed at write {number}"
        left = [str(path) for path in folder.rglob(".*")]
        assert not left, f"at write {number}"
        number += 1


DISKS = pytest.mark.parametrize(("error", "lasting"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["EIO", "full"])


@DISKS
@pytest.mark.parametrize("exists", [False, True])
def test_a_text(tmp_path: Path, exists: bool, error: int, lasting: bool) -> None:
    (folder := tmp_path / "folder").mkdir()
    path = folder / "texts.txt"
    if exists:
        path.write_text("old")
    assert survive(folder, lambda: files.write_text(path, "new"), lambda: None, error, lasting) >= 5


@DISKS
def test_a_checkpoint(tmp_path: Path, error: int, lasting: bool) -> None:
    """The one before it stays the newest until this one is complete."""
    (folder := tmp_path / "folder").mkdir()

    def save(step: int) -> Path:
        tensors = {stem: {"w": torch.full((3,), float(step))} for stem in ("model", "ema", "optimizer")}
        records = {"config": {}, "state": {"step": step}}
        return checkpoint.save(folder, checkpoint.step_name(step), tensors, records, Bytes().files())

    def check() -> None:
        newest = checkpoint.newest(folder, pytest.fail)
        assert newest
        assert checkpoint.load_json(newest, "state")["step"] in (1, 2)

    save(1)
    assert survive(folder, lambda: save(2), check, error, lasting) >= 30


@DISKS
def test_a_damaged_checkpoint_that_is_replaced(tmp_path: Path, error: int, lasting: bool) -> None:
    """It could not be used, so it may be gone."""
    (folder := tmp_path / "folder").mkdir()

    def save() -> Path:
        return checkpoint.save(folder, "step-00000001", {"ema": {"w": torch.ones(3)}}, {"state": {}}, {})

    (save() / "ema.safetensors").write_bytes(b"damaged")
    assert survive(folder, save, lambda: None, error, lasting, gone={}) >= 10


@DISKS
def test_prepared_data(tmp_path: Path, error: int, lasting: bool) -> None:
    (folder := tmp_path / "folder").mkdir()
    (tmp_path / "data.csv").write_text("text,mood\na,good\nabc,bad\n")

    def save() -> None:
        data.prepare(
            [tmp_path / "data.csv"], folder / "out", Bytes(), packing="lines", column="text", label="mood", workers=1
        )

    def check() -> None:
        if (folder / "out").exists():
            data.TokenBlocks.open(folder / "out", 3, "all", check=True)
            shutil.rmtree(folder / "out")

    assert survive(folder, save, check, error, lasting) >= 10


@DISKS
def test_an_export(tmp_path: Path, error: int, lasting: bool) -> None:
    """With its card: a folder without one is no export."""
    (folder := tmp_path / "folder").mkdir()
    model = boxed.write_model(tmp_path / "model")

    def save() -> None:
        hub.save_pretrained(model, folder / "out", dtype="int8")

    def check() -> None:
        if (folder / "out").exists():
            checkpoint.find_model(folder / "out")
            shutil.rmtree(folder / "out")

    assert survive(folder, save, check, error, lasting) >= 20
