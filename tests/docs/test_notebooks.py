"""The notebooks run from top to bottom and print their stored outputs."""

import ast
import base64
import contextlib
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
LARGEST_FIGURE = 60_000
"""Bytes of a stored figure."""
BADGE = "https://colab.research.google.com/github/OWNER/REPOSITORY/blob/main/notebooks/"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class CellOutput(NamedTuple):
    """What a cell printed, and how many figures it drew."""

    text: str
    figures: int


def load(name: str) -> list[dict[str, Any]]:
    """Return the cells of a notebook."""
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells: list[dict[str, Any]] = notebook["cells"]
    return cells


def run_cell(source: str, names: dict[str, Any]) -> CellOutput:
    """Run a cell; check that the value of its last line can be displayed."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None
    for show in ("_repr_html_", "__repr__"):
        if value is not None and hasattr(value, show):
            assert getattr(value, show)()
    drawn = [plt.figure(number) for number in plt.get_fignums()]
    for figure in drawn:
        figure.canvas.draw()
    plt.close("all")
    return CellOutput(shown.getvalue(), len(drawn))


def agree(found: str, stored: str, tolerance: float) -> bool:
    """Return whether two texts are equal, apart from differences of numbers of at most ``tolerance``."""
    if not tolerance:
        return found == stored
    numbers = zip(NUMBER.findall(found), NUMBER.findall(stored), strict=False)
    same_words = NUMBER.sub("#", found).split() == NUMBER.sub("#", stored).split()
    return same_words and all(abs(float(a) - float(b)) <= tolerance for a, b in numbers)


def run(name: str) -> tuple[dict[str, Any], int]:
    """Run a notebook; return its variables and the number of cells with a stored output.

    A cell prints what is stored, and draws as many figures. Where the numbers depend on the machine, as those of a
    trained network do, ``tolerance`` in the metadata of the cell states by how much.
    """
    names: dict[str, Any] = {"__name__": "notebook"}
    stored = 0
    for cell in load(name):
        if cell["cell_type"] == "code":
            output, parts = run_cell("".join(cell["source"]), names), cell["outputs"]
            texts = ["".join(part["text"]) for part in parts if part["output_type"] == "stream"]
            if parts:
                assert agree(output.text, "".join(texts), cell["metadata"].get("tolerance", 0)), output.text
                assert output.figures == sum(part["output_type"] == "display_data" for part in parts)
            stored += bool(parts)
    return names, stored


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))
    plt.switch_backend("agg")
    with mpl.rc_context():  # notebooks set figure.dpi and others
        yield


def test_toy_distribution() -> None:
    """It prints exactly its stored outputs, and training approaches the entropy."""
    names, stored = run("toy_distribution")
    assert stored == 8
    assert names["curve"][-1][1] < names["p_data"].entropy() + 0.2  # nats per sentence; 5.4 at the start


@pytest.mark.verify
def test_text() -> None:
    """The model learns sentences of known entropy."""
    names, _ = run("text")
    in_order, backwards, hill = names["in_order"], names["backwards"], names["hill"]
    assert in_order.nats + 3 * in_order.stderr < backwards.nats / 2
    assert math.log(3) - 0.3 < hill.nats < 2 * math.log(3)
    assert all(" sat on the" in text.text and " the small dog" in text.text for text in names["filled"])


def test_text_uses_my_txt() -> None:
    """A file my.txt beside the notebook is used (run up to training)."""
    Path("my.txt").write_text("what I wrote myself")
    cells = [cell for cell in load("text") if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "notebook"}
    assert "my.txt with 19 characters" in [run_cell("".join(cell["source"]), names).text.strip() for cell in cells[:2]]


def test_score_entropy() -> None:
    """Score entropy learns all ratios; ℓ2 of a positive score is late at small ones; a free score becomes negative."""
    names, stored = run("score_entropy")
    assert stored == 7
    small, paths, error = names["small"], names["paths"], names["relative_error"]
    assert error(paths["score entropy, positive"][100], small) < 0.05 < 0.2 < error(paths["l2, positive"][100], small)
    assert (paths["l2, free"] <= 0).any()
    assert all((path > 0).all() for name, path in paths.items() if "positive" in name)


def test_one_step() -> None:
    """One step loses more at more noise, and the network is near the exact posterior."""
    names, stored = run("one_step")
    assert stored == 5
    lost = [row[2] for row in names["rows"]]
    assert lost == sorted(lost)
    draws = {(row.noise_level, row.method): row.total_variation for row in names["found"]}
    assert all(abs(draws[level, "model, draw"] - draws[level, "exact, draw"]) < 0.1 for level in (0.1, 0.25, 0.5))


def test_all_masked() -> None:
    """Many steps are near the corpus, one step is not, and the argmax is one sentence."""
    names, stored = run("all_masked")
    assert stored == 6
    many, one, argmax = (row.total_variation for row in names["found"])
    assert many < 0.1 < one < 0.3 < argmax


def test_samplers() -> None:
    """Errors fall at the declared orders."""
    names, stored = run("samplers")
    assert stored == 2
    for (process, name), curve in names["curves"].items():
        slope = names["samplers"].fitted_slope(curve)
        assert slope > names["samplers"].declared_order(process, name) - 0.15


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cells_are_those_of_a_hosted_notebook(name: str) -> None:
    """A title with a place for a badge, and a cell that installs the package where it is missing."""
    title, install = ("".join(cell["source"]) for cell in load(name)[:2])
    assert title.startswith("# ")
    assert f"{BADGE}{name}.ipynb" in title.splitlines()[2]
    assert install == "".join(load(NAMES[0])[1]["source"])
    assert 'find_spec("sedd") is None' in install


@pytest.mark.parametrize("name", NAMES)
def test_stored_figures_are_small(name: str) -> None:
    parts = [part for cell in load(name) for part in cell.get("outputs", ()) if part["output_type"] == "display_data"]
    for part in parts:
        png = base64.b64decode("".join(part["data"]["image/png"]))
        assert png.startswith(b"\x89PNG")
        assert len(png) < LARGEST_FIGURE
    assert parts or name == "text"  # whose outputs differ from machine to machine


def test_numbers_may_differ_by_the_tolerance_and_words_may_not() -> None:
    assert agree("1 step: 0.18\n", "1 step: 0.20\n", 0.03)
    assert not agree("1 step: 0.18\n", "1 step: 0.20\n", 0.01)
    assert not agree("1 step: 0.18\n", "1 step: 0.20\n", 0)
    assert not agree("1 step: 0.18\n", "1 call: 0.18\n", 0.03)
