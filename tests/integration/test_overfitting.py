"""A run that overfits says so, and commands use its best checkpoint; resuming continues from the last."""

import json
import random
import shutil
from pathlib import Path

import pytest
from runs import Sedd, log, ok

from sedd.training import checkpoint
from sedd.training.trainer import TrainingState

LETTERS = [
    *("--objective", "autoregressive", "--tokenizer", "chars", "--lr", 0.02, "--steps", 160, "--save-every", 20),
    *("--set", "model.width=32", "--set", "model.depth=2", "--set", "model.heads=2", "--set", "model.seq_len=16"),
    *("--set", "train.batch_size=8", "--set", "train.eval_every=10", "--set", "train.eval_sequences=16"),
    *("--set", "optim.ema_decay=0.5", "--set", "optim.warmup_steps=3", "--set", "data.val_fraction=0.3"),
    *("--set", "train.keep_checkpoints=1"),
]
"""An autoregressive model of random letters: all that it can learn about the text is the text itself."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("overfitting")


@pytest.fixture
def overfit(sedd: Sedd, shared: Path) -> Path:
    """A run that overfits."""
    run, letters = shared / "run", shared / "letters.txt"
    if not run.exists():
        letters.write_text("".join(random.Random(0).choices("abcdefgh", k=600)))
        done = sedd("train", letters, *LETTERS, "--out", run)
        ok(done)
        (shared / "stderr").write_text(done.stderr)
    return run


def bounds(run: Path) -> dict[int, float]:
    return {int(str(record["step"])): float(str(record["bound"])) for record in log(run) if "bound" in record}


def test_a_run_that_overfits_says_so_once(overfit: Path, shared: Path) -> None:
    lines = [line for line in (shared / "stderr").read_text().splitlines() if "overfits" in line]
    best = min(bounds(overfit), key=bounds(overfit).__getitem__)
    assert len(lines) == 1
    assert f"step {best}" in lines[0]
    assert "--set model.dropout" in lines[0]


def test_commands_use_the_best_checkpoint_and_name_it(sedd: Sedd, overfit: Path, tmp_path: Path) -> None:
    """Of those in the log its bound is the least; a checkpoint that is named is used as it is."""
    found, folder = bounds(overfit), overfit / "checkpoints"
    best, last = min(found, key=found.__getitem__), max(found)
    assert best < last
    assert [path.name for path in checkpoint.list_checkpoints(folder)] == [f"step-{n:08d}" for n in (last, best)]
    scores = {}
    for name, model in {
        "run": overfit,
        "best": folder / f"step-{best:08d}",
        "last": folder / f"step-{last:08d}",
    }.items():
        done = sedd("eval", model, "--json")
        ok(done)
        scores[name] = json.loads(done.stdout)["nats_per_token"]
        assert (f"using step {best}," in done.stderr) == (name == "run")
        assert done.stderr.count(f"name {folder / f'step-{last:08d}'}") == (name == "run")
    assert scores["run"] == scores["best"] < scores["last"]
    assert json.loads(sedd("info", overfit, "--json").stdout)["step"] == best
    for words in (["sample", overfit, "-n", 1], ["export", overfit, "--out", tmp_path / "out", "--dtype", "int8"]):
        done = sedd(*words)
        ok(done)
        assert done.stderr.count("using step") == 1
    assert checkpoint.read_state(tmp_path / "out")["step"] == best


def test_resuming_continues_from_the_last_checkpoint(sedd: Sedd, overfit: Path, tmp_path: Path) -> None:
    """And keeps the best; where that is damaged, the last is used. Before the state knew, it was the last too."""
    run = Path(shutil.copytree(overfit, tmp_path / "run"))
    found = bounds(run)
    best, last = min(found, key=found.__getitem__), max(found)
    done = sedd("train", "--out", run, "--resume", "--steps", last + 1)
    ok(done)
    assert f"resuming from step-{last:08d}" in done.stderr
    root = run / "checkpoints"
    assert checkpoint.best_or_newest(root) == root / f"step-{best:08d}"
    newest = root / f"step-{last + 1:08d}"
    (root / f"step-{best:08d}" / "ema.safetensors").write_bytes(b"")
    assert checkpoint.best_or_newest(root) == newest
    shutil.rmtree(root)
    shutil.copytree(overfit / "checkpoints", root)
    folder = root / f"step-{last:08d}"
    state = checkpoint.load_json(folder, "state")
    del state["above_best"]
    checkpoint.write_json(folder / "state.json", state)
    checkpoint._write_manifest(folder, [path.name for path in folder.iterdir() if path.name != checkpoint.MANIFEST])
    assert checkpoint.best_or_newest(root) == folder


def test_a_checkpoint_after_the_best_validation_is_used(sedd: Sedd, overfit: Path, tmp_path: Path) -> None:
    """As of a run that a signal stopped between validations: no later bound was higher."""
    words = [*LETTERS, "--steps", 24, "--set", "train.eval_every=20", "--set", "train.log_every=1"]
    before = "kill_at('open', 'log.jsonl', after='step-00000020', number=2)"
    done = sedd("train", overfit.parent / "letters.txt", *words, "--out", tmp_path / "run", before=before)
    assert done.returncode == 130, done.stderr
    used = checkpoint.best_or_newest(tmp_path / "run" / "checkpoints")
    assert used is not None
    assert 20 < checkpoint.read_state(used)["step"] < 24


@pytest.mark.parametrize(
    ("nats", "reported"),
    [
        ([3.0, 2.0, 2.2, 2.2, 2.2], [4]),
        ([3.0, 2.0, 2.2, 2.2, 2.2, 2.3, 2.4], [4]),
        ([3.0, 2.0, 2.2, 2.05, 2.2, 2.2, 2.2], [6]),
        ([3.0, 2.0, 2.05, 2.05, 2.05, 2.05], []),
        ([3.0, 2.0, 2.2, 2.2, 1.9, 2.2, 2.2], []),
        ([3.0, 2.0, float("nan"), 2.2, 2.2], []),
    ],
)
def test_three_bounds_in_a_row_must_be_higher_by_more_than_the_error(nats: list[float], reported: list[int]) -> None:
    from sedd.training.loop import describe_overfitting

    records = [{"step": step, "bound": bound, "bound_stderr": 0.1} for step, bound in enumerate(nats)]
    first = next((step for step in range(len(records)) if describe_overfitting(records[: step + 1], None)), None)
    assert [first] * (first is not None) == reported


def test_a_bound_above_the_best_is_stored_whether_that_was_saved_or_not() -> None:
    state, above = TrainingState(), []
    for bound, is_saved in ((3.0, False), (2.0, True), (1.5, False), (1.8, True), (float("nan"), True), (1.7, False)):
        state.update_best(bound, is_saved)
        above.append((state.best, state.above_best))
    assert above == [(None, False), (2.0, False), (2.0, False), (1.8, False), (1.8, True), (1.8, False)]
