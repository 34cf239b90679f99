"""Files of published checkpoints: finding the weights and reading them without executing code."""

import pickle
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sedd.training import checkpoint
from sedd.yaml_file import read_settings

WEIGHT_FILES = tuple(name + end for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json"))
"""Files of weights in order of preference: safetensors hold data only."""
KNOWN_FILES = (*WEIGHT_FILES, "checkpoint.pth", "checkpoints-meta/checkpoint.pth")
"""The last two are where the training code of SEDD and RADD saves its state in the folder of a run."""
HYDRA_CONFIG = Path(".hydra") / "config.yaml"
"""The configuration in the folder of a run of that code, one level above its checkpoints."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_FILE_NAME = 255  # bytes of the name of a file, on all usual systems
MAX_LISTED = 10  # names listed in an error message


def read_checkpoint(source: Path) -> tuple[Path, Mapping[str, Any], Any, Mapping[str, Any], int | None]:
    """Return the unchecked contents of a source: its file, the object of each name, ``ema``, configuration and step.

    ``ema`` is an entry of checkpoints of training: of Lightning, or of the code of SEDD and RADD.
    """
    path = _find_weights(source)
    config = _read_config(path.parent)
    content = _read_shards(path) if path.name.endswith(".index.json") else _read_weights(path)
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{path} holds a {type(content).__name__}, not weights by their names")
    state, ema, step = content, None, None
    match content:
        case {"model": dict(state), "ema": ema}:
            if all(str(name).startswith("module.") for name in state):  # the weights of the wrapper of DDP
                state = {name.removeprefix("module."): value for name, value in state.items()}
            step = content["step"] if isinstance(content.get("step"), int) else None
        case {"state_dict": dict(state)}:
            ema = content.get("ema")
            match content.get("hyper_parameters"):
                case {"config": dict(settings)} if not config:
                    config = settings
    if unnamed := [name for name in state if not isinstance(name, str)]:
        raise ValueError(f"{path} has the key {unnamed[0]!r}; weights have names")
    return path, state, ema, config, step


def _find_weights(source: Path) -> Path:
    """Return the file of weights that a source is or contains."""
    if source.is_file():
        return source
    if not source.is_dir():
        raise ValueError(f"{source} does not exist; give a folder, a file or a Hub id such as owner/name")
    if named := [source / name for name in KNOWN_FILES if (source / name).is_file()]:
        return named[0]
    single = [path for path in source.glob("*.ckpt") if path.is_file()]
    if len(single) != 1:
        several = f"holds {len(single)} .ckpt files: name one of them" if single else "holds no weights"
        raise ValueError(f"{source} {several}; a checkpoint is one of {', '.join(KNOWN_FILES)}, or a single .ckpt")
    return single[0]


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration beside the weights, or that of the run whose checkpoints the folder holds."""
    if (folder / "config.json").is_file():
        return read_object(folder / "config.json")
    for path in (folder / HYDRA_CONFIG, folder.parent / HYDRA_CONFIG):
        if path.is_file():
            return {str(name): value for name, value in read_settings(path).items()}
    return {}


def read_object(path: Path) -> dict[str, Any]:
    if isinstance(found := checkpoint.load_json(path.parent, path.stem), dict):
        return found
    raise ValueError(f"{path} holds a {type(found).__name__}, not an object")


def _read_shards(index: Path) -> dict[str, Any]:
    """Join the files that an index names; each must hold exactly the weights the index assigns to it."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map; it must map the names of weights to files")
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    joined: dict[str, Any] = {}
    expected = defaultdict[str, set[str]](set)
    for key, name in weight_map.items():
        is_beside = isinstance(name, str) and not re.search(r"[/\\\0]", name) and name.endswith(suffix)
        if not is_beside or len(name.encode(errors="replace")) > MAX_FILE_NAME:
            shown = f"{str(name)[:MAX_FILE_NAME]!r}"
            raise ValueError(f"{index} names {shown}; it may name {suffix} files beside it and nothing else")
        expected[name].add(key)
    for name, keys in expected.items():
        if not (path := index.parent / name).is_file():
            raise ValueError(f"{index} names {name}, which is not there; download it too")
        shard = _read_weights(path)
        if not isinstance(shard, Mapping) or set(shard) != keys:
            raise ValueError(f"{path} does not hold the weights that {index.name} lists; download both again")
        joined |= shard
    return joined


def _read_weights(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return checkpoint.load_tensors(path.parent, path.stem)
    if path.suffix in PICKLE_SUFFIXES:
        return _unpickle(path)
    endings = ", ".join((".safetensors", *PICKLE_SUFFIXES))
    raise ValueError(f"{path} ends in {path.suffix or 'nothing'!r}; weights end in {endings}")


class _NumpyNumber:
    """A NumPy number, as the learning rate that a trainer saves. Nothing reads it; NumPy's functions are not called."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


NUMPY_NAMES = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


def _unpickle(path: Path) -> Any:
    """Read a pickle with torch's restricted loader, which builds only tensors and plain containers."""
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # about pickle protocols; unknown ones are rejected
            torch.serialization.safe_globals([(_NumpyNumber, name) for name in NUMPY_NAMES]),
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


def check_tensors(path: Path, state: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return ``state`` if it holds finite floating-point tensors of exactly these names and shapes."""
    differing = (("lacks", sorted(shapes.keys() - state.keys())), ("has unknown", sorted(state.keys() - shapes.keys())))
    if problems := [f"{what} {abbreviate_names(names)}" for what, names in differing if names]:
        raise ValueError(f"{path} {' and '.join(problems)}; it is not a complete checkpoint of this layout and size")
    for name, shape in shapes.items():
        if problem := _tensor_problem(state[name], shape):
            raise ValueError(f"{path}: {name} {problem}")
    return {name: state[name].detach() for name in shapes}


def abbreviate_names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}"


def _tensor_problem(value: object, shape: torch.Size) -> str | None:
    """Return why a value cannot be a weight of this shape."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    if value.dtype not in DTYPES or value.layout is not torch.strided or value.device.type != "cpu":
        kind, layout = (str(what).removeprefix("torch.") for what in (value.dtype, value.layout))
        return f"is {kind} ({layout}, on {value.device}); weights are dense float32, bfloat16 or float16"
    if value.shape != shape:
        return f"has shape {tuple(value.shape)}; its layout and size need {tuple(shape)}"
    # a stride of 0 makes a small file ask for any memory
    if value.numel() > (stored := value.untyped_storage().nbytes() // value.element_size()):
        return f"has {value.numel():,} numbers, and {stored:,} are stored; weights are stored in full"
    if not value.isfinite().all():
        return "holds a value that is NaN or infinite; these weights are damaged"
    return None
