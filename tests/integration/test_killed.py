"""A run that is killed with SIGKILL at any point resumes bit for bit as if it had not been.

Each command kills itself at a file operation of its own, so that the moment is known: between two checkpoints, in the
middle of writing one, or while an older one is removed.
"""

import signal
from pathlib import Path

import pytest
from runs import SMALL, Sedd, ok, same

from sedd.training import checkpoint

FLAGS = {
    "absorbing": [],
    "uniform accumulated": ["--process", "uniform", "--set", "train.grad_accumulation=2"],
    "muon dropout mean": ["--set", "optim.name=muon", "--set", "model.dropout=0.1", "--parameterization", "mean"],
}
# where it is killed, and the checkpoint from which it must resume
POINTS = {
    "between checkpoints": ("kill_at('open', 'log.jsonl', after='step-00000005')", 5),
    "in the weights": ("kill_inside('step-00000010/model')", 5),
    "in the moments": ("kill_inside('step-00000010/optimizer')", 5),
    "before the manifest": ("kill_at('open', 'step-00000010/.writing-manifest.json')", 5),
    "before the rename": ("kill_at('os.rename', '.writing-step-00000010')", 5),
    "after the rename": ("kill_at('open', 'checkpoints', after='/step-00000010')", 10),
    "while the one before is removed": ("kill_at('os.remove', 'model.safetensors', after='/step-00000010')", 10),
}
PRUNE_FIRST = """
from sedd.training import checkpoint
save = checkpoint.save
checkpoint.save = lambda root, *rest, **more: (checkpoint.prune(root, 0, None), save(root, *rest, **more))
"""
FORGET_MOMENTS = """
from torch.distributed.checkpoint import state_dict
state_dict.set_optimizer_state_dict = lambda *given, **more: None
"""


def words(corpus: Path, out: Path, flags: list[str]) -> list[object]:
    """Return the command of ten steps with a checkpoint every five, of which the last is kept."""
    every = ["--set", "train.eval_every=0", "--set", "train.keep_checkpoints=1", "--save-every", 5, "--steps", 10]
    return ["train", corpus, *SMALL, *flags, *every, "--out", out]


def check(sedd: Sedd, corpus: Path, whole: Path, out: Path, flags: list[str], point: str, mutant: str = "") -> None:
    """Kill a run, resume it and compare it with an uninterrupted one."""
    if not whole.exists():
        ok(sedd(*words(corpus, whole, flags)))
    before, start = POINTS[point]
    first, second = (mutant, "") if mutant == PRUNE_FIRST else ("", mutant)
    assert sedd(*words(corpus, out, flags), before=f"{first}\n{before}").returncode == -signal.SIGKILL
    done = sedd(*words(corpus, out, flags), "--resume", before=second)
    ok(done)
    assert f"resuming from step-{start:08d}" in done.stderr
    assert "damaged" not in done.stderr
    same(whole, out, 10)
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"step-00000010"}
    assert checkpoint.corruption(out / "checkpoints" / "step-00000010") is None


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        *(("absorbing", point) for point in POINTS),
        *(("uniform accumulated", point) for point in ("between checkpoints", "in the weights", "after the rename")),
        ("muon dropout mean", "between checkpoints"),
        ("muon dropout mean", "before the rename"),
    ],
)
def test_a_killed_run_resumes_bit_for_bit(
    sedd: Sedd, corpus: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kind: str, point: str
) -> None:
    whole = tmp_path_factory.getbasetemp() / f"whole {kind}"
    check(sedd, corpus, whole, tmp_path / "killed", FLAGS[kind], point)


BACKGROUND = """
from sedd.training import trainer
start = trainer.BackgroundWriter.__init__
trainer.BackgroundWriter.__init__ = lambda self, in_background: start(self, True)
"""
FAILS = """
from sedd.training import checkpoint
def fail(root, name, *rest):
    raise ValueError(f"{root / name} could not be written: No space left on device")
checkpoint.save = fail
"""


