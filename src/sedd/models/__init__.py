"""Names of models: of the bundled ones, each in a folder here, and on the Hugging Face Hub.

A folder holds the configuration, the tokenizer, the weights, a manifest and a model card. ``SEDD_MODELS`` names another
folder of models to use instead. No torch here.
"""

import os
import re
from pathlib import Path

DEFAULT = "stories"  # the model of commands that are given none


def built_in_folder() -> Path:
    """Return the folder of the bundled models: ``SEDD_MODELS``, by default that of this package."""
    return Path(os.environ.get("SEDD_MODELS") or Path(__file__).parent)


def built_in_names() -> list[str]:
    """Return the names of the bundled models, the default first."""
    found = (path.parent.name for path in built_in_folder().glob("*/config.json"))
    return sorted(found, key=lambda name: (name != DEFAULT, name))


def built_in_model(name: str) -> Path | None:
    """Return the folder of a bundled model; None if there is none of that name."""
    return built_in_folder() / name if name in built_in_names() else None


def default_model() -> Path:
    """Return the folder of `DEFAULT`."""
    if (folder := built_in_model(DEFAULT)) is None:
        advice = "name the folder of a run, or a model on the Hub, owner/name"
        raise ValueError(f"no model was given, and the default, {DEFAULT}, is not there ({list_built_in()}); {advice}")
    return folder


def list_built_in() -> str:
    """Return the bundled models as the end of a sentence."""
    names = built_in_names()
    return f"bundled models: {', '.join(names)}" if names else "this build has no bundled models"


def is_repo_id(name: str) -> bool:
    """Return whether ``name`` has the form of a repository on the Hugging Face Hub, owner/name."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None
