"""The tour of the code names functions, files and modules that exist."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from shell_blocks import ROOT

PAGE = ROOT / "docs/tour.md"
NAMED = re.compile(r"`([\w/]+\.py)::([\w.]+)`")


def names(path: Path) -> set[str]:
    """Return the functions, classes and methods that a file defines."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            found |= {
                f"{node.name}.{part.name}" for part in ast.walk(node) if hasattr(part, "name") and part is not node
            }
    return found


def test_the_functions_of_the_tour_exist() -> None:
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 50
    missing = [f"{file}::{name}" for file, name in named if name not in names(ROOT / "src/sedd" / file)]
    assert missing == []


def test_names_of_a_method_that_moved_are_noticed() -> None:
    """Mutants: a method of another class, a function of another file."""
    assert "SamplingRun.states" in names(ROOT / "src/sedd/samplers/run.py")
    assert "Sampler.states" not in names(ROOT / "src/sedd/samplers/run.py")
    assert "train_step" not in names(ROOT / "src/sedd/training/loop.py")


def test_the_files_of_the_tour_exist() -> None:
    text = PAGE.read_text()
    for path in set(re.findall(r"`((?:tests|benchmarks|experiments)/[\w/.]*)`", text)):
        assert (ROOT / path).exists(), path
    for path in set(re.findall(r"`([\w/]+(?:\.py|/))`", text)) - {"benchmarks/", "experiments/"}:
        if not path.startswith(("tests/", "experiments/", "src/")):
            assert (ROOT / "src/sedd" / path).exists(), path


@pytest.fixture
def tree(experiment: Callable[[str], ModuleType]) -> ModuleType:
    return experiment("tree")


def test_the_tree_is_up_to_date(tree: ModuleType) -> None:
    text = PAGE.read_text()
    assert tree.with_tree(text) == text, "run: python experiments/tree.py"


def test_the_tree_has_every_module_and_every_module_a_summary(tree: ModuleType) -> None:
    lines = tree.entries(ROOT / "src/sedd", 1)
    modules = [path for path in (ROOT / "src/sedd").rglob("*.py") if path != ROOT / "src/sedd/__init__.py"]
    assert len(lines) == len(modules)
    assert [name for name, text in lines if not text] == []
    assert max(len(name) for name, _ in lines) < tree.WIDTH


def test_another_docstring_makes_the_tree_stale(
    tree: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutant: a module with another summary."""
    monkeypatch.setattr("sys.argv", ["tree.py", "--check"])
    assert tree.main() == 0
    monkeypatch.setattr(tree, "summary", lambda module: "another one")
    assert tree.main() == 1
    assert "run: python experiments/tree.py" in capsys.readouterr().err
