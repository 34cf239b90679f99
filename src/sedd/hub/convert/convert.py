"""From a published checkpoint to a model folder, and back."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sedd import checkpoint, factory
from sedd.config import RunConfig
from sedd.hub.convert import files
from sedd.hub.convert.layout import LAYOUTS, ROTARY, Layout, Sizes, fitting, recognised
from sedd.tokenizer import Integers, Tokenizer

RECORD = "published"
"""The record of a model folder that says where it came from."""
UNKNOWN = {"step": None, "tokens": None, "seconds": None, "skipped": 0, "best": None, "best_step": None}
"""How far it was trained, which a published checkpoint does not say."""


class Published(NamedTuple):
    """A published checkpoint, every entry of it looked at."""

    layout: Layout
    config: RunConfig
    vocab_size: int
    weights: Mapping[str, Mapping[str, Tensor]]
    """By the names of `transformer.Reference`: ``ema``, and ``model`` where the ones not averaged are there too."""
    original: dict[str, Any] | None
    """Its config.json."""
    folder: Path

    @property
    def parameters(self) -> int:
        """How many numbers were trained."""
        return sum(value.numel() for name, value in self.weights["ema"].items() if name != ROTARY)


def read(source: Path) -> Published:
    """The checkpoint at ``source``, a folder or a file; whatever is wrong with it is said in a sentence."""
    if (source / checkpoint.MANIFEST).is_file() and (reason := checkpoint.corruption(source)):
        raise ValueError(f"{source} is damaged: {reason}; download it again")
    found = files.read(source)
    layout = recognised(found.state)
    named = _named(found, layout.prefix)
    run, vocab_size = layout.understood(found.config, _sizes(found.path, named))
    shapes = _shapes(run, vocab_size)
    published = files.checked(found.path, named, shapes)
    _rotary(found.path, published[ROTARY])
    weights = {"ema": published}
    if found.average is not None:
        averaged = _averaged(found.path, found.average, named)
        weights = {"ema": files.checked(found.path, averaged, shapes), "model": published}
    original = files.as_json(found.config) if (found.path.parent / "config.json").is_file() else None
    return Published(layout, run, vocab_size, weights, original, found.path.parent)


def _named(found: files.Found, prefix: str) -> dict[str, Any]:
    """The weights by the network's names. Beside those under a prefix, Lightning keeps the schedule's own."""
    if not prefix:
        return dict(found.state)
    state = {name: value for name, value in found.state.items() if not name.startswith("noise.")}
    if strange := [name for name in state if not name.startswith(prefix)]:
        raise ValueError(f"{found.path} has unknown {files.listed(strange)} beside names that start with {prefix}")
    return {name.removeprefix(prefix): value for name, value in state.items()}


def save(found: Published, tokenizer: Tokenizer | None, out: Path, source: str) -> Path:
    """Write a model folder that every command reads; without a tokenizer its tokens are integers."""
    out = free(out)
    spoken = Integers(size=found.vocab_size) if tokenizer is None else tokenizer
    if spoken.vocab_size != found.vocab_size:
        raise ValueError(
            f"the tokenizer has {spoken.vocab_size} tokens and the model {found.vocab_size}; give the one it was "
            "trained with, or none"
        )
    found.config.data.tokenizer = spoken.kind
    records = {
        "config": {**found.config.as_dict(), "vocab_size": found.vocab_size},
        "state": UNKNOWN,
        RECORD: {"layout": found.layout.name, "config": found.original, "source": source},
    }
    return checkpoint.save(out.parent, out.name, found.weights, records, extra=spoken.save)


def write(folder: Path, out: Path, format: str | None = None) -> Layout:
    """Write the model in ``folder`` as the layout called ``format``, or the one that fits it."""
    out = free(out)
    loaded = factory.load(folder)  # what cannot be loaded is not handed on
    if loaded.labels:
        raise ValueError(f"{loaded.folder} has labels, and no published layout has a place for them; share it as it is")
    layout = fitting(loaded.config, format)
    vocab_size = loaded.process.vocab_size
    weights = checkpoint.load_tensors(loaded.folder, "ema")  # as they are stored, in their own precision
    config = _as_it_was(layout, loaded.folder, loaded.config, weights) or layout.described(loaded.config, vocab_size)
    tensors = {"model": {f"{layout.prefix}{name}": value for name, value in weights.items()}}
    checkpoint.save(out.parent, out.name, tensors, {"config": config}, extra=loaded.tokenizer.save)
    return layout


def free(out: Path) -> Path:
    """A place to write to, from the root on; one where there is something is refused."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} is there already and not an empty folder; choose another --out")
    return out.absolute()


