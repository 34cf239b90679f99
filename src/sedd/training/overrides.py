"""From what was asked for to a configuration."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from sedd import checkpoint
from sedd.config import RunConfig
from sedd.recipes import RECIPES

PATHS = {
    "process": "noise.process",
    "parameterization": "model.parameterization",
    "objective": "objective",
    "tokenizer": "data.tokenizer",
    "packing": "data.packing",
    "label": "data.label",
    "steps": "budget.steps",
    "minutes": "budget.minutes",
    "save_every": "train.save_every",
    "seed": "seed",
    "compile": "train.compile",
    "fsdp": "train.fsdp",
    "on_nonfinite": "train.on_nonfinite",
    "sources": "data.sources",
}
"""Which option of a run a word sets."""


def configured(
    words: Mapping[str, Any],
    *,
    stored: Mapping[str, Any] | None = None,
    recipe: str | None = None,
    file: Path | None = None,
    sets: Sequence[str] = (),
) -> RunConfig:
    """Defaults, then what a run stored, a recipe, a file, words, and ``sets`` as in optim.lr=1e-4: the later wins.

    A word is one of `PATHS`, the path of an option, or the name of a section with a mapping; None says nothing.
    """
    if recipe is not None and recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}; choose one of {', '.join(RECIPES)}")
    said = [f"{PATHS.get(name, name)}={json.dumps(value)}" for name, value in words.items() if value is not None]
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(RunConfig),
            OmegaConf.create(dict(stored or {})),
            OmegaConf.create(RECIPES[recipe] if recipe else {}),
            OmegaConf.load(file) if file else {},
            OmegaConf.from_dotlist(said),
            OmegaConf.from_dotlist(list(sets)),
        )
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, OSError, TypeError, YAMLError) as error:
        raise ValueError(f"the options do not fit: {str(error).splitlines()[0]}") from None
    assert isinstance(config, RunConfig)
    return config.resolved()


def stored(out: Path) -> dict[str, Any] | None:
    """The configuration of a run that goes on."""
    file = out / "config.json"
    return checkpoint.record(out, "config") if file.is_file() else None
