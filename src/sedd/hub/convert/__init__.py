"""Convert published checkpoints (SEDD, RADD, MDLM) to model folders and back.

The layout is recognized by the names of the weights. Every name, shape, dtype and value is checked before anything is
written; pickles are read with torch's restricted loader only.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sedd.files import atomic_folder
from sedd.hub.convert import files
from sedd.hub.convert.layout import LAYOUTS, ROTARY, CheckpointLayout, WeightSizes, choose_layout, detect_layout
from sedd.loading import load_model
from sedd.tokenizer import Integers, Tokenizer
from sedd.training import checkpoint
from sedd.training.config import RunConfig
from sedd.training.setup import build_network, build_setup

ORIGIN = "published"  # name of the JSON file of a model folder that records the checkpoint it was converted from
UNKNOWN_STATE = {"step": None, "tokens": None, "seconds": None, "skipped": 0, "best": None, "best_step": None}
"""The training state of a published checkpoint, which does not record it, or the step alone."""


class ImportedCheckpoint(NamedTuple):
    """A published checkpoint whose every entry was checked."""

    layout: CheckpointLayout
    config: RunConfig
    vocab_size: int
    weights: Mapping[str, Mapping[str, Tensor]]
    """``ema``, and ``model`` if the checkpoint holds the raw weights too, by the names of the reference network."""
    original: Mapping[str, Any] | None  # its config.json
    folder: Path
    step: int | None = None  # the training step, where it is recorded


def read_published(source: Path) -> ImportedCheckpoint:
    """Read and check the published checkpoint at ``source``, a folder or a file."""
    if (source / checkpoint.MANIFEST).is_file() and (reason := checkpoint.corruption(source)):
        raise ValueError(f"{source} is damaged: {reason}; download it again")
    path, stored, ema, config, step = files.read_checkpoint(source)
    layout = detect_layout(stored)
    # a Lightning checkpoint holds entries of its schedule too
    named = {name: value for name, value in stored.items() if not (layout.prefix and name.startswith("noise."))}
    if unknown := [name for name in named if not name.startswith(layout.prefix)]:
        names = files.abbreviate_names(unknown)
        raise ValueError(f"{path} has unknown {names} beside names that start with {layout.prefix}")
    state = {name.removeprefix(layout.prefix): value for name, value in named.items()}
    run, vocab_size = layout.parse_config(config, _measure(path, state))
    with torch.device("meta"):
        network = build_network(run, build_setup(run, vocab_size))
    shapes = {name: value.shape for name, value in network.state_dict().items()}
    weights = {"ema": files.check_tensors(path, state, shapes)}
    _check_rotary(path, weights["ema"][ROTARY])
    if ema is not None:
        averaged = _named_ema(path, ema, state)
        weights = {"ema": files.check_tensors(path, averaged, shapes), "model": weights["ema"]}
    original = config if (path.parent / "config.json").is_file() else None
    return ImportedCheckpoint(layout, run, vocab_size, weights, original, path.parent, step)


def save_model_folder(imported: ImportedCheckpoint, tokenizer: Tokenizer | None, out: Path, source: str) -> Path:
    """Write a model folder that every command reads; without a tokenizer its tokens are integers."""
    tokenizer = Integers(size=imported.vocab_size) if tokenizer is None else tokenizer
    if (size := tokenizer.vocab_size) != (own := imported.vocab_size):
        raise ValueError(f"the tokenizer has {size} tokens and the model {own}; give the model's tokenizer, or none")
    imported.config.data.tokenizer = tokenizer.kind
    records = {
        "config": {**imported.config.as_dict(), "vocab_size": imported.vocab_size},
        "state": UNKNOWN_STATE | {"step": imported.step},
        ORIGIN: {"layout": imported.layout.name, "config": imported.original, "source": source},
    }
    with atomic_folder(out) as folder:
        checkpoint.require_empty(out)
        checkpoint.write(folder, imported.weights, records, tokenizer.files())
    return out.absolute()


def export_model(folder: Path, out: Path, format: str | None = None) -> CheckpointLayout:
    """Write the model in ``folder`` in the layout called ``format``, by default the one that fits it."""
    with atomic_folder(out) as new:
        checkpoint.require_empty(out)
        loaded = load_model(folder)  # checks that the model can be loaded
        run, source = loaded.config, loaded.folder
        if loaded.labels:
            raise ValueError(f"{source} has labels, and no published layout has a place for them; share it as it is")
        layout = choose_layout(run, format)
        weights = checkpoint.load_weights(source, "ema")[0]  # in their stored precision, but for int8
        config = layout.write_config(run, loaded.process.vocab_size)
        if (original := (read_origin(source) or {}).get("config")) is not None:
            published, _ = layout.parse_config(original, _measure(source, weights))
            if (published.model, published.noise, published.objective) == (run.model, run.noise, run.objective):
                config = original  # it still describes the model
        tensors = {"model": {f"{layout.prefix}{name}": value for name, value in weights.items()}}
        checkpoint.write(new, tensors, {"config": config}, loaded.tokenizer.files())
    return layout


def read_origin(folder: Path) -> dict[str, Any] | None:
    """Read what a model folder records of the published checkpoint it was converted from; None if it was not."""
    return checkpoint.load_json(folder, ORIGIN) if (folder / f"{ORIGIN}.json").is_file() else None


def _measure(path: Path, state: Mapping[str, Any]) -> WeightSizes:
    """Infer the network's sizes from a few shapes; `files.check_tensors` then checks all of them."""
    num_states, width = _shape(path, state, "vocab_embed.embedding", 2)
    (half,) = _shape(path, state, ROTARY, 1)
    has_sigma = any(name.startswith("sigma_map.") for name in state)
    cond_dim = _shape(path, state, "sigma_map.mlp.0.bias", 1)[0] if has_sigma else None
    depth = len({found[1] for name in state if (found := re.match(r"blocks\.(\d+)\.", name))})
    if half < 1 or width % (2 * half) or num_states < 3:
        network = f"in a network of width {width} with {num_states} states"
        raise ValueError(f"{path}: {ROTARY} has {half} entries, which is not half the width of a head {network}")
    return WeightSizes(num_states, width, depth, width // (2 * half), cond_dim)


def _shape(path: Path, state: Mapping[str, Any], name: str, axes: int) -> tuple[int, ...]:
    if not isinstance(value := state.get(name), Tensor) or value.ndim != axes:
        what = "lacks" if value is None else "has no tensor of the right shape under"
        raise ValueError(f"{path} {what} {name}; it is not a checkpoint of {', '.join(LAYOUTS)}")
    return tuple(value.shape)


def _check_rotary(path: Path, frequencies: Tensor) -> None:
    """Reject other rotary frequencies than 10⁴^(−2i/d): the network computes them and ignores stored ones."""
    i = torch.arange(len(frequencies), dtype=torch.float64)
    expected = torch.exp(-math.log(1e4) / len(frequencies) * i)
    if not torch.allclose(frequencies.double(), expected, rtol=16 * torch.finfo(frequencies.dtype).eps, atol=0):
        raise ValueError(f"{path}: {ROTARY} is not 10⁴^(−2i/d); networks with other rotary positions are not supported")


def _named_ema(path: Path, ema: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the EMA weights of a checkpoint of training, stored as a list in the order of the weights, by name."""
    shadows = ema.get("shadow_params") if isinstance(ema, Mapping) else None
    names = [name for name in state if name != ROTARY]
    if not isinstance(shadows, list) or len(shadows) != len(names):
        count = len(shadows) if isinstance(shadows, list) else "no list of"
        raise ValueError(f"{path} has {count} EMA weights under ema.shadow_params for {len(names)} weights")
    return {**dict(zip(names, shadows, strict=True)), ROTARY: state[ROTARY]}
