"""What the tests of generated pages and figures share."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a script of ``experiments/`` by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "experiments"))
    return importlib.import_module
