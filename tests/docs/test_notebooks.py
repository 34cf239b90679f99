"""The notebooks run from top to bottom and print their stored outputs."""

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
    """Run a cell and return what it prints; check that the value of its last line can be displayed."""
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
    """Run a notebook; return its variables and the number of cells with a stored output."""
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
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))
    plt.switch_backend("agg")


def test_toy_distribution() -> None:
    """It prints exactly its stored outputs, and training approaches the entropy."""
    names, stored = run("toy_distribution.ipynb")
    assert stored == 7
    assert names["curve"][-1][1] < names["p_data"].entropy() + 0.2  # nats per sentence; 5.4 at the start


@pytest.mark.verify
def test_text() -> None:
    """The model learns sentences of known entropy."""
    names, _ = run("text.ipynb")
    in_order, backwards, hill = names["in_order"], names["backwards"], names["hill"]
    assert in_order.nats + 3 * in_order.stderr < backwards.nats / 2
    assert math.log(3) - 0.3 < hill.nats < 2 * math.log(3)
    assert all(" sat on the" in text.text and " the small dog" in text.text for text in names["filled"])


def test_text_uses_my_txt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file my.txt beside the notebook is used (run up to training)."""
    Path("my.txt").write_text("what I wrote myself")
    cells = [
        cell for cell in json.loads((NOTEBOOKS / "text.ipynb").read_text())["cells"] if cell["cell_type"] == "code"
    ]
    names: dict[str, Any] = {"__name__": "notebook"}
    assert "my.txt with 19 characters" in [printed("".join(cell["source"]), names).strip() for cell in cells[:2]]
