"""``sedd plan``: a few steps on the beginning of the data, extrapolated; expected bits from measured runs."""

import json
import math
import random
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from sedd import data
from sedd.runtime.distributed import Ranks
from sedd.training import dry_run, sizing
from sedd.training.dry_run import estimate_cost
from sedd.training.overrides import merge_config

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "small", "birds")
Sedd = Callable[..., subprocess.CompletedProcess[str]]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SMALL = [
    *("--set", "model.width=64", "--set", "model.depth=2", "--set", "model.heads=2", "--set", "model.seq_len=32"),
    *("--set", "train.batch_size=8", "--set", "train.eval_every=50", "--set", "train.eval_sequences=64"),
]


def words(count: int) -> str:
    return " ".join(random.Random(0).choices(WORDS, k=count))


def test_a_plan_states_steps_characters_memory_and_expected_bits(sedd: Sedd, tmp_path: Path) -> None:
    """For prose; DNA and the like have no expected bits."""
    (tmp_path / "book.txt").write_text(words(20_000))
    done = sedd("plan", tmp_path / "book.txt", *SMALL, "--steps", 1000, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    size = len(words(20_000))
    assert (found["steps"], found["tokens"], found["characters"]) == (1000, 256_000, 256_000)
    assert found["training_tokens"] == pytest.approx(0.95 * size, rel=0.01)
    assert found["passes_over_data"] == pytest.approx(256_000 / 0.95 / size, rel=0.01)
    assert found["peak_memory_MiB"] > found["weights_and_optimizer_MiB"] == found["parameters"] * 20 / 2**20
    assert found["training_minutes"] == pytest.approx(1000 * found["milliseconds_per_step"] / 60_000)
    total = found["training_minutes"] + found["evaluation_minutes"]
    assert found["minutes_to_finish"] == pytest.approx(total)
    expected = sizing.GENERAL.expected_bits(12 * 2 * 64**2, 256_000, size)
    assert expected is not None
    assert found["expected_bits_per_char"] == pytest.approx(expected, abs=0.006)
    dna = tmp_path / "dna.txt"
    dna.write_text("".join(random.Random(0).choices("ACGT", k=20_000)))
    shown = sedd("plan", dna, *SMALL, "--steps", 1234).stdout
    assert "steps                      1,234\n" in shown
    assert "expected bits" not in shown


def test_a_plan_reads_the_beginning_of_the_data(tmp_path: Path) -> None:
    """Of text, of a table with labels, and of records; tokens of the whole are extrapolated."""
    text = words(300_000)
    (tmp_path / "long.txt").write_text(text)
    rows = [f"{text[i : i + 20]},{'cat' if i % 40 else 'dog'}" for i in range(0, len(text) - 20, 20)]
    (tmp_path / "table.csv").write_text("words,kind\n" + "\n".join(rows))
    table = {"column": "words", "label": "kind", "packing": "lines"}
    for name, options in (("long.txt", {}), ("long.txt", {"tokenizer": "bpe:300"}), ("table.csv", table)):
        config = merge_config({"sources": [str(tmp_path / name)], "seq_len": 24, **options}, recipe="tiny")
        folder = tmp_path / f"{name} {len(options)}"
        folder.mkdir()
        shards, fraction = dry_run.prepare_sample(config, folder)
        index = data.Index.read(shards)
        assert dry_run.SAMPLE_CHARACTERS <= index.characters < 1.5 * dry_run.SAMPLE_CHARACTERS
        characters = 20 * len(rows) if "label" in options else len(text)
        # a table is read in pieces, of which the next is read before one is complete
        assert index.characters / fraction == pytest.approx(characters, rel=0.4 if "label" in options else 0.01)
        assert (index.labels is not None) == ("label" in options)


def test_a_batch_too_large_to_be_measured_is_measured_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is that of the whole batch."""
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text(words(5000))
    sizes = {"width": 32, "depth": 1, "heads": 2, "seq_len": 16}
    options = {"sources": [str(tmp_path / "book.txt")], "model": sizes, "steps": 7}
    config = merge_config(options, recipe="tiny")
    config = replace(config, train=replace(config.train, batch_size=64, grad_accumulation=2, eval_sequences=8))
    per_sequence = 6 * sizing.block_weights((32, 1)) * 16
    monkeypatch.setattr(sizing, "measure_flops", lambda device: 3 * per_sequence * 5 / dry_run.STEP_SECONDS)
    assert dry_run._reduce_batch(config, Ranks(0, 1, torch.device("cpu"))).train.batch_size == 5
    assert dry_run._reduce_batch(config, Ranks(0, 2, torch.device("cpu"))).train.batch_size == 4
    calls: list[tuple[int, int]] = []
    found = estimate_cost(config, lambda done, total: calls.append((done, total)))
    assert (found["tokens_per_step"], found["steps"], found["tokens"]) == (64 * 16, 7, 7 * 64 * 16)
    assert calls[-1] == (dry_run.MAX_STEPS + 1, dry_run.MAX_STEPS + 1)


FORMULAS = {"scaling": sizing.GENERAL, "scaling-sized": sizing.SIZED}
"""By the name of the file of their runs."""


def measured_runs(name: str) -> tuple[list[tuple[int, int, float]], list[bool]]:
    """The runs in the results: weights, characters, bits; and which are on Shakespeare, the others being on text8."""
    _, *runs = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    shakespeare = [run["corpus"] == "shakespeare.txt" for run in runs]
    return [(run["weights"], run["characters"], run["bits"]) for run in runs], shakespeare


GRID = tuple(product(np.arange(0.05, 0.81, 0.05), repeat=2))
EXPONENTS = {"scaling": GRID, "scaling-sized": ((0.25, 0.2),)}
"""Those that a formula is fitted over; the few runs that are sized have those of the others."""


def fit(
    runs: list[tuple[int, int, float]],
    exponents: Sequence[tuple[float, float]] = GRID,
    shakespeare: Sequence[bool] | None = None,
) -> tuple[float, ...]:
    """Least squares over exponents, in which E, A and B are linear; of several, those without a negative one.

    With ``shakespeare``, the two texts have an E each, and the mean of both is returned.
    """
    size, count, bits = np.array(runs).T
    texts = [] if shakespeare is None else [np.array(shakespeare) - 0.5]
    best = (math.inf, ())
    for alpha, beta in exponents:
        columns = np.stack([np.ones_like(size), size**-alpha, count**-beta, *texts], 1)
        values, *_ = np.linalg.lstsq(columns, bits)
        error = float(((columns @ values - bits) ** 2).sum())
        if (len(exponents) == 1 or (values >= 0).all()) and error < best[0]:
            best = (error, (values[0], values[1], alpha, values[2], beta))
    return tuple(map(float, best[1]))


def predict(formula: tuple[float, ...], size: float, count: float) -> float:
    e, a, alpha, b, beta = formula
    return e + a * size**-alpha + b * count**-beta


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_and_its_ranges_are_those_of_the_results(name: str) -> None:
    """The constants are the fit to the runs; the stated error is that of runs which were left out of the fit.

    The formula of sized runs has few of them, and the two texts differ by more than the sizes do.
    """
    (runs, shakespeare), formula = measured_runs(name), FORMULAS[name]
    texts = shakespeare if name == "scaling-sized" else None
    weights, characters, _ = np.array(runs).T
    for found, measured in zip(formula[6:], (weights, characters, characters / weights), strict=True):
        assert found == (measured.min(), measured.max())
    exponents = EXPONENTS[name]
    assert formula[:5] == pytest.approx(fit(runs, exponents, texts), rel=1e-3)
    left_out = []
    for i, run in enumerate(runs):
        others = fit(runs[:i] + runs[i + 1 :], exponents, texts and texts[:i] + texts[i + 1 :])
        left_out.append(predict(others, *run[:2]) - run[2])
    assert math.sqrt(np.mean(np.square(left_out))) == pytest.approx(formula.error, abs=0.006)
    page = (RESULTS.parents[1] / "docs" / "guides" / "training.md").read_text()
    e, a, alpha, b, beta = formula[:5]
    assert rf"{e:.2f} + {a:.2f}\, N^{{-{alpha:.2g}}} + {b:.1f}\, C^{{-{beta:.2g}}}" in page


def test_runs_with_ngrams_and_weighted_losses_have_a_formula_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(words(60_000))
    flags = {"sources": [str(tmp_path / "book.txt")], "steps": 7, "tokenizer": "bpe:512"}
    assert sizing.formula_of(merge_config(flags)) is sizing.SIZED
    assert sizing.formula_of(merge_config(flags, sets=["model.ngrams=0"])) is sizing.GENERAL
    assert sizing.formula_of(merge_config(flags, sets=["train.loss_weighting=0"])) is sizing.GENERAL
    assert sizing.formula_of(merge_config({**flags, "tokenizer": "bytes"})) is sizing.GENERAL
    for other in ({"process": "uniform"}, {"objective": "mean"}, {"packing": "lines"}, {"tokenizer": "gpt2"}):
        assert sizing.formula_of(merge_config({**flags, **other})) is None


def test_nothing_is_expected_far_from_what_was_measured() -> None:
    """Neither for other weights, characters or characters per weight, nor after many passes over the data."""
    formula = sizing.GENERAL
    expected = formula.expected_bits(10**6, 5 * 10**6, math.nan)
    assert expected == pytest.approx(predict(formula[:5], 10**6, 5 * 10**6))
    for weights, characters, available in (
        (10**8, 5 * 10**7, math.nan),
        (10**5, 10**5, math.nan),
        (10**5, 10**7, math.nan),
        (10**7, 10**6, math.nan),
        (10**6, 5 * 10**6, 4 * 10**5),
    ):
        assert formula.expected_bits(weights, characters, available) is None


def test_plan_and_train_choose_the_same_network(sedd: Sedd, tmp_path: Path) -> None:
    """As users type them, one after the other, on a machine of fixed speed."""
    (tmp_path / "book.txt").write_text(words(20_000))
    given = [tmp_path / "book.txt", "--minutes", 4, "--set", "train.eval_sequences=8"]
    speed = "from sedd.training import sizing; sizing.measure_flops = lambda device: 1e11"
    trained = sedd("train", *given, "--steps", 1, "--out", tmp_path / "run", before=speed)
    assert trained.returncode == 0, trained.stderr
    planned = sedd("plan", *given, "--steps", 300, "--json", before=speed)
    assert planned.returncode == 0, planned.stderr
    assert next(line for line in trained.stderr.splitlines() if "without a recipe" in line) in planned.stderr
    found = json.loads(planned.stdout)
    assert "expected_bits_per_char" in found
