"""Checkpoints: safetensors and JSON files, written atomically, with a manifest of SHA-256 hashes.

A checkpoint is a folder ``step-00000500`` that appears by a rename once everything in it is on the disk. If one is
damaged later, its manifest shows it, and the checkpoint before it is used. Only tensors need torch.
"""

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from safetensors import SafetensorError, safe_open

from sedd import files, models
from sedd.files import read_json
from sedd.runtime.launch import find_launch
from sedd.schema import MAX_VOCABULARY, check_choice, check_count, check_fields
from sedd.terminal import warn
from sedd.training.config import RunConfig

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
MANIFEST = "manifest.json"
CONFIG = "config.json"  # the configuration of a run or model, as sedd writes it
CHECKPOINTS = "checkpoints"  # the subfolder of a run with its checkpoints
WEIGHT_SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth")  # endings of files of weights, ours and published ones
MODEL_FILES = (CONFIG, "ema.safetensors", "state.json", "tokenizer_config.json")  # what a model folder must have
CHECKPOINT_FILES = (*MODEL_FILES, "model.safetensors", "optimizer.safetensors")  # what a checkpoint of a run must have
STATE_TYPES: dict[str, Any] = dict.fromkeys(("step", "tokens", "best_step"), int | None)
STATE_TYPES |= dict.fromkeys(("seconds", "best"), float | None) | {"above_best": bool}
"""What others read of the training state of a model; None where it is not known."""


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


# Writing ---------------------------------------------------------------------------------------------------


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Convert errors of writing ``path`` to a ValueError of one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = str(error) if isinstance(error, SafetensorError) else error.strerror or str(error)
        shown = Path(*(part.removeprefix(files.PARTIAL_PREFIX) for part in path.parts))
        raise ValueError(f"{shown} could not be written: {reason}; what was saved before is untouched") from None


def check_writable(folder: Path) -> None:
    """Reject a folder that cannot be written to or is in use, before any work; leave none that did not exist."""
    files.check_utf8(folder)
    if find_launch().rank == 0:
        with files.locked_folder(folder):
            pass


def require_empty(out: Path) -> None:
    """Reject a folder for a model if it exists and is not empty."""
    files.check_utf8(out)
    files.require_empty_folder(out)


def write_tensors(path: Path, values: "Mapping[str, Tensor]") -> None:
    """Write a .safetensors file, whose tensors must be contiguous and share no memory; few are copied for that."""
    from safetensors.torch import save_file

    separate: dict[str, Tensor] = {}
    used: set[int] = set()
    for key, value in values.items():
        host = value.detach().cpu().contiguous()
        if host.untyped_storage().nbytes() != host.nbytes or host.data_ptr() in used:
            host = host.clone()
        used.add(host.data_ptr())
        separate[key] = host
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(separate, path, metadata={"format": "pt"})  # other readers require it


def write_json(path: Path, value: Any) -> None:
    """Write a .json file atomically: a killed process leaves the old file or the new one."""
    with explain_write_errors(path):
        files.write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def save(
    root: Path,
    name: str,
    tensors: "Mapping[str, Mapping[str, Tensor]]",
    records: Mapping[str, Any],
    others: Mapping[str, bytes],
) -> Path:
    """Write the checkpoint ``root/name`` atomically; an intact one of that name is left as it is.

    ``tensors`` and ``records`` are .safetensors and .json files by their stem, ``others`` other files by their name.
    """
    target = root / name
    with explain_write_errors(target), files.atomic_folder(target) as folder:
        if target.exists() and corruption(target) is None:
            return target
        write(folder, tensors, records, others)
        shutil.rmtree(target, ignore_errors=True)  # damaged
    return target


def write(
    folder: Path, tensors: "Mapping[str, Mapping[str, Tensor]]", records: Mapping[str, Any], others: Mapping[str, bytes]
) -> None:
    """Write the files of a checkpoint and their manifest into a folder of `files.atomic_folder`, as `save` does."""
    with explain_write_errors(folder):
        for stem, values in tensors.items():
            write_tensors(folder / f"{stem}.safetensors", values)
        for stem, record in records.items():
            write_json(folder / f"{stem}.json", record)
        for file, content in others.items():
            (folder / file).write_bytes(content)
        written = [*(f"{stem}.safetensors" for stem in tensors), *(f"{stem}.json" for stem in records), *others]
        _write_manifest(folder, written)


def _write_manifest(folder: Path, names: Sequence[str]) -> None:
    """Add the manifest of these files, all of which must be there, and flush them to the disk."""
    paths = [folder / name for name in sorted(names)]
    write_json(folder / MANIFEST, {p.name: {"bytes": p.stat().st_size, "sha256": files.sha256(p)} for p in paths})
    for path in [*paths, folder]:
        files.fsync(path)


