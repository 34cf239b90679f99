"""The guides that answer questions agree with the code, the stored results and the tests they name."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from sedd.evaluation.protocols import DATASETS
from sedd.training import recipes, trainer

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs/guides"


def page(name: str) -> str:
    return (GUIDES / f"{name}.md").read_text()


def stored(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def bits(row: str) -> float:
    """Return the bits per character of an objective after 20 seconds, the mean over seeds."""
    runs = [run for run in stored("experiments/results/objectives.json")["rows"].values() if run["row"] == row]
    return float(sum(run["evaluation"]["bits_per_char"] for run in runs) / len(runs))


def long_bits(run: str) -> float:
    return float(stored("benchmarks/results/text8p-h200.json")["runs"][run]["evaluation"]["bits_per_char"])


def perplexity(sampler: str, steps: int) -> float:
    rows = stored("experiments/results/quality-stories.json")["rows"]
    return float(rows[f"{sampler}, {steps} steps, temperature 1, float64 draws"]["gen_ppl_by_token"])


def perplexities(sampler: str) -> list[str]:
    return [f"{perplexity(sampler, steps):.1f}" for steps in (8, 32, 128)]


MEASURED = {  # numbers in the last column of the table of choosing.md, by the name in its second
    "absorbing": [f"{bits('SEDD absorbing'):.4f}", f"{long_bits('absorbing'):.4f}"],
    "uniform": [f"{bits('SEDD uniform'):.4f}", f"{long_bits('uniform'):.4f}"],
    "lambda-dce": [f"{bits('RADD λ-DCE'):.4f}"],
    "any-order": [f"{bits('RADD any-order'):.4f}"],
    "t-dce": [f"{bits('RADD t-DCE'):.4f}"],
    "score-entropy": [f"{bits('SEDD absorbing'):.4f}"],
    "d3pm": [f"{bits('D3PM absorbing'):.4f}", f"{bits('D3PM uniform'):.4f}"],
    "mean": [f"{bits('mean prediction'):.4f}"],
    "concrete-score": [f"{bits('concrete score, any sign'):.4f}", f"{bits('concrete score, positive'):.4f}"],
    "autoregressive": [f"{bits('autoregressive'):.4f}"],
    **{
        sampler: perplexities(sampler)
        for sampler in ("first-hitting", "tweedie", "theta", "remask", "euler", "confidence")
    },
    "128": [f"{perplexity('first-hitting', 1024):.1f}"],
}


def test_the_table_of_choices_has_the_stored_numbers() -> None:
    """Numbers with a decimal point; a row without one was not measured."""
    rows = re.findall(r"^\| [a-z]* ?\| (.+?) \| .+? \|(.*)\|$", page("choosing"), re.MULTILINE)
    found = {re.sub(r"[*`]", "", choice): re.findall(r"\d+\.\d+", cell) for choice, cell in rows}
    assert {choice: numbers for choice, numbers in found.items() if numbers} == MEASURED


def test_values_to_expect_are_stored() -> None:
    lines = [json.loads(line) for line in (ROOT / "benchmarks/results/scaling.jsonl").read_text().splitlines()]

    def small_run(tokenizer: str, tokens: int) -> float:
        kind = {"corpus": "shakespeare.txt", "tokenizer": tokenizer, "width": 64, "depth": 2, "tokens": tokens}
        return float(next(line["bits"] for line in lines if kind.items() <= line.items()))

    expected = [math.log2(27), bits("RADD λ-DCE"), bits("SEDD absorbing"), bits("SEDD uniform")]
    expected += [long_bits("absorbing"), long_bits("uniform"), long_bits("long"), bits("autoregressive")]
    expected += [small_run("bytes", 1_024_000), small_run("bpe:1024", 1_024_000)]
    expected += [stored("experiments/results/stories.json")["run"]["result"]["bits_per_char"]]
    section = page("loss").partition("## Values to expect")[2].partition("\n## ")[0]
    found = [float(value) for value in re.findall(r"\| (\d\.\d{3}) \|$", section, re.MULTILINE)]
    assert found == pytest.approx(expected, abs=6e-4)


def test_the_keys_of_the_log_are_listed() -> None:
    """Those that the training loop writes; samples are logged on request alone."""
    section = page("loss").partition("## Loss by time")[2].partition("\n## ")[0]
    listed = {key for row in re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE) for key in re.findall("`(.+?)`", row)}
    sources = [(ROOT / "src/sedd/training" / name).read_text() for name in ("loop.py", "validation.py")]
    for key in listed:
        assert any(f'"{key}"' in source for source in sources), key
    assert {"loss", "bits_per_char", "grad_norm", "loss_by_time", "skipped", "bound", "bound_stderr"} <= listed
    assert trainer.TIME_BINS == 10


# Footguns and the paper ----------------------------------------------------------------------------------------


def test_tests_named_in_the_footguns_exist() -> None:
    names = set(re.findall(r"\btest_\w+", page("footguns").replace(".py", "")))
    files = list((ROOT / "tests").rglob("test_*.py"))
    defined = {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert len(names) > 10
    assert names <= defined | {path.stem for path in files}


def test_the_recipes_are_those_of_the_paper() -> None:
    for name, network in (("small", (12, 768, 12)), ("medium", (24, 1024, 16))):
        recipe = recipes.RECIPES[name]
        model, optim = recipe["model"], recipe["optim"]
        assert (model["depth"], model["width"], model["heads"]) == network
        assert (model["seq_len"], recipe["train"]["batch_size"], model["dropout"]) == (1024, 512, 0.1)
        assert (optim["lr"], optim["beta2"], optim["warmup_steps"], optim["ema_decay"]) == (3e-4, 0.999, 2500, 0.9999)
        assert recipe["budget"]["steps"] == 400_000
        assert optim["lr_schedule"] == "constant"


def test_published_numbers_are_the_stored_ones() -> None:
    rows = stored("experiments/published.json")["zero_shot"]["rows"]
    found = re.findall(r"^\| ((?:SEDD|GPT-2) [a-z ]+) \|(.+)\|$", page("reproducing"), re.MULTILINE)
    assert len(found) == 5
    for name, cells in found:
        assert [float(cell) for cell in cells.split("|")] == rows[name]["values"]


def test_names_of_benchmark_files_are_those_of_the_protocols() -> None:
    page = (ROOT / "docs/guides/likelihood.md").read_text()
    rows = re.findall(r"^\| (LAMBADA|WikiText-2|WikiText-103|PTB|One Billion Words) \| (.+?) \|", page, re.MULTILINE)
    shown = {title.replace("One Billion Words", "LM1B"): re.findall("`(.+?)`", names) for title, names in rows}
    assert shown == {d.title: [name for names in d.files.values() for name in names] for d in DATASETS.values()}
