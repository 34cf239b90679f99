"""`sedd compare`: several seeds as one row, what else differs between runs, and a figure that names its marks."""

import json
import re
import statistics
from pathlib import Path

import pytest
from runs import Sedd, ok

from sedd.evaluation import compare

TINY = [
    *("--tokenizer", "chars", "--steps", 12, "--set", "model.width=32", "--set", "model.depth=1"),
    *("--set", "model.heads=2", "--set", "model.seq_len=16", "--set", "train.batch_size=8"),
    *("--set", "train.eval_sequences=16", "--set", "data.val_fraction=0.02"),
]


@pytest.fixture
def compared(sedd: Sedd, corpus: Path, shelf: Path) -> list[Path]:
    """Two seeds of one run, and one of another objective."""
    runs = {"a0": [], "a1": ["--seed", 1], "ar": ["--objective", "autoregressive"]}
    for name, flags in runs.items():
        if not (shelf / name).exists():
            ok(sedd("train", corpus, *TINY, *flags, "--out", shelf / name))
    return [shelf / name for name in runs]


def test_seeds_have_a_mean_and_other_differences_are_named(sedd: Sedd, compared: list[Path], tmp_path: Path) -> None:
    words = ["compare", *compared, "--draws", 2, "--plot", tmp_path / "plot.html"]
    done = sedd(*words)
    ok(done)
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    records = [json.loads(line) for line in sedd(*words, "--json").stdout.splitlines()]
    assert len(rows) == len(records) + 1 == 4
    mean, deviation = rows[-1][header.index("bits")].split(" ± ")
    bits = [record["bits"] for record in records[:2]]
    assert bits[0] != bits[1]
    assert float(mean) == pytest.approx(statistics.mean(bits), rel=1e-4)
    assert float(deviation) == pytest.approx(abs(bits[0] - bits[1]) / 2**0.5, rel=0.06)
    assert "n = 2" in rows[-1][0]
    assert rows[-1][header.index("parameters")] == rows[0][header.index("parameters")]
    assert "n = 2" in (tmp_path / "plot.html").read_text()
    sizes = [f"{record['parameters']:,}" for record in records]
    assert f"parameters ({sizes[0]} or {sizes[2]})" in done.stderr
    assert "objective (score-entropy or autoregressive)" in done.stderr
    assert "seed (" not in done.stderr
    alike = sedd("compare", *compared[:2], "--draws", 2, "--plot", tmp_path / "plot.html")
    assert "differ" not in alike.stderr


def test_the_figure_of_short_runs_has_curves_and_names_its_marks(compared: list[Path]) -> None:
    """A run of few steps is validated four times; where a run was validated once, the figure says so."""
    curves = [compare.read_curve(run) for run in compared]
    assert [len(curve.bits) for curve in curves] == [4, 4, 4]
    row = {"objective": "mean", "trained_tokens": 99, "seconds": 1.0, "bits": 3.0, "stderr_bits": 0.1}
    rows = [{"run": run.name, "bits_per_char": 3.0, **row} for run in compared]
    figure = compare.plot_comparison(rows, curves)
    left, right = figure.axes
    named = [text.get_text() for text in right.get_legend().get_texts()]
    assert [re.split("[ (]", text)[0] for text in named] == ["a0", "a1", "ar", "validation", "this"]
    assert not left.get_title()
    once = [compare.ValidationCurve(*(values[-1:] for values in curve)) for curve in curves]
    assert "train.eval_every" in compare.plot_comparison(rows, once).axes[0].get_title()
