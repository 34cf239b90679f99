"""Merge defaults, a recipe, a file and flags into the configuration of a run."""

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
"""The configuration key that each flag of ``sedd train`` sets."""


def merge_config(
    flags: Mapping[str, Any],
    *,
    stored: Mapping[str, Any] | None = None,
    recipe: str | None = None,
    file: Path | None = None,
    sets: Sequence[str] = (),
) -> RunConfig:
    """Merge defaults, a stored configuration, a recipe, a file, flags and ``sets``; later ones win.

    Args:
        flags: Values by name: a key of `PATHS`, a configuration key, or a section with a mapping; None is left out.
        stored: The configuration of the run that is resumed.
        recipe: A name in `recipes.RECIPES`.
        file: A YAML file.
        sets: Assignments as in ``optim.lr=1e-4``.
    """
    if recipe is not None and recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}; choose one of {', '.join(RECIPES)}")
    assignments = [f"{PATHS.get(name, name)}={json.dumps(value)}" for name, value in flags.items() if value is not None]
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(RunConfig),
            OmegaConf.create(dict(stored or {})),
            OmegaConf.create(RECIPES[recipe] if recipe else {}),
            OmegaConf.load(file) if file else {},
            OmegaConf.from_dotlist(assignments),
            OmegaConf.from_dotlist(list(sets)),
        )
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, OSError, TypeError, YAMLError) as error:
        raise ValueError(f"the options do not fit: {str(error).splitlines()[0]}") from None
    assert isinstance(config, RunConfig)
    return config.resolved()


def stored_config(out: Path) -> dict[str, Any] | None:
    """Return the stored configuration of the run in ``out``, if there is one."""
    return checkpoint.load_json(out, "config") if (out / "config.json").is_file() else None
