"""The notebooks run from top to bottom, and print what they hold as printed."""

import ast
import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def printed(source: str, names: dict[str, Any]) -> str:
    """What a cell prints; the value of its last line is shown as a notebook would show it."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None
    for show in ("_repr_html_", "__repr__"):
        if value is not None and hasattr(value, show):
            assert getattr(value, show)()
    plt.close("all")
    return shown.getvalue()


def run(name: str) -> tuple[dict[str, Any], int]:
    """The names that a notebook leaves behind, and how many of its cells have a stored output."""
    notebook = json.loads((NOTEBOOKS / name).read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in cells:
        found = printed("".join(cell["source"]), names)
        for output in cell["outputs"]:
            assert found == "".join(output["text"])
    return names, sum(bool(cell["outputs"]) for cell in cells)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))
    plt.switch_backend("agg")


def test_the_mathematics_on_a_law() -> None:
    """What it prints is stored in it, to the letter."""
    names, stored = run("toy_distribution.ipynb")
    assert stored == 7
    assert names["curve"][-1][1] < names["law"].entropy() + 0.2  # it has learned: nats a sentence, 5.4 at first


def test_a_text_of_one_s_own() -> None:
    """It has learned what there is to learn: sentences from a grammar of known entropy."""
    names, _ = run("text.ipynb")
    in_order, backwards, house = names["in_order"], names["backwards"], names["house"]
    assert in_order.nats + 3 * in_order.stderr < backwards.nats / 2
    assert math.log(3) - 0.3 < house.nats < 2 * math.log(3)
    assert all(" sat on the" in text.text and " the small dog" in text.text for text in names["filled"])


def test_one_s_own_file_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to training: a file my.txt beside the notebook."""
    Path("my.txt").write_text("what I wrote myself")
    cells = [
        cell for cell in json.loads((NOTEBOOKS / "text.ipynb").read_text())["cells"] if cell["cell_type"] == "code"
    ]
    names: dict[str, Any] = {"__name__": "notebook"}
    assert "my.txt with 19 characters" in [printed("".join(cell["source"]), names).strip() for cell in cells[:2]]
