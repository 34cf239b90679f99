"""Files from elsewhere: where the weights of a checkpoint lie, and how they are read without running any of it."""

import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sedd import checkpoint

NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""What a folder is looked through for, in this order: safetensors can hold nothing but numbers."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MOST = 10
"""How many names an error lists."""


class Found(NamedTuple):
    """What a checkpoint holds, not yet looked at."""

    path: Path
    state: Mapping[str, Any]
    """What is stored under each name."""
    average: Any
    """Of a Lightning checkpoint, what it has under ``ema``."""
    config: Mapping[str, Any]
    """Its configuration; empty where it has none."""


def find(source: Path) -> Path:
    """The file of weights that a source is, or holds."""
    if source.is_file():
        return source
    if not source.is_dir():
        raise ValueError(f"{source} does not exist; give a folder, a file or a Hub id such as owner/name")
    named = [source / name for name in NAMES if (source / name).is_file()]
    single = named or [path for path in sorted(source.glob("*.ckpt")) if path.is_file()]
    if not named and len(single) != 1:
        several = f"holds {len(single)} .ckpt files: name one of them" if single else "holds no weights"
        raise ValueError(f"{source} {several}; a published checkpoint is one of {', '.join(NAMES)}, or one .ckpt")
    return single[0]


def read(source: Path) -> Found:
    """The weights and the configuration of a source."""
    path = find(source)
    config = _object(path.parent / "config.json") if (path.parent / "config.json").is_file() else {}
    held = _sharded(path) if path.name.endswith(".index.json") else _weights(path)
    if not isinstance(held, Mapping) or not held:
        raise ValueError(f"{path} holds a {type(held).__name__}, not weights by their names")
    if not isinstance(held.get("state_dict"), Mapping):
        return Found(path, _by_name(path, held), None, config)
    settings = held.get("hyper_parameters")
    inside = settings.get("config") if isinstance(settings, Mapping) else None
    config = config or (dict(inside) if isinstance(inside, Mapping) else {})
    return Found(path, _by_name(path, held["state_dict"]), held.get("ema"), config)


def _by_name(path: Path, state: Mapping[Any, Any]) -> Mapping[str, Any]:
    if strange := [name for name in state if not isinstance(name, str)]:
        raise ValueError(f"{path} has the key {strange[0]!r}; weights have names")
    return state


def _object(path: Path) -> dict[str, Any]:
    found = checkpoint.load_json(path.parent, path.stem)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object")
    return found


def _weights(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return checkpoint.load_tensors(path.parent, path.stem)
    if path.suffix in PICKLES:
        return _unpickled(path)
    raise ValueError(f"{path} ends in {path.suffix or 'nothing'!r}; weights end in .safetensors, {', '.join(PICKLES)}")


# Several files ---------------------------------------------------------------------------------------------


def _sharded(index: Path) -> dict[str, Any]:
    """The files that an index names, joined: each name in the file it says, and nothing else in any."""
    where = _object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{index} has no weight_map; it must say which file holds which weights")
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(where.values()):
        _inside(index, name, suffix)
        shard = _weights(index.parent / name)
        expected = {key for key, file in where.items() if file == name}
        if not isinstance(shard, Mapping) or set(shard) != expected:
            raise ValueError(f"{index.parent / name} does not hold what {index.name} says; download both again")
        joined |= shard
    return joined


def _inside(index: Path, name: object, suffix: str) -> None:
    """Refuse whatever is not the plain name of a file beside the index."""
    if not isinstance(name, str) or name != Path(name).name or "\\" in name or Path(name).suffix != suffix:
        raise ValueError(f"{index} names {name!r}; it may name {suffix} files beside it and nothing else")
    if not (index.parent / name).is_file():
        raise ValueError(f"{index} names {name}, which is not there; download it too")


# Pickles ---------------------------------------------------------------------------------------------------


def _unpickled(path: Path) -> Any:
    """A pickle by torch's restricted loader, which makes tensors and plain containers and calls nothing else."""
    _stored(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # of protocols it may not know; what it does not, it refuses
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes may raise anything; none of it is a reason to try another way
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"{path} asks for {foreign[1]}, which is code and not weights, so it was not loaded; use a safetensors "
                "version of it, or have its author save the weights alone: torch.save(model.state_dict(), …)"
            ) from None
        # torch's own words advise to load it without the restriction
        reason = "it is damaged" if isinstance(error, pickle.UnpicklingError) else str(error).split("\n")[0][:200]
        raise ValueError(f"{path} cannot be read as weights: {reason or type(error).__name__}") from None


def _stored(path: Path) -> None:
    """Refuse an archive that names files outside itself, or would grow when it is unpacked."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:  # damaged bytes may raise anything here too
        raise ValueError(f"{path} is a damaged archive: {error}; download it again") from None
    for entry in entries:
        if entry.filename.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", entry.filename):
            raise ValueError(f"{path} names {entry.filename!r}, a place outside of it; it was not loaded")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{path} holds {entry.filename!r} compressed, which torch never writes; it was not loaded")


def checked(path: Path, state: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """``state``, if it holds finite floating-point tensors of just these names and shapes."""
    missing, unknown = (sorted(keys) for keys in (shapes.keys() - state.keys(), state.keys() - shapes.keys()))
    if missing or unknown:
        words = [f"{what} {listed(names)}" for what, names in (("lacks", missing), ("has unknown", unknown)) if names]
        raise ValueError(f"{path} {' and '.join(words)}; it is no whole checkpoint of this layout and size")
    for name, shape in shapes.items():
        _tensor(path, name, state[name], shape)
    return {name: state[name].detach() for name in shapes}


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return f"{', '.join(names[:MOST])}{more}"


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _tensor(path: Path, name: str, value: object, shape: torch.Size) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{path}: {name} is a {type(value).__name__}, not a tensor")
    if value.dtype not in DTYPES or value.layout is not torch.strided or value.device.type != "cpu":
        kind = str(value.dtype).removeprefix("torch.")
        raise ValueError(
            f"{path}: {name} is {kind} ({str(value.layout).removeprefix('torch.')}, on {value.device}); weights are "
            "dense float32, bfloat16 or float16"
        )
    if value.shape != shape:
        raise ValueError(f"{path}: {name} has shape {tuple(value.shape)}; its layout and size need {tuple(shape)}")
    if not value.isfinite().all():
        raise ValueError(f"{path}: {name} holds a value that is NaN or infinite; these weights are damaged")


def as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as it is kept; what JSON cannot say is refused."""
    try:
        kept: dict[str, Any] = json.loads(json.dumps(config, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the configuration of the checkpoint is no plain data: {error}") from None
    return kept
