"""The README and the docs: snippets run and print what is shown; commands, options, keys and links exist."""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import boxed
import pytest
import torch
import typer

from sedd import sampling_settings
from sedd.cli import app
from sedd.training.config import OBJECTIVES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES[1:] if "```python" in p.read_text()], ids=name)
def test_snippets_print_the_output_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets of a page are one program; a text block after a snippet is its exact output.

    The block of the README has a network of the test's own: see `tests/integration/test_diffusion.py`.
    """
    monkeypatch.chdir(tmp_path)  # snippets may write files
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
def test_commands_run(page: Path, command: str, sedd: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    program, *words = shlex.split(command)
    assert program == "sedd"
    done = sedd(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def options(words: list[str]) -> tuple[list[str], set[str]]:
    """Follow ``words`` through the commands; return the words left over and the options that the last one takes."""
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    assert not hasattr(command, "commands") or not words or words[0].startswith("--"), f"no such command: {words}"
    return words, {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def all_options() -> set[str]:
    commands = [typer.main.get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
    return {"--help"} | {o for command in commands for p in command.params for o in (*p.opts, *p.secondary_opts)}


INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
OF_OTHERS = {  # options of lm_eval, of benchmarks/gpu.py and of torchrun
    "--batch_size", "--curves", "--limit", "--output_path", "--max-restarts",
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_and_options_exist(page: Path) -> None:
    """Each ``sedd …`` of a page is a command with the options that it is given; each ``make …`` is a target."""
    text = page.read_text()
    inline = INLINE.findall(BLOCK.sub("", text))
    lines = [line for kind, block in blocks(page) if kind in ("sh", "console") for line in block.splitlines()]
    found = re.findall(r"(?:^|[$] |-m )sedd (.*)", "\n".join(lines), re.MULTILINE)
    for command in [*found, *(code[5:] for code in inline if code.startswith("sedd "))]:
        words = shlex.split(command.replace("…", ""), comments=True)
        left, known = options(words)
        if words[0] != "lm-eval":  # whose options are lm_eval's
            given = {word.split("=")[0] for word in left if re.match("--?[a-z]", word)}
            assert given <= known | {"--help"}, f"sedd {command}: {given - known}"
    flags = {match[0] for code in inline if (match := re.match("--[a-z][a-z_-]*", code))}
    assert flags <= all_options() | OF_OTHERS, flags - all_options()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)) <= set(targets)


def test_sections_of_the_mathematics_and_docstrings_cite_each_other() -> None:
    """Every section that the code cites exists, and the code cites every section."""
    sections = set(re.findall(r"^## §(\d+)", (ROOT / "docs/mathematics.md").read_text(), re.MULTILINE))
    cited = set()
    for module in (ROOT / "src").rglob("*.py"):
        found = set(re.findall(r"§(\d+)", module.read_text()))
        assert found <= sections, module
        cited |= found
    assert cited == sections


def test_numbered_formulas_exist_and_are_used() -> None:
    """A formula has a number because the text refers to it: each (3.1) has its tag, and each tag a reference."""
    text = (ROOT / "docs/mathematics.md").read_text()
    tags = re.findall(r"\\tag\{(\d+\.\d+)\}", text)
    assert len(set(tags)) == len(tags)
    prose = BLOCK.sub("", text)
    assert set(re.findall(r"\((\d+\.\d+)\)", prose)) == set(tags)


def test_objectives_are_listed() -> None:
    table = re.findall(r"^\| `([a-z0-9-]+)`", (ROOT / "docs/concepts/objectives.md").read_text(), re.MULTILINE)
    assert table == list(OBJECTIVES.built_in)


def test_samplers_are_listed() -> None:
    table = re.findall(r"^\| `([a-z0-9-]+)`", (ROOT / "docs/guides/sampling.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(sampling_settings.SAMPLERS.built_in)


PACKAGES = "data|draws|evaluation|exact|hub|loading|likelihood|nn|ops|samplers|sedd|training"


def test_python_names_exist() -> None:
    """`exact.Score`, `sedd.train` and the like, in the text of a page."""
    kinds = ("networks", "objectives", "processes", "samplers", "schedules", "tokenizers")
    entry_point_groups = {f"sedd.{kind}" for kind in kinds}
    keys = set(re.findall(r"^\| `([a-z_.]+)`", (ROOT / "docs/reference/configuration.md").read_text(), re.MULTILINE))
    inline = {code for page in PAGES for code in INLINE.findall(BLOCK.sub("", page.read_text()))}
    named = {code for code in inline if re.fullmatch(rf"(?:{PACKAGES})\.(?!py$|ipynb$|md$)\w+(?:\.[A-Za-z]\w*)*", code)}
    for code in named - keys - entry_point_groups:
        package, *names = code.removeprefix("sedd.").split(".") if code.count(".") > 1 else code.split(".")
        value: object = importlib.import_module("sedd" if package == "sedd" else f"sedd.{package}")
        for part in names:
            found = getattr(value, part, None)
            value = found if found is not None else importlib.import_module(f"{value.__name__}.{part}")  # type: ignore[attr-defined]
    assert "exact.Score" in named


def test_test_files_of_the_verification_page_exist() -> None:
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"(test_\w+\.py)", (ROOT / "docs/concepts/verification.md").read_text())
    assert named
    assert set(named) <= files


TRAINED = ("sudoku.py", "dna.py", "molecules.py")
EXAMPLES = [
    pytest.param(path, marks=pytest.mark.verify if path.name in TRAINED else (), id=name(path))
    for path in sorted((ROOT / "examples").glob("*.py"))
    if path.name not in ("demo.py", "ray_serve.py", "ray_train.py")  # see below, test_ray_serve.py and test_engines.py
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(example), *(["--steps", "20"] if example.name in TRAINED else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def run_demo(out: Path, box: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples/demo.py"), "--steps", "21", "--out", str(out)]
    environment = {**os.environ, "SEDD_MODELS": str(box)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.verify
def test_the_demo_counts_steps_and_states_that_it_did_not_converge(tmp_path: Path) -> None:
    """A short one: a story forms first; the time of training is printed, the bounds plotted, and the exit code is 1."""
    done = run_demo(tmp_path / "demo", boxed.write_box(tmp_path / "models", "stories"))
    assert done.returncode == 1, done.stderr
    story, training = done.stdout.split("Training a small model on sentences of known entropy.")
    masks = [line.count("·") for line in story.splitlines() if line.startswith("step ")]
    assert len(masks) >= 5  # at steps 1, 2, 4, 8, …
    assert masks == sorted(masks, reverse=True)
    assert masks[0] > masks[-1]
    assert re.search(r"Once upon a time.+ The end\.\n\nWhich of two sentences", story, re.DOTALL)
    assert len(re.findall(r" ± \d+\.\d nats: ", story)) == 2
    assert "21 steps of training take about" in training
    assert re.search(r"Training has not converged: after 21 steps the bound is \d+% above −log p", training)
    assert len(re.findall(r"^step +\d+   bound", training, re.MULTILINE)) == 3
    assert (tmp_path / "demo/bound.png").stat().st_size > 10_000


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples/demo.py")
    assert spec
    assert spec.loader
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    return demo


def test_the_plot_of_the_demo_shows_every_bound(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runs of any length and bounds of any size; without a model in the box, one line states it."""
    demo = load_demo()
    for steps in (1, 2, 7, 21, 500):
        assert 1 <= demo.evaluation_interval(steps) <= max(1, steps // demo.POINTS)
    for nats in ([60.0], [60.0, 40.0], [45.0, 20.0, 9.1], [8.5], [9.0, 300.0]):
        figure = demo.plot_bound([demo.Bound(10 * i, value, 0.1) for i, value in enumerate(nats, 1)], 9.0, 8.9)
        (axes,) = figure.axes
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        points = axes.lines[0].get_xydata()
        assert len(points) == len(nats)
        assert all(left < x < right and bottom < y < top for x, y in points)
    monkeypatch.setenv("SEDD_MODELS", str(tmp_path))
    demo.show_model_in_the_box()
    assert capsys.readouterr().out == "This build has no model in the box, so the demo begins with training.\n\n"