def test_checkpoints_written_in_the_background(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """As on a GPU: the same bits, also if it is killed in the middle of one; a failure ends the run."""
    whole, out, full = tmp_path / "whole", tmp_path / "killed", tmp_path / "full"
    ok(sedd(*words(corpus, whole, [])))
    killed = sedd(*words(corpus, out, []), before=BACKGROUND + POINTS["in the moments"][0])
    assert killed.returncode == -signal.SIGKILL
    done = sedd(*words(corpus, out, []), "--resume", before=BACKGROUND)
    ok(done)
    assert "resuming from step-00000005" in done.stderr
    same(whole, out, 10)
    failed = sedd(*words(corpus, full, []), before=BACKGROUND + FAILS)
    assert failed.returncode == 2
    assert "step-00000005 could not be written: No space left" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.verify
def test_two_threads_compute_the_same_bits(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """A whole run and one that was killed, each with two threads, of which neither adds what the other does."""
    flags = ["--set", "model.width=64", "--set", "model.seq_len=64", "--set", "train.batch_size=16"]
    threads, (point, start) = "import torch; torch.set_num_threads(2)\n", POINTS["between checkpoints"]
    whole, out = tmp_path / "whole", tmp_path / "killed"
    ok(sedd(*words(corpus, whole, flags), before=threads))
    assert sedd(*words(corpus, out, flags), before=threads + point).returncode == -signal.SIGKILL
    done = sedd(*words(corpus, out, flags), "--resume", before=threads)
    ok(done)
    assert f"resuming from step-{start:08d}" in done.stderr
    same(whole, out, 10)


NAN = """
from sedd.training import optimizer
clip, calls = optimizer.clip_grad_norm, []
optimizer.clip_grad_norm = lambda *given: (calls.append(1), clip(*given) / (len(calls) > 1))[1]
"""
"""The first gradient is not finite."""


@pytest.mark.parametrize("flags", [[], ["--set", "optim.name=muon"]], ids=["adamw", "muon"])
def test_a_run_that_stopped_at_its_first_step_resumes_bit_for_bit(
    sedd: Sedd, corpus: Path, tmp_path: Path, flags: list[str]
) -> None:
    """Its optimizers have no state yet."""
    whole, out = tmp_path / "whole", tmp_path / "stopped"
    ok(sedd(*words(corpus, whole, flags)))
    stopped = sedd(*words(corpus, out, flags), before=NAN)
    assert stopped.returncode == 1, stopped.stderr
    ok(sedd(*words(corpus, out, flags), "--resume"))
    for stem in ("model", "ema", "optimizer"):
        one, two = ((run / "checkpoints/step-00000010" / f"{stem}.safetensors").read_bytes() for run in (whole, out))
        assert one == two, stem


@pytest.mark.parametrize("mutant", [PRUNE_FIRST, FORGET_MOMENTS], ids=["prune first", "forget moments"])
def test_lost_state_is_detected(sedd: Sedd, corpus: Path, tmp_path: Path, mutant: str) -> None:
    with pytest.raises(AssertionError, match=r"resuming from|^model "):
        check(sedd, corpus, tmp_path / "whole", tmp_path / "killed", [], "in the weights", mutant)


@pytest.mark.verify
@pytest.mark.parametrize("kind", ["absorbing", "uniform accumulated"])
def test_at_every_file_operation(sedd: Sedd, corpus: Path, tmp_path: Path, kind: str) -> None:
    """Kill at each operation from the first of the second checkpoint to the end of the run."""
    whole = tmp_path / "whole"
    ok(sedd(*words(corpus, whole, FLAGS[kind])))
    for number in range(200):
        out = tmp_path / f"killed {number}"
        killed = sedd(
            *words(corpus, out, FLAGS[kind]), before=f"kill_at_number({number}, '.writing-step-00000010')"
        ).returncode
        if killed == 0:
            break
        assert killed == -signal.SIGKILL
        done = sedd(*words(corpus, out, FLAGS[kind]), "--resume")
        ok(done)
        assert "resuming from step-" in done.stderr
        assert "damaged" not in done.stderr
        same(whole, out, 10)
    assert 30 < number < 199
