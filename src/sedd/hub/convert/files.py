"""Files of published checkpoints: finding the weights and reading them without executing code."""

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

from sedd.training import checkpoint
from sedd.yaml_file import read_settings

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of weights in order of preference: safetensors hold data only."""
TRAINER_FILES = ("checkpoint.pth", "checkpoints-meta/checkpoint.pth")
"""Where the training code of SEDD and RADD saves its state in the folder of a run."""
HYDRA_CONFIG = Path(".hydra") / "config.yaml"
"""The configuration in the folder of a run of that code, one level above its checkpoints."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
MAX_FILE_NAME = 255
"""Bytes of the name of a file, on all usual systems."""
MAX_LISTED = 10
"""Names listed in an error message."""


class RawCheckpoint(NamedTuple):
    """The unchecked contents of a checkpoint."""

    path: Path
    state: Mapping[str, Any]
    """The stored object of each name."""
    ema: Any
    """The ``ema`` entry of a checkpoint of training: of Lightning, or of the code of SEDD and RADD."""
    config: Mapping[str, Any]
    """Its configuration; empty if it has none."""
    step: int | None = None
    """The training step, where it is recorded."""


def find_weights(source: Path) -> Path:
    """Return the file of weights that a source is or contains."""
    if source.is_file():
        return source
    if not source.is_dir():
        raise ValueError(f"{source} does not exist; give a folder, a file or a Hub id such as owner/name")
    named = [source / name for name in (*WEIGHT_FILES, *TRAINER_FILES) if (source / name).is_file()]
    single = named or [path for path in sorted(source.glob("*.ckpt")) if path.is_file()]
    if not named and len(single) != 1:
        several = f"holds {len(single)} .ckpt files: name one of them" if single else "holds no weights"
        raise ValueError(
            f"{source} {several}; a published checkpoint is one of {', '.join((*WEIGHT_FILES, *TRAINER_FILES))}, or a "
            "single .ckpt"
        )
    return single[0]


def read_checkpoint(source: Path) -> RawCheckpoint:
    """Read the weights and the configuration of a source."""
    path = find_weights(source)
    config = _read_config(path.parent)
    content = _read_shards(path) if path.name.endswith(".index.json") else _read_weights(path)
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{path} holds a {type(content).__name__}, not weights by their names")
    if isinstance(content.get("model"), Mapping) and "ema" in content:
        state, step = _without_ddp_prefix(_check_keys(path, content["model"])), content.get("step")
        return RawCheckpoint(path, state, content["ema"], config, step if isinstance(step, int) else None)
    if not isinstance(content.get("state_dict"), Mapping):
        return RawCheckpoint(path, _check_keys(path, content), None, config)
    settings = content.get("hyper_parameters")
    nested = settings.get("config") if isinstance(settings, Mapping) else None
    config = config or (dict(nested) if isinstance(nested, Mapping) else {})
    return RawCheckpoint(path, _check_keys(path, content["state_dict"]), content.get("ema"), config)


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration beside the weights, or that of the run whose checkpoints the folder holds."""
    if (folder / "config.json").is_file():
        return _read_object(folder / "config.json")
    found = [place / HYDRA_CONFIG for place in (folder, folder.parent) if (place / HYDRA_CONFIG).is_file()]
    if not found:
        return {}
    return {str(name): value for name, value in read_settings(found[0]).items()}


def _without_ddp_prefix(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Remove the prefix that names have if the weights were those of the wrapper of DDP."""
    prefix = "module."
    is_wrapped = all(name.startswith(prefix) for name in state)
    return {name.removeprefix(prefix): value for name, value in state.items()} if is_wrapped else state


def _check_keys(path: Path, state: Mapping[Any, Any]) -> Mapping[str, Any]:
    if unnamed := [name for name in state if not isinstance(name, str)]:
        raise ValueError(f"{path} has the key {unnamed[0]!r}; weights have names")
    return state


def _read_object(path: Path) -> dict[str, Any]:
    found = checkpoint.load_json(path.parent, path.stem)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object")
    return found