# Reading ---------------------------------------------------------------------------------------------------


def load_tensors(folder: Path, stem: str, opened: Path | None = None) -> "dict[str, Tensor]":
    """Load one .safetensors file of a checkpoint, from the path ``opened`` if it is open already."""
    from safetensors.torch import load_file

    path = folder / f"{stem}.safetensors"
    try:
        tensors = load_file(opened or path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if name := nonfinite(tensors):
        cause = "the file is damaged, or its training diverged: use another checkpoint"
        raise ValueError(f"{path}: {name} holds a value that is NaN or infinite; {cause}")
    return tensors


def nonfinite(tensors: "Mapping[str, Tensor]") -> str | None:
    """Return the name of a tensor that has a value that is not finite, or None if all are."""
    for name, value in tensors.items():
        if value.is_floating_point() and value.numel():
            wide = value if value.element_size() > 1 else value.float()  # torch has no aminmax of float8
            low, high = wide.detach().aminmax()  # one pass, without a copy
            if not (low.isfinite() and high.isfinite()):
                return name
    return None


def load_json(folder: Path, stem: str) -> Any:
    """Load one .json file of a checkpoint."""
    path = folder / f"{stem}.json"
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_state(folder: Path) -> dict[str, Any]:
    """Read the training state of a model: its step, tokens, seconds and best bound."""
    state = load_json(folder, "state")
    check_fields(str(folder / "state.json"), state, STATE_TYPES, required=("step", "tokens", "best", "best_step"))
    return dict(state)


def corruption(folder: Path, required: Sequence[str] = ()) -> str | None:
    """Return what is wrong with a checkpoint compared with its manifest, or None if it is intact."""
    try:
        manifest = read_json(folder / MANIFEST)
        expected = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest cannot be read"
    if absent := [name for name in required if name not in expected]:
        return f"its manifest does not have {', '.join(absent)}"
    for name, entry in expected.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:  # a downloaded manifest is untrusted
            return f"its manifest names {name}, outside of it"
        if not path.is_file():
            return f"{name} is missing"
        if entry != (path.stat().st_size, files.sha256(path)):
            return f"{name} is not what was written"
    return None


def list_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    return sorted(root.glob("step-*"), reverse=True)


def newest(root: Path, warn: Callable[[str], None]) -> Path | None:
    """Return the newest intact checkpoint, or None if there are no checkpoints; warn of damaged ones."""
    checkpoints = list_checkpoints(root)
    for folder in checkpoints:
        if (reason := corruption(folder, CHECKPOINT_FILES)) is None:
            return folder
        if not folder.exists():
            raise ValueError(f"{folder} was removed while it was read; try again")
        warn(f"checkpoint {folder.name} is damaged ({reason}); trying the one before it")
    if checkpoints:
        raise ValueError(f"no checkpoint of {len(checkpoints)} in {root} is intact; start anew with another --out")
    return None


# Models ----------------------------------------------------------------------------------------------------


class StoredModel(NamedTuple):
    """A model on disk, without its weights."""

    folder: Path  # the model folder or checkpoint
    config: RunConfig
    vocab_size: int
    labels: tuple[str, ...]
    data_sha256: str | None  # hash of the data it was trained on, if it was recorded
    token_counts: list[int] | None = None
    """How often each token occurs in its training data, where its noise has their frequencies."""


def holds_model(path: Path | str) -> bool:
    """Return whether there are files of a model at a path: of a run, a model folder or a published checkpoint."""
    if not os.path.isdir(path):  # of a text too long for the name of a file, `Path.is_dir` raises an error
        return False
    return any((Path(path) / name).exists() for name in (CHECKPOINTS, "log.jsonl", "config.json")) or has_weights(path)


def has_weights(folder: Path | str) -> bool:
    """Return whether a folder holds a file of weights, ours or published; the .bin files of prepared data are none."""
    return any(file.suffix in WEIGHT_SUFFIXES or file.match("pytorch_model*.bin") for file in Path(folder).glob("*"))


def retry_if_pruned(read: "Callable[Concatenate[Path | str, P], T]") -> "Callable[Concatenate[Path | str, P], T]":
    """Make a function of a run's folder start again if it failed while training removed one of its checkpoints."""

    @wraps(read)
    def retrying(folder: Path | str, /, *args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            checkpoints = list_checkpoints(Path(folder) / CHECKPOINTS)
            try:
                return read(folder, *args, **kwargs)
            except (OSError, ValueError):
                if all(checkpoint.exists() for checkpoint in checkpoints):
                    raise

    return retrying


def locate_model(name: Path | str) -> Path | None:
    """Return the folder of a model by its name: a folder here that holds one, else a bundled one, else None."""
    built_in = models.built_in_model(str(name))
    if not holds_model(name):
        return built_in
    if built_in is not None and not built_in.samefile(name):
        warn(f"{name} is the folder here, not the bundled model of that name")
    return Path(name)


@retry_if_pruned
def find_model(folder: Path | str, weights: str = "ema") -> StoredModel:
    """Find a model on disk, with the weights file of this stem: a model folder, a checkpoint, or a run's best one."""
    path = Path(folder)
    if (path / CHECKPOINTS).is_dir():
        path = best_or_newest(path / CHECKPOINTS) or path
    elif (path / MANIFEST).is_file():
        present = [name for name in (*MODEL_FILES, f"{weights}.safetensors") if (path / name).is_file()]
        if reason := corruption(path, present):
            raise ValueError(f"{path} is damaged: {reason}; use another checkpoint")
    elif holds_model(path):
        warn(f"{path} has no {MANIFEST}, so only damage that leaves its weights unreadable or not finite is noticed")
    if not (path / "config.json").is_file() or not (path / f"{weights}.safetensors").is_file():
        raise ValueError(no_model(Path(folder)))
    return read_stored_model(path)


def best_or_newest(root: Path) -> Path | None:
    """Return the newest intact checkpoint or, if its run has found higher validation bounds since, the best one."""
    before = list_checkpoints(root)
    last = newest(root, warn)
    state = {} if last is None else read_state(last)
    if last is None or not state.get("above_best") or state["best_step"] in (None, state["step"]):
        return last
    best, step = root / step_name(state["best_step"]), f"step {state['best_step']:,}"
    if reason := corruption(best, CHECKPOINT_FILES):
        if best in before and not best.exists():
            raise ValueError(f"{best} was removed while it was read; call the command again")
        _warn_once(f"{step} of {root.parent} had the lowest validation bound, and {best} is damaged: {reason}")
        return last
    bound = f"the lowest validation bound ({state['best']:.4f} nats per token)"
    _warn_once(f"{root.parent}: using {step}, which has {bound}; for step {state['step']:,}, the last, name {last}")
    return best


@cache
def _warn_once(text: str) -> None:
    """Print a message, of several processes in the first."""
    if find_launch().rank == 0:
        warn(text)


def no_model(folder: Path) -> str:
    """Return the message that a folder holds no model."""
    if (folder / "log.jsonl").is_file():
        return f"the run {folder} has no checkpoint yet; wait for its first, or set train.save_every lower"
    why = "" if folder.exists() else ": it does not exist"
    what = "give the folder of a run, one of its checkpoints, what sedd import wrote, or a name on the Hub, owner/name"
    return f"{folder} holds no model{why}; {what}; {models.list_built_in()}"


DERIVED: dict[str, Any] = {
    "vocab_size": int,
    "labels": list[str],
    "data_sha256": str | None,
    "token_counts": list[int] | None,
}
"""Keys of a model's config.json that are no settings of its run, but follow from its data, and their types."""


def read_stored_model(path: Path) -> StoredModel:
    """Read the configuration of a model folder or checkpoint."""
    where, stored = str(path / CONFIG), load_json(path, "config")
    check_fields(where, stored, DERIVED, required=["vocab_size"])
    vocab_size, labels, data_sha256, counts = map(stored.get, DERIVED)
    check_count("vocab_size", vocab_size, most=MAX_VOCABULARY)
    check_count("the number of labels", len(labels or ()), 0, 2**16 - 1)
    if counts is not None and not (len(counts) == vocab_size and all(0 <= count < 2**53 for count in counts)):
        needed = f"a whole number, 0 or more, for each of {vocab_size} tokens"
        raise ValueError(f"{where} has token_counts {repr(counts)[:80]}; they must be {needed}")
    return StoredModel(path, read_run_config(path), vocab_size, tuple(labels or ()), data_sha256, counts)


def read_run_config(folder: Path) -> RunConfig:
    """Read the configuration of a run or model from its config.json."""
    stored = load_json(folder, "config")
    try:
        options = {k: v for k, v in stored.items() if k not in DERIVED} if isinstance(stored, dict) else stored
        return RunConfig.from_dict(options)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from None


def run_folder(path: Path) -> Path:
    """Return the run that a checkpoint belongs to, or ``path`` itself if it is not one of a run's checkpoints."""
    return path.parent.parent if path.parent.name == CHECKPOINTS else path


# Removing --------------------------------------------------------------------------------------------------


def prune(root: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the newest ``keep`` checkpoints and that of ``best_step``.

    Each is renamed first, so that no reader takes what is left of it for a damaged one.
    """
    for folder in list_checkpoints(root)[keep:]:
        if best_step is None or folder.name != step_name(best_step):
            removed = root / f"{files.PARTIAL_PREFIX}{folder.name}"
            with suppress(OSError):  # a failure is tried again at the next save
                folder.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


def set_aside_corrupted(root: Path, resumed: Path | None) -> None:
    """Before resuming from ``resumed``, rename the newer, damaged checkpoints and remove partially written ones."""
    with explain_write_errors(root):
        for folder in list_checkpoints(root):
            if resumed is not None and folder.name > resumed.name:
                damaged = root / f"damaged-{folder.name}"
                shutil.rmtree(damaged, ignore_errors=True)
                folder.rename(damaged)
    for folder in root.glob(f"{files.PARTIAL_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


BUFFERS = ("inv_freq",)  # last parts of the names in a weights file that are not parameters
SCALE_SUFFIX = "_scale"
"""Ends the name of the scales of an int8 matrix, after the name of the matrix, which is there too."""
WEIGHT_DTYPES = ("int8", "bfloat16", "float32")  # the forms in which weights are stored for sharing
DTYPE_NAMES = {"I8": "int8", "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Dtypes by their names in a .safetensors file."""


def quantize_int8(weight: "Tensor") -> "tuple[Tensor, Tensor]":
    """Return q and s of every row: q = round(w/s), s = max |w|/127, so |w − s·q| ≤ s/2; no data calibrates it."""
    import torch

    scale = (weight.abs().amax(-1, keepdim=True).double() / 127).float()
    scale = torch.where(scale > 0, scale, 1.0)  # a row of zeros
    return (weight.double() / scale.double()).round().to(torch.int8), scale


def pack_weights(weights: "Mapping[str, Tensor]", dtype: str) -> "dict[str, Tensor]":
    """Return weights as they are stored for sharing; in ``int8``, matrices have scales, and the rest is in float32."""
    import torch

    check_choice("dtype", dtype, WEIGHT_DTYPES)
    packed: dict[str, Tensor] = {}
    if name := nonfinite(weights):
        raise ValueError(f"weight {name} is not finite; its training diverged: take another checkpoint")
    for name, value in weights.items():
        is_buffer = name.rpartition(".")[2] in BUFFERS
        if dtype == "int8" and value.ndim == 2:
            packed[name], packed[name + SCALE_SUFFIX] = quantize_int8(value.float())
        else:
            packed[name] = value.to(torch.bfloat16 if dtype == "bfloat16" and not is_buffer else torch.float32)
    return packed


def load_weights(folder: Path, stem: str) -> "tuple[dict[str, Tensor], str]":
    """Load the weights of a network, those stored as int8 in float32, and the SHA-256 hash of their file."""
    import torch

    path = folder / f"{stem}.safetensors"
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    with file:  # open, it is one file, whatever happens to its name meanwhile
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        weights = load_tensors(folder, stem, Path(f"/dev/fd/{file.fileno()}"))
    for name in [name for name, values in weights.items() if values.dtype == torch.int8]:
        values, scale = weights[name], weights.pop(name + SCALE_SUFFIX, None)
        if scale is None or scale.shape != (*values.shape[:-1], 1):
            found = "are missing" if scale is None else f"have shape {tuple(scale.shape)}"
            what = f"{name} is int8 of shape {tuple(values.shape)}, and its scales {found}"
            raise ValueError(f"{path}: {what}; there must be one per row: export the model again")
        weights[name] = values.float() * scale
    return weights, sha256


class StoredWeights(NamedTuple):
    """What the header of a .safetensors file says about the weights of a network."""

    parameters: int
    dtype: str  # the dtype of most parameters: int8, bfloat16 or float32
    bytes: int  # size of the file


def read_header(folder: Path) -> StoredWeights:
    """Read how weights are stored, without loading them."""
    path, counts = folder / "ema.safetensors", Counter[str]()
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            for name, found in slices.items():
                is_scale = name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in slices
                if name.rpartition(".")[2] not in BUFFERS and not is_scale:
                    counts[found.get_dtype()] += math.prod(found.get_shape())
        size = path.stat().st_size
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    most = max(counts, key=counts.__getitem__, default="F32")
    return StoredWeights(counts.total(), DTYPE_NAMES.get(most, most), size)
