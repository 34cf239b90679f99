"""Checkpoints: safetensors and JSON, written whole or not at all, with a manifest of hashes.

A checkpoint is a folder ``step-00000500`` that appears by a rename once everything in it is on the disk. One that was
damaged later is noticed by its manifest, and the one before it is used.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

MANIFEST = "manifest.json"


def _hash(path: Path) -> str:
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


def save(
    root: Path,
    name: str,
    tensors: Mapping[str, Mapping[str, Tensor]],
    records: Mapping[str, Any],
    extra: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Write ``root/name``: a .safetensors a mapping, a .json a record, and what ``extra`` adds; all or nothing."""
    root.mkdir(parents=True, exist_ok=True)
    target, temporary = root / name, root / f".writing-{name}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        for stem, values in tensors.items():
            plain = {key: value.detach().cpu().contiguous().clone() for key, value in values.items()}
            save_file(plain, temporary / f"{stem}.safetensors")
        for stem, record in records.items():
            (temporary / f"{stem}.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        extra(temporary)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        manifest = {str(f.relative_to(temporary)): {"bytes": f.stat().st_size, "sha256": _hash(f)} for f in files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for path in [*files, temporary / MANIFEST, temporary]:
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        _sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ValueError(f"{target} could not be written: {error}; what was saved before is untouched") from None
    return target


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return "its manifest cannot be read"
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"] or _hash(path) != expected["sha256"]:
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
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def prune(root: Path, keep: int, best: str | None) -> Iterator[Path]:
    """Remove all but the newest ``keep`` checkpoints and the best; yields what went."""
    for folder in steps(root)[keep:]:
        if folder.name != best:
            shutil.rmtree(folder)
            yield folder