def _read_weights(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return checkpoint.load_tensors(path.parent, path.stem)
    if path.suffix in PICKLE_SUFFIXES:
        return _unpickle(path)
    raise ValueError(
        f"{path} ends in {path.suffix or 'nothing'!r}; weights end in .safetensors, {', '.join(PICKLE_SUFFIXES)}"
    )


# Sharded checkpoints ---------------------------------------------------------------------------------------


def _read_shards(index: Path) -> dict[str, Any]:
    """Join the files that an index names; each must hold exactly the weights the index assigns to it."""
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map; it must map the names of weights to files")
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    joined: dict[str, Any] = {}
    for name in weight_map.values():
        _check_shard_name(index, name, suffix)
    for name in dict.fromkeys(weight_map.values()):
        shard = _read_weights(index.parent / name)
        expected = {key for key, file in weight_map.items() if file == name}
        if not isinstance(shard, Mapping) or set(shard) != expected:
            raise ValueError(
                f"{index.parent / name} does not hold the weights that {index.name} lists; download both again"
            )
        joined |= shard
    return joined


def _check_shard_name(index: Path, name: object, suffix: str) -> None:
    """Refuse everything but the plain name of a file in the folder of the index."""
    if (
        not isinstance(name, str)
        or name != Path(name).name
        or "\\" in name
        or Path(name).suffix != suffix
        or len(name.encode(errors="replace")) > MAX_FILE_NAME
    ):
        shown = f"{str(name)[:MAX_FILE_NAME]!r}"
        raise ValueError(f"{index} names {shown}; it may name {suffix} files beside it and nothing else")
    if not (index.parent / name).is_file():
        raise ValueError(f"{index} names {name}, which is not there; download it too")


# Pickles ---------------------------------------------------------------------------------------------------


class _NumpyNumber:
    """Takes the place of a NumPy number, such as the learning rate that a trainer saves with its optimizer.

    NumPy's own functions are not called: nothing here reads the number.
    """

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


NUMPY_NUMBERS: list[Any] = [
    (_NumpyNumber, name) for name in ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
]


def _unpickle(path: Path) -> Any:
    """Read a pickle with torch's restricted loader, which builds only tensors and plain containers."""
    _check_archive(path)
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # about pickle protocols; unknown ones are refused
            torch.serialization.safe_globals(NUMPY_NUMBERS),
        ):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes may raise anything; never fall back to an unrestricted loader
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"{path} contains {foreign[1]}, which is code and not weights, so it was not loaded; use a safetensors "
                "version of it, or have its author save the weights alone: torch.save(model.state_dict(), …)"
            ) from None
        # torch's own message advises to load it without the restriction
        reason = "it is damaged" if isinstance(error, pickle.UnpicklingError) else str(error).split("\n")[0][:200]
        raise ValueError(f"{path} cannot be read as weights: {reason or type(error).__name__}") from None


def _check_archive(path: Path) -> None:
    """Refuse an archive with paths outside of it or with compressed entries, which could expand to any size."""
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


def check_tensors(path: Path, state: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return ``state`` if it holds finite floating-point tensors of exactly these names and shapes."""
    missing, unknown = (sorted(keys) for keys in (shapes.keys() - state.keys(), state.keys() - shapes.keys()))
    if missing or unknown:
        found = (("lacks", missing), ("has unknown", unknown))
        problems = [f"{what} {abbreviate_names(names)}" for what, names in found if names]
        raise ValueError(f"{path} {' and '.join(problems)}; it is not a complete checkpoint of this layout and size")
    for name, shape in shapes.items():
        _check_tensor(path, name, state[name], shape)
    return {name: state[name].detach() for name in shapes}


def abbreviate_names(names: list[str]) -> str:
    """Return the first names and the number of the others."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}"


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check_tensor(path: Path, name: str, value: object, shape: torch.Size) -> None:
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
    _check_stored(path, name, value)
    if not value.isfinite().all():
        raise ValueError(f"{path}: {name} holds a value that is NaN or infinite; these weights are damaged")


def _check_stored(path: Path, name: str, value: Tensor) -> None:
    """Refuse a tensor of more numbers than are stored for it: a stride of 0 makes a small file ask for any memory."""
    stored = value.untyped_storage().nbytes()
    if value.numel() * value.element_size() > stored:
        raise ValueError(
            f"{path}: {name} has {value.numel():,} numbers, and {stored // value.element_size():,} are stored; weights "
            "are stored in full"
        )


def plain_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as plain JSON data; anything else in it is refused."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(config, allow_nan=False))
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"the configuration of the checkpoint is not plain data: {error}") from None
    return plain
