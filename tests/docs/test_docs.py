"""Every snippet and every command of the README and the docs is run, and what it prints is compared."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=name)
def test_snippets_print_what_the_page_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets of a page are one program; a text block after a snippet is its output, to the letter."""
    monkeypatch.chdir(tmp_path)  # they may write files
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "page"}
    found = blocks(page)
    compared = 0
    for (kind, code), (next_kind, text) in zip(found, [*found[1:], ("", "")], strict=True):
        if kind == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, name(page), "exec"), names)
            if next_kind == "text":
                assert printed.getvalue() == text
                compared += 1
    assert compared > 0


COMMANDS = [
    (page, line[2:])
    for page in PAGES
    for kind, text in blocks(page)
    if kind == "console"
    for line in text.splitlines()
    if line.startswith("$ ")
]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda x: x if isinstance(x, str) else name(x))
def test_commands_run(page: Path, command: str) -> None:
    program, *words = shlex.split(command)
    assert program == "sedd"
    done = subprocess.run([sys.executable, "-m", "sedd", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_named_commands_exist() -> None:
    """What the prose calls `make x` is a target, and what it calls `sedd x` answers --help."""
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    prose = "\n".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", prose, re.MULTILINE)) <= set(targets)
    for words in {words.strip() for words in re.findall(r"`sedd ((?:[a-z]+(?:-[a-z]+)* ?)+)", prose)}:
        done = subprocess.run(
            [sys.executable, "-m", "sedd", *words.split(), "--help"], capture_output=True, check=False
        )
        assert done.returncode == 0, words


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_sections_named_in_docstrings_exist() -> None:
    sections = set(re.findall(r"^## §(\d+)", (ROOT / "docs/mathematics.md").read_text(), re.MULTILINE))
    for module in (ROOT / "src").rglob("*.py"):
        assert set(re.findall(r"§(\d+)", module.read_text())) <= sections, module


def test_the_pages_list_what_the_code_has() -> None:
    """Prose that repeats code will be wrong: names of objectives, layers of the house, counts in the README."""
    from sedd import registry

    table = re.findall(r"^\| `([a-z0-9-]+)`", (ROOT / "docs/concepts/objectives.md").read_text(), re.MULTILINE)
    assert table == list(registry.OBJECTIVES.built_in)
    listed = (ROOT / "pyproject.toml").read_text().split("layers = [")[1].split("]")[0]
    layers = re.findall(r'"([a-z |]+)"', listed)
    contributing = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert ", ".join(f"`{layer}`" for layer in layers) in contributing
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (len(registry.PROCESSES.built_in), len(registry.SCHEDULES.built_in), len(registry.OBJECTIVES.built_in)) == (
        2,
        4,
        13,
    )
    assert "two noise processes, four schedules, thirteen objectives" in readme


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    few = {name: ["--steps", "20"] for name in ("arrays.py", "dna.py", "molecules.py")}
    shorter = (few | {"demo.py": ["--minutes", "0.05", "--out", str(tmp_path / "demo")]}).get(example.name, [])
    done = subprocess.run([sys.executable, str(example), *shorter], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
