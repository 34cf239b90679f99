"""The results page and the tables of the README are what the stored results give."""

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sedd.training.recipes import RECIPES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results_page(experiment: Callable[[str], ModuleType]) -> ModuleType:
    return experiment("results_page")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that the page is made of, without the results of the studies."""
    for name in ("benchmarks/results", "docs/images"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "docs/results.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def change(path: Path, *keys: Any, value: object) -> None:
    """Replace one value of a JSON file."""
    record = json.loads(path.read_text())
    part = record
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    path.write_text(json.dumps(record))


def test_the_page_and_the_readme_are_up_to_date(results_page: ModuleType) -> None:
    assert results_page.stale(ROOT) == []


def test_every_section_is_of_a_stored_result(results_page: ModuleType, tmp_path: Path) -> None:
    assert results_page.sections(tmp_path) == []
    assert results_page.sections(ROOT)


@pytest.mark.parametrize(("recipe", "run"), [("text8", "absorbing"), ("text8-uniform", "uniform")])
def test_the_bits_of_a_recipe_are_those_of_its_settings(recipe: str, run: str) -> None:
    """A run is stored with its settings, so a recipe that changes after it was measured is found here."""
    stored = json.loads((ROOT / "benchmarks/results/text8p-h200.json").read_text())["runs"][run]
    assert f"--recipe {recipe} " in stored["command"]
    settings = RECIPES[recipe]
    for section in ("model", "optim"):
        assert settings[section].items() <= stored["config"][section].items()
    assert settings["train"]["batch_size"] == stored["config"]["train"]["batch_size"]


def test_a_changed_result_makes_page_readme_and_figure_stale(results_page: ModuleType, copy: Path) -> None:
    """Mutants: a number of ours, a rival's, and one in the README."""
    results = copy / "benchmarks/results"
    for section in results_page.sections(copy):
        for drawing in section.drawings:
            results_page.save_figure(drawing.draw(), copy / f"docs/images/{drawing.name}.svg", drawing.data)
    (copy / "docs/results.md").write_text(results_page.page(results_page.sections(copy)))
    assert results_page.stale(copy) == []
    change(results / "text8p-h200.json", "runs", "absorbing", "evaluation", "bits_per_char", value=1.5)
    names = [problem.split()[0] for problem in results_page.stale(copy)]
    assert names == ["docs/results.md", "README.md", "docs/images/bits.svg"]
    shutil.copyfile(ROOT / "benchmarks/results/text8p-h200.json", results / "text8p-h200.json")
    change(results / "rivals-h200.json", "training", 0, "tokens_per_second", value=190_806)
    names = [problem.split()[0] for problem in results_page.stale(copy)]
    assert names == ["docs/results.md", "README.md", "docs/images/speed.svg"]
    shutil.copyfile(ROOT / "benchmarks/results/rivals-h200.json", results / "rivals-h200.json")
    readme = copy / "README.md"
    readme.write_text(readme.read_text().replace("595,047", "595,048"))
    assert [problem.split()[0] for problem in results_page.stale(copy)] == ["README.md"]


