"""Every objective trains from the command line with a sensible bound, or is refused with the reason."""

import json
import math
from pathlib import Path

import pytest
from runs import Sedd, ok

from sedd.cli.train import OBJECTIVE_MEANINGS
from sedd.training.config import NOT_FOR_TRAINING, OBJECTIVES

TINY = [
    *("--set", "model.width=16", "--set", "model.depth=2", "--set", "model.heads=2", "--set", "model.seq_len=16"),
    *("--batch-size", 16, "--lr", 3e-3, "--tokenizer", "chars", "--steps", 20),
    *("--set", "optim.warmup_steps=1", "--set", "optim.ema_decay=0.8"),
]


def test_every_objective_is_described_or_refused() -> None:
    assert {*OBJECTIVE_MEANINGS} | {*NOT_FOR_TRAINING} == {*OBJECTIVES.built_in}
    assert not {*OBJECTIVE_MEANINGS} & {*NOT_FOR_TRAINING}


@pytest.mark.parametrize(
    ("objective", "process"),
    [
        *((name, "absorbing") for name in OBJECTIVE_MEANINGS),
        *((name, "uniform") for name in ("score-entropy", "ratio-matching", "mean", "d3pm")),
        *((name, noise) for name in ("score-entropy", "mean") for noise in ("hybrid", "frequency")),
        *(("ratio-matching", "hybrid"), ("d3pm", "hybrid"), ("concrete-score", "frequency")),
    ],
)
def test_an_objective_trains(sedd: Sedd, corpus: Path, tmp_path: Path, objective: str, process: str) -> None:
    """After 20 steps the bound is below that of a guess, ln V nats per token."""
    words = ["--objective", objective, "--process", process, "--out", tmp_path / "run", "--json"]
    done = sedd("train", corpus, *TINY, *words)
    ok(done)
    record = json.loads(done.stdout)
    assert 1 < record["bound"] < math.log(len(set(corpus.read_text())))


def test_scores_of_any_sign_train_and_sample(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    run, words = tmp_path / "run", ["--objective", "concrete-score", "--parameterization", "signed-score"]
    done = sedd("train", corpus, *TINY, *words, "--set", "objective_options.t_min=0.05", "--out", run, "--json")
    ok(done)
    assert 1 < json.loads(done.stdout)["bound"] < math.log(len(set(corpus.read_text())))
    sampled = sedd("sample", run, "-n", 1, "--steps", 4, "--json")
    ok(sampled)
    assert len(json.loads(sampled.stdout)["text"]) == 16


@pytest.mark.parametrize("objective", NOT_FOR_TRAINING)
def test_an_objective_is_refused(sedd: Sedd, corpus: Path, tmp_path: Path, objective: str) -> None:
    done = sedd("train", corpus, "--objective", objective, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert f"objective {objective} trains no model" in done.stderr
    assert "from Python" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_help_has_one_line_for_each(sedd: Sedd) -> None:
    done = sedd("train", "--help", before="os.environ['COLUMNS'] = '80'")
    ok(done)
    lines = [line.strip() for line in done.stdout.splitlines()]
    for name, note in OBJECTIVE_MEANINGS.items():
        assert f"• {name}: {note}" in lines
