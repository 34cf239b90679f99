"""Checkpoints: safetensors and JSON, written whole or not at all, with a manifest of hashes.

A checkpoint is a folder ``step-00000500`` that appears by a rename once everything in it is on the disk. One that was
damaged later is noticed by its manifest, and the one before it is used.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

MANIFEST = "manifest.json"
WRITING = ".writing-"


def sha256(path: Path) -> str:
    """Of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Onto the disk: a rename may otherwise outlive what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def written(path: Path) -> Iterator[None]:
    """What keeps ``path`` from being written, as a sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = str(error) if isinstance(error, SafetensorError) else error.strerror or str(error)
        raise ValueError(f"{path} could not be written: {reason}; what was saved before is untouched") from None


def write_tensors(path: Path, values: Mapping[str, Tensor]) -> None:
    """A .safetensors file."""
    with written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {key: value.detach().cpu().contiguous().clone() for key, value in values.items()}
        save_file(whole, path, metadata={"format": "pt"})  # other readers ask for it


def write_json(path: Path, record: Any) -> None:
    """A .json file, replaced at once: a kill leaves the old one or the new one."""
    temporary = path.with_name(f"{WRITING}{path.name}")
    try:
        with written(path):
            temporary.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
            _sync(temporary)
            temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def save(
    root: Path,
    name: str,
    tensors: Mapping[str, Mapping[str, Tensor]],
    records: Mapping[str, Any],
    extra: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Write ``root/name``: a .safetensors a mapping, a .json a record, and what ``extra`` adds; all or nothing.

    One that is there and whole is left as it is.
    """
    target, temporary = root / name, root / f"{WRITING}{name}"
    if target.exists() and damage(target) is None:
        return target
    try:
        with written(target):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for stem, values in tensors.items():
                write_tensors(temporary / f"{stem}.safetensors", values)
            for stem, record in records.items():
                write_json(temporary / f"{stem}.json", record)
            extra(temporary)
            _seal(temporary)
            shutil.rmtree(target, ignore_errors=True)  # damaged
            temporary.rename(target)
            _sync(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _seal(folder: Path) -> None:
    """Add the manifest; then everything reaches the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {str(f.relative_to(folder)): {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in files}
    write_json(folder / MANIFEST, manifest)
    for path in [*files, folder]:
        _sync(path)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        expected = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest cannot be read"
    for name, entry in expected.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:  # a manifest may come from anybody
            return f"its manifest names {name}, outside of it"
        if not path.is_file():
            return f"{name} is missing"
        if entry != (path.stat().st_size, sha256(path)):
            return f"{name} is not what was written"
    return None


def steps(root: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    return sorted(root.glob("step-*"), reverse=True)


def newest(root: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; ``warn`` hears of those that are not."""
    found = steps(root)
    for folder in found:
        if (reason := damage(folder)) is None:
            return folder
        warn(f"checkpoint {folder.name} is damaged ({reason}); trying the one before it")
    if found:
        raise ValueError(f"none of the {len(found)} checkpoints in {root} is whole; start anew with another --out")
    return None


def tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    """One file of tensors of a checkpoint."""
    path = folder / f"{stem}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def record(folder: Path, stem: str) -> Any:
    """One JSON record of a checkpoint."""
    path = folder / f"{stem}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def prune(root: Path, keep: int, best: str | None) -> None:
    """Remove all but the newest ``keep`` checkpoints and the best."""
    for folder in steps(root)[keep:]:
        if folder.name != best:
            shutil.rmtree(folder, ignore_errors=True)  # what is left is older than those kept, and tried again


def set_aside(root: Path, found: Path | None) -> None:
    """Make way for a run that goes on from ``found``: newer ones are damaged, half-written ones are nothing."""
    with written(root):
        for folder in steps(root):
            if found is not None and folder.name > found.name:
                aside = root / f"damaged-{folder.name}"
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
    for folder in root.glob(f"{WRITING}*"):
        shutil.rmtree(folder, ignore_errors=True)
