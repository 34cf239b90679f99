"""The script that makes a model for the box: its steps, its card, and all of it on a few molecules."""

import gzip
import importlib
import json
import random
import subprocess
import sys
from pathlib import Path

import boxed
import pytest
from runs import Sedd, ok

from sedd import hub
from sedd.training import checkpoint

ROOT = Path(__file__).parents[2]


def write_table(path: Path, count: int, seed: int = 0) -> Path:
    draw = random.Random(seed)
    rows = ["C" * draw.randint(2, 12) + draw.choice(["O", "N", "Cl"]) for _ in range(count)]
    path.write_bytes(gzip.compress("".join(f"{row}\n" for row in ["SMILES", *rows]).encode()))
    return path


def test_a_model_is_described_and_put_into_the_box(sedd: Sedd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From results of earlier steps: the split is disjoint, the card states them, `sedd info` finds the model."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    module = importlib.import_module("molecules")
    study = importlib.import_module("box").Study("molecules", tmp_path / "study")
    tables = [write_table(tmp_path / "train.csv.gz", 100), write_table(tmp_path / "test.csv.gz", 40, seed=1)]
    module.split(*tables, study.out, 20)
    train, test = ((study.out / name).read_text().split() for name in ("train.smi", "test.smi"))
    assert (len(train), len(test)) == (100, 20)
    for part, table in ((train, tables[0]), (test, tables[1])):
        assert set(part) <= set(gzip.decompress(table.read_bytes()).decode().split()[1:])
    hub.save_pretrained(boxed.write_model(tmp_path / "source"), study.model, dtype="int8")
    machine, ran = {"name": "small computer"}, {"command": f"sedd sample {study.model.name} -n 2"}
    study.store("train", {"command": "sedd train train.smi", "machine": machine, "result": {"seconds": 60.2}})
    evaluation = {**boxed.RESULT, "data": str(study.out / "test.smi")}
    study.store("export", {**ran, "result": {"evaluation": evaluation, "cost": boxed.COST}})
    study.store("quality", {"result": {"samples": 2, "validity": 0.5, "stderr_validity": 0.35, "novelty": 1.0}})
    study.store("sample", ran)
    study.samples.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("CCO", "CCN")))
    card = study.write_card(*module.card_facts(study, study.out / "train.smi", study.out / "test.smi")).read_text()
    for words in (
        *("100 molecules of the training split of MOSES; 20 of its test split", "60 seconds of training on one small"),
        *("| 20 held-out molecules | strict | ≤ 1.5 ± 0.25 |", "| validity | 0.5 ± 0.35 |", "    CCO\n\n    CCN"),
        *(
            "costs 0.000120 ± 0.000030 nats per token, 0.000200 bits per character",
            "sedd train train.smi",
            "Licence: MIT",
        ),
    ):
        assert words in card
    study.install(tmp_path / "models", tmp_path / "results")
    assert str(tmp_path) not in card + (tmp_path / "results/molecules.json").read_text()
    assert checkpoint.corruption(tmp_path / "models/molecules") is None
    done = sedd("info", "molecules", before=f"os.environ['SEDD_MODELS'] = {str(tmp_path / 'models')!r}")
    ok(done)
    assert "bound, 20 held-out molecules" in done.stdout


@pytest.mark.verify
def test_the_script_runs_all_its_steps(tmp_path: Path) -> None:
    script, out = [sys.executable, str(ROOT / "experiments/molecules.py")], tmp_path / "study"
    small = {"model.width": 32, "model.depth": 1, "model.heads": 2, "train.batch_size": 16, "train.eval_sequences": 8}
    words = ["--minutes", 0.05, "--samples", 10, "--draws", 2, "--held-out", 20, "--precision", "float32"]
    words += [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    words += ["--out", out, "--box", tmp_path / "models", "--results", tmp_path / "results"]
    tables = [write_table(tmp_path / f"{name}.csv.gz", count) for name, count in (("train", 100), ("test", 40))]
    done = subprocess.run([*script, *map(str, [*tables, *words])], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results/molecules.json").read_text())
    cooler = [f"{name}{t}" for t in (0.8, 0.7, 0.6) for name in ("samples-", "temperature ")]
    assert results.keys() == {"train", "config", "run", "export", "sample", "quality", *cooler}
    assert "novelty of 1 each at temperature 0.8: " in (tmp_path / "models/molecules/README.md").read_text()
    assert results["quality"]["result"]["samples"] == 10
    cost = results["export"]["result"]["cost"]["nats_per_token"]
    bounds = [results["run"]["result"], results["export"]["result"]["evaluation"]]
    assert cost == pytest.approx(bounds[1]["nats_per_token"] - bounds[0]["nats_per_token"], abs=2e-4)
    assert (tmp_path / "models/molecules/README.md").is_file()
    refused = subprocess.run(
        [*script, "--out", str(out), "--only", "sell"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "choose from train, export, sample, measure, cool, card" in refused.stderr