def test_studies_appear_when_their_results_are_there(results_page: ModuleType, copy: Path) -> None:
    """Rows as the scripts store them; everything is written, and is then up to date."""
    machine = {"name": "small computer", "commit": "abc1234"}
    facts = {"date": "2026-01-02", "machine": machine, "seconds": 60}
    evaluation = {"bits_per_char": 1.9, "nats_per_token": 1.3, "stderr_nats_per_token": 0.001, "is_exact": False}
    curve = [{"seconds": 1.0, "characters": 10, "bits_per_char": 2.0}]
    run = {
        "row": "SEDD absorbing",
        "tuning": None,
        "training": {"tokens": 10},
        "evaluation": evaluation,
        "curve": curve,
    }
    rows = {f"SEDD absorbing, seed {seed}": {**run, "seed": seed} for seed in (0, 1)}
    sample = {"sampler": "euler", "steps": 8, "temperature": 1.0, "draws": "float64", "judge": "judge", "nfe": 8.0}
    empty = {**sample, "sampler": "confidence", "failed": "sample 0 is empty"}
    sample |= {"length": 20, "commit": "fff0000"}
    sample |= {"gen_ppl_by_token": 50.0, "entropy_nats": 5.0, "seconds_per_sample": 0.1}
    zero_shot = {**evaluation, "dataset": "lambada", "ppl_bound": 9.0, "terms": {"prior": 0.0}, "tokenizer": "bpe"}
    zero_shot["tokenizer_sha256"] = importlib.import_module("zero_shot").GPT2_TOKENIZER
    trained = {"result": {"seconds": 540.0}, "machine": machine}
    export = {"result": {"evaluation": {**evaluation, "tokens": 1000}}, "folder_bytes": 11_000_000}
    records = {
        "objectives": {**facts, "protocol": "text8p", "precision": "float8", "rows": rows},
        "quality-stories": {
            **facts,
            "model": "stories",
            "noise": "absorbing",
            "samples": 4,
            "rows": {
                "confidence, 8 steps": empty,
                "confidence, 16 steps": {**empty, "steps": 16},
                "a": sample,
                "c": {**sample, "steps": 16},
                "b": {**sample, "temperature": 0.6, "gen_ppl_by_token": 20.0, "mauve": 0.25, "mauve_texts": 9},
            },
        },
        "zero-shot": {
            **{**facts, "sources": ["wikitext2-train.txt"], "characters": 11_000_000, "tokenizer": "gpt2"},
            "rows": {
                "absorbing": {"evaluation": {"sedd": [zero_shot]}, "training": {"tokens": 5_000_000}},
            },
        },
        "stories": {"train": trained, "export": export},
    }
    folder = copy / "experiments/results"
    folder.mkdir(parents=True)
    for name, record in records.items():
        (folder / f"{name}.json").write_text(json.dumps(record))
    assert "docs/images/quality.svg shows other data; run make results" in results_page.stale(copy)
    results_page.write(copy)
    assert results_page.stale(copy) == []
    page = (copy / "docs/results.md").read_text()
    for words in (
        "| SEDD absorbing | ≤ 1.9000 ± 0.0010 | 2 |",
        "| euler | 50.0, 5.00 | 50.0, 5.00 |",
        "| 8 steps; temperature: | 0.6 | 1 |\n|---|---|---|\n| euler | 20.0, 5.00, MAUVE 0.25 | 50.0, 5.00 |",
        "| network calls per sample; steps: | 8 | 16 |\n|---|---|---|\n| euler | 8 | 8 |",
        "| ours, absorbing, 60 s, 5M tokens | ≤ 1.900 ± 0.001 (9) |",
        "| MDLM (Sahoo et al. 2024) | (47.52) |",
        "| `stories` | 11.0 MB | 540 s on one small computer | ≤ 1.3000 ± 0.0010 | 1,000 | abc1234 |",
    ):
        assert words in page
    change(folder / "zero-shot.json", "rows", "absorbing", "evaluation", "sedd", 0, "tokenizer_sha256", value="0")
    results_page.write(copy)
    notes = set((copy / "docs/results.md").read_text().splitlines()) - set(page.splitlines())
    assert len(notes) == 1  # numbers of another tokenizer cannot be compared


def test_serving_and_checkpoints_are_those_of_the_benchmarks(results_page: ModuleType, copy: Path) -> None:
    page = (ROOT / "docs/results.md").read_text()
    serving = json.loads((ROOT / "benchmarks/results/serve-h200.json").read_text())
    many = next(load for load in serving["loads"] if load["variant"] == "64 clients")
    assert many["tokens_per_second"] / serving["offline_tokens_per_second"] >= 0.85
    assert f"| 64 clients | {many['tokens_per_second']:,.0f} |" in page
    results = copy / "benchmarks/results"
    results_page.write(copy)
    change(results / "saving-h200.json", "runs", "text8", "waited_seconds", value=4.0)
    assert [problem.split()[0] for problem in results_page.stale(copy)] == ["docs/results.md"]
    results_page.write(copy)
    assert "| 4.00 s | 5.73% (every 2,000 steps) |" in (copy / "docs/results.md").read_text()


@pytest.mark.parametrize("run", json.loads((ROOT / "experiments/results/guides.json").read_text())["runs"], ids=str)
def test_pages_show_the_stored_output_of_their_examples(run: dict[str, Any]) -> None:
    """The numbers with a decimal point, of runs whose numbers no other file has."""
    numbers = re.findall(r"\d+\.\d+", " ".join(run["shown"]))
    for page in run["pages"]:
        text = (ROOT / page).read_text()
        assert [number for number in numbers if number not in text] == [], page
