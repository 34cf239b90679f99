"""Runs under hybrid noise and under noise by frequency: the distribution of the noise is found again everywhere."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from commands import Commands
from runs import SMALL, Sedd, ok, same

import sedd as package
from sedd.training import checkpoint


@pytest.fixture(scope="module")
def sedd(server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """Commands that a module's runs are made with."""
    return Commands(server, tmp_path_factory.mktemp("output"))


STOPPABLE = ("--set", "optim.lr_schedule=constant", "--set", "train.eval_every=3")


def train(sedd: Sedd, corpus: Path, out: Path, process: str, *words: object) -> None:
    options = ("--process", process, "--parameterization", "mean", "--tokenizer", "chars", "--steps", 6, *words)
    ok(sedd("train", corpus, *SMALL, *options, "--out", out))


@pytest.fixture(scope="module")
def by_frequency(sedd: Sedd, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("frequency") / "run"
    train(sedd, corpus, out, "frequency")
    return out


@pytest.fixture(scope="module")
def hybrid(sedd: Sedd, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hybrid") / "run"
    train(sedd, corpus, out, "hybrid", "--set", "noise.mask_share=0.7")
    return out


def test_a_run_under_noise_by_frequency_finds_its_frequencies_again(
    sedd: Sedd, corpus: Path, by_frequency: Path, tmp_path: Path
) -> None:
    """They are counted from the training part of the data, plus one each, and a copy of the model has them too."""
    model = package.load(str(by_frequency))
    text = corpus.read_text()
    blocks = len(text) // 32
    counts = Counter(model.tokenizer.encode(text[: 32 * (blocks - round(0.05 * blocks))]))
    total = sum(counts.values()) + model.tokenizer.vocab_size
    right = [(counts[token] + 1) / total for token in range(model.tokenizer.vocab_size)]
    assert model.loaded.process.frequencies == pytest.approx(right, rel=1e-12)
    assert max(right) > 3 * min(right)
    model.save(tmp_path / "copy")
    copy = package.load(str(tmp_path / "copy"))
    assert copy.loaded.process == model.loaded.process
    samples = ([text.ids for text in one.sample(2, steps=6, seed=1)] for one in (copy, model))
    assert next(samples) == next(samples)


def test_hybrid_noise_has_the_share_that_was_set(sedd: Sedd, hybrid: Path, tmp_path: Path) -> None:
    process = package.load(str(hybrid)).loaded.process
    assert process.mask_share == 0.7
    done = sedd("info", hybrid, "--json")
    ok(done)
    assert json.loads(done.stdout)["mask_share"] == 0.7


@pytest.mark.parametrize("process", ["by_frequency", "hybrid"])
def test_every_command_takes_such_a_model(
    sedd: Sedd, process: str, corpus: Path, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(process)
    for sampler in ("ancestral", "tweedie", "euler", "theta", "gibbs"):
        done = sedd("sample", run, "-n", 2, "--steps", 4, "--sampler", sampler, "--temperature", 0.8, "--json")
        ok(done)
        assert all(len(json.loads(line)["text"]) == 32 for line in done.stdout.splitlines())
    ok(sedd("infill", run, "the {5}", "--steps", 4))
    ok(sedd("score", run, "seven", "--draws", 2))
    ok(sedd("eval", run, "--draws", 2))
    refused = sedd("sample", run, "--sampler", "first-hitting")
    assert refused.returncode == 2
    assert "tokens change too" in refused.stderr


@pytest.mark.parametrize("process", ["frequency", "hybrid"])
def test_a_resumed_run_is_the_run_without_a_stop(sedd: Sedd, corpus: Path, tmp_path: Path, process: str) -> None:
    train(sedd, corpus, tmp_path / "whole", process, *STOPPABLE)
    train(sedd, corpus, tmp_path / "parts", process, *STOPPABLE, "--set", "budget.steps=3")
    train(sedd, corpus, tmp_path / "parts", process, *STOPPABLE, "--resume")
    same(tmp_path / "whole", tmp_path / "parts", 6)


def test_damaged_frequencies_are_refused(by_frequency: Path, tmp_path: Path) -> None:
    folder = checkpoint.find_model(by_frequency).folder
    stored = json.loads((folder / "config.json").read_text())
    for wrong in ([1, 2], [-1] * stored["vocab_size"], "many", [0.5] * stored["vocab_size"]):
        (tmp_path / "config.json").write_text(json.dumps({**stored, "token_counts": wrong}))
        with pytest.raises(ValueError, match="token_counts"):
            checkpoint.read_stored_model(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--process", "uniform", "--set", "noise.mask_share=0.5"), "noise.process=hybrid"),
        (("--process", "hybrid", "--set", "noise.mask_share=1"), "it must lie in (0, 1)"),
        (("--process", "hybrid", "--objective", "lambda-dce"), "needs Absorbing"),
        (("--process", "frequency", "--objective", "any-order"), "needs Absorbing"),
    ],
)
def test_what_such_noise_cannot_do_is_refused(
    sedd: Sedd, corpus: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = sedd("train", corpus, *words, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert message in done.stderr