def _as_it_was(layout: Layout, folder: Path, run: RunConfig, weights: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """The configuration a model was published with, where it still describes the model."""
    if not (folder / f"{RECORD}.json").is_file():
        return None
    original: dict[str, Any] | None = checkpoint.load_json(folder, RECORD)["config"]
    if original is None:
        return None
    then, _ = layout.understood(original, _sizes(folder, weights))
    same = (then.model, then.noise, then.objective) == (run.model, run.noise, run.objective)
    return original if same else None


def _shapes(run: RunConfig, vocab_size: int) -> dict[str, torch.Size]:
    """Names and shapes of the network that a run describes."""
    with torch.device("meta"):
        network = factory.build_network(run, factory.build_setup(run, vocab_size))
    return {name: value.shape for name, value in network.state_dict().items()}


def _sizes(path: Path, state: Mapping[str, Any]) -> Sizes:
    """The sizes that shapes tell; the rest of the shapes must then agree."""
    states, width = _shape(path, state, "vocab_embed.embedding", 2)
    (half,) = _shape(path, state, ROTARY, 1)
    timed = any(name.startswith("sigma_map.") for name in state)
    cond = _shape(path, state, "sigma_map.mlp.0.bias", 1)[0] if timed else None
    depth = len({found[1] for name in state if (found := re.match(r"blocks\.(\d+)\.", name))})
    if half < 1 or width % (2 * half) or states < 3:
        raise ValueError(
            f"{path}: {ROTARY} has {half} entries, which is no half of a head of a network {width} wide over {states}"
        )
    return Sizes(states, width, depth, width // (2 * half), cond)


def _shape(path: Path, state: Mapping[str, Any], name: str, axes: int) -> tuple[int, ...]:
    if not isinstance(value := state.get(name), Tensor) or value.ndim != axes:
        what = "lacks" if value is None else "has no tensor of the right shape under"
        raise ValueError(f"{path} {what} {name}; it is no checkpoint of {', '.join(LAYOUTS)}")
    return tuple(value.shape)


def _rotary(path: Path, frequencies: Tensor) -> None:
    """Refuse other frequencies than ours: we compute them and would not use these."""
    i = torch.arange(len(frequencies), dtype=torch.float64)
    ours = torch.exp(-math.log(1e4) / len(frequencies) * i)
    if not torch.allclose(frequencies.double(), ours, rtol=16 * torch.finfo(frequencies.dtype).eps, atol=0):
        raise ValueError(
            f"{path}: {ROTARY} is not 10⁴^(−2i/d); a network with other rotary positions is not known here"
        )


def _averaged(path: Path, average: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The averages of a Lightning checkpoint, a list in the order of the weights, under their names."""
    shadows = average.get("shadow_params") if isinstance(average, Mapping) else None
    names = [name for name in state if name != ROTARY]
    if not isinstance(shadows, list) or len(shadows) != len(names):
        count = len(shadows) if isinstance(shadows, list) else "none that are"
        raise ValueError(f"{path} has {count} averages under ema.shadow_params for {len(names)} weights")
    return {**dict(zip(names, shadows, strict=True)), ROTARY: state[ROTARY]}
