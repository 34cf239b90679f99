"""One public name has one meaning in the package."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "sedd"


def public_names() -> dict[str, list[str]]:
    """Public classes and functions at the top level of modules, and where they are defined."""
    where: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                where.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    return where


def have_one_meaning(modules: list[str]) -> bool:
    """Whether at most one of the modules is not a Triton version, a command or the exact value of the same thing."""
    return len([m for m in modules if not (m.endswith("_triton.py") or m.startswith(("cli/", "exact/")))]) <= 1


def test_one_public_name_has_one_meaning() -> None:
    found = {name: modules for name, modules in public_names().items() if not have_one_meaning(modules)}
    assert found == {}


def test_two_meanings_are_found() -> None:
    assert have_one_meaning(["ops/fp8.py", "ops/fp8_triton.py"])
    assert have_one_meaning(["cli/train.py", "api.py"])
    assert not have_one_meaning(["nn/layers.py", "ops/fp8.py"])
    assert not have_one_meaning(["cli/train.py", "api.py", "training/loop.py"])
