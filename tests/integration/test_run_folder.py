"""The folder of a run: one process at a time writes it, and what does not belong to the run is refused."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import SMALL, Sedd, log, ok, same

from sedd import files
from sedd.runtime import run_log
from sedd.training import checkpoint, config

WORDS = [*SMALL, "--save-every", 5, "--steps", 10]


def refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def run(sedd: Sedd, corpus: Path, whole: Path, tmp_path: Path) -> Path:
    """A copy of a finished run of ten steps."""
    if not whole.exists():
        ok(sedd("train", corpus, *WORDS, "--out", whole))
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_a_second_run_in_the_same_folder_is_refused(sedd: Sedd, corpus: Path, run: Path, whole: Path) -> None:
    """Before it does anything; the lock ends with the process that holds it, killed or not."""
    holder = "import pathlib; from sedd import files; held = files.locked_folder(pathlib.Path({!r})); held.__enter__()"
    started = sedd("train", "--out", run, "--resume", "--steps", 12, before=holder.format(str(run)))
    refused(started, f"{run} is in use by process", "wait until that ends, stop it, or choose another --out")
    same(whole, run, 10)
    with files.locked_folder(run):
        before = contents(run)
        refused(sedd("train", "--out", run, "--resume", "--steps", 12), f"in use by process {os.getpid()} on ")
        assert contents(run) == before
        new = run.parent / "new"
        new.mkdir()
        with files.locked_folder(new):
            refused(sedd("train", corpus, *WORDS, "--out", new), "in use by")
            assert [path.name for path in new.iterdir()] == [files.LOCK]
    ok(sedd("train", "--out", run, "--resume"))
    assert not (run / files.LOCK).exists()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_cannot_be_resumed(sedd: Sedd, corpus: Path, run: Path, tmp_path: Path) -> None:
    """A mistyped folder, other data, another split and another optimizer; none is left behind or changed."""
    before = contents(run)
    refused(sedd("train", corpus, *WORDS, "--out", tmp_path / "ran", "--resume"), "ran holds no run", "does not exist")
    assert not (tmp_path / "ran").exists()
    refused(sedd("train", corpus, *WORDS, "--out", tmp_path, "--resume"), "holds no run", "no config.json", "--out")
    new = tmp_path / "a" / "b"
    refused(sedd("train", corpus, *SMALL, "--set", "train.grad_accumulation=3", "--out", new), "cannot be shared")
    assert not (tmp_path / "a").exists()
    changed = tmp_path / "words.txt"
    changed.write_text(corpus.read_text().replace("cat", "dog", 1))
    words = ["train", "--out", run, "--resume", "--steps", 12]
    refused(
        sedd(*words, changed), "trained on other data than", str(changed), "SHA-256", "held-out", "restore the data"
    )
    refused(sedd(*words, "--set", "data.val_fraction=0.1"), "trained with data.val_fraction 0.05")
    refused(sedd(*words, "--set", "optim.name=muon"), "trained with optim.name adamw", "--set optim.name=adamw")
    refused(sedd(*words, "--set", "seed=9"), "trained with seed 0", "--set seed=0")
    assert contents(run) == before
    stored = (run / "config.json").read_text()
    (run / "config.json").write_text(stored.replace('"seed": 0', '"seed": 9'))
    refused(sedd(*words), "trained with seed 0", "--set seed=0")


def test_a_run_whose_checkpoints_are_lost(sedd: Sedd, run: Path) -> None:
    """It does not start over: its log shows that there were some."""
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    refused(sedd("train", "--out", run, "--resume", "--steps", 25), f"the run {run} has no checkpoint", "--out")
    assert contents(run) == before
    (run / "config.json").write_text((run / "config.json").read_text().replace('"steps": 10', '"steps": 40'))
    refused(sedd("train", "--out", run, "--resume"), f"the run {run} has no checkpoint", "by step 6")


@pytest.mark.parametrize("resume", [["--resume"], []], ids=["resumed", "started again"])
def test_a_run_that_was_killed_before_its_first_checkpoint(
    sedd: Sedd, corpus: Path, whole: Path, run: Path, tmp_path: Path, resume: list[str]
) -> None:
    """It starts from step 0, says so and keeps the log."""
    out = tmp_path / "killed"
    words = ["train", corpus, *WORDS, "--out", out]
    assert sedd(*words, before="kill_inside('step-00000005/model')").returncode == -signal.SIGKILL
    logged = (out / "log.jsonl").read_text()
    done = sedd(*words, *resume)
    ok(done)
    assert ("starting from step 0" in done.stderr) == bool(resume)
    assert "log-1.jsonl" in done.stderr
    assert (out / "log-1.jsonl").read_text() == logged
    same(whole, out, 10)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda lines: [*lines[:-1], lines[-1][:20]], "was not completely written; it was dropped"),
        (lambda lines: lines[:6], "has 6 of the 10 records up to step 10"),
        (lambda lines: [], "has 0 of the 10 records"),
    ],
    ids=["torn", "truncated", "empty"],
)
def test_a_log_with_lost_records_is_noticed(
    sedd: Sedd, run: Path, damage: Callable[[list[str]], list[str]], found: str
) -> None:
    path = run / "log.jsonl"
    path.write_text("".join(damage(path.read_text().splitlines(keepends=True))))
    done = sedd("train", "--out", run, "--resume", "--steps", 12)
    ok(done)
    assert found in done.stderr
    assert [record["step"] for record in log(run)][-2:] == [11, 12]


def test_a_damaged_line_of_the_log_is_named(sedd: Sedd, run: Path, refuses: Callable[..., None]) -> None:
    """Whatever it holds, and before anything is written."""
    path = run / "log.jsonl"
    lines = path.read_text().splitlines()
    for line in ('{"step": 3, "lo', "null", "", '{"step": true}', "[" * 100_000, "{}"):
        path.write_text("\n".join([*lines[:4], line, *lines[4:]]) + "\n")
        refuses(lambda: run_log.read_log(run), f"{path}, line 5 is not a record of a step", "remove that line")
    before = contents(run)
    refused(
        sedd("train", "--out", run, "--resume", "--steps", 12),
        f"{path}, line 5 is not a record of a step: it has no step",
    )
    assert contents(run) == before


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        (config.OptimConfig, "weight_decay", "nan", "[0, inf)"),
        (config.OptimConfig, "weight_decay", "inf", "[0, inf)"),
        (config.OptimConfig, "lr", "1e38", "(0, 1e+30]"),
        (config.OptimConfig, "lr", "nan", "(0, 1e+30]"),
        (config.ModelConfig, "dropout", "nan", "[0, 1)"),
        (config.TrainConfig, "loss_weighting", "inf", "[0, inf)"),
    ],
)
def test_numbers_that_no_run_can_have(
    section: Callable[..., object], key: str, value: str, words: str, refuses: Callable[..., None]
) -> None:
    refuses(lambda: section(**{key: float(value)}), f".{key} is {float(value)}", words)


BAD_WEIGHT = """
import torch
from sedd.training import trainer
update = trainer.EMA.update
def damage(self, step):
    update(self, step)
    if step == {step}:
        self.weights[-1].fill_({value})
trainer.EMA.update = damage
"""


@pytest.mark.parametrize("value", ["float('nan')", "3e38"])
def test_a_run_that_ends_without_a_finite_bound_fails(sedd: Sedd, corpus: Path, tmp_path: Path, value: str) -> None:
    """What was saved before is kept, and the last step is not saved."""
    out = tmp_path / "run"
    words = ["train", corpus, *SMALL, "--set", "train.eval_every=0", "--save-every", 5, "--steps", 8, "--out", out]
    done = sedd(*words, before=BAD_WEIGHT.format(step=6, value=value))
    refused(done, "at step 8, the last, the validation bound is", "lower optim.lr", code=1)
    assert [folder.name for folder in checkpoint.list_checkpoints(out / "checkpoints")] == ["step-00000005"]
    saved = sedd(*words, "--resume", "--save-every", 7, before=BAD_WEIGHT.format(step=6, value="float('nan')"))
    refused(saved, "at step 7", "of the ema is not finite; that step is not saved", code=1)
    assert [folder.name for folder in checkpoint.list_checkpoints(out / "checkpoints")] == ["step-00000005"]
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000005"]


HANGUP = """
import os, pty, signal, sys
leader, follower = pty.openpty()
for stream in (1, 2):
    os.dup2(follower, stream)
os.close(follower)
sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # those of the server may be files
sent = []
def hang_up(name, arguments):
    if name == "open" and str(arguments[0]).endswith("log.jsonl") and arguments[1] == "a" and not sent:
        sent.append(True)
        os.close(leader)
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
sys.addaudithook(hang_up)
"""


def test_a_closed_terminal_saves_the_run(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """SIGHUP from a terminal that is gone, so that nothing can be printed any more, and SIGTERM twice."""
    out = tmp_path / "run"
    words = [*SMALL, "--set", "train.eval_every=1", "--steps", 200]  # a line is printed after every step
    assert sedd("train", corpus, *words, "--out", out, before=HANGUP).returncode != 0
    (newest,) = checkpoint.list_checkpoints(out / "checkpoints")
    assert newest.name == "step-00000002"  # the step in which the signals came was the second
    assert checkpoint.corruption(newest, checkpoint.CHECKPOINT_FILES) is None


def test_an_output_that_exists_survives_a_kill(sedd: Sedd, run: Path, tmp_path: Path) -> None:
    """Of sampling when half of the texts are written, and of other commands before the file is replaced."""
    out = tmp_path / "texts.txt"
    out.write_text("before")
    half = "from sedd import trace; trace.separator = lambda n: die() if n > 1 else str(n)"
    for words, before in (
        (["sample", run, "-n", 2, "--batch", 1, "--steps", 2, "--out", out], half),
        (["eval", run, "--draws", 2, "--out", out], "kill_at('os.rename', '.writing-texts.txt')"),
        (["report", run, "--samples", 0, "--out", out], "kill_at('os.rename', '.writing-texts.txt')"),
    ):
        assert sedd(*words, before=before).returncode == -signal.SIGKILL
        assert out.read_text() == "before"
    ok(sedd("sample", run, "-n", 1, "--steps", 2, "--out", out))
    assert out.read_text() != "before"
    assert sorted(path.name for path in tmp_path.iterdir() if "writing" in path.name) == []


IN_A_GROUP = """
import os, sys, torch, torch.distributed as dist
from sedd.training import loop
rank = int(os.fork() == 0)
if {with_variables}:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2)
train = loop.run
def run(*given):
    end = train(*given)
    ranks = torch.tensor([float(rank + 1)])
    dist.all_reduce(ranks)
    print(f"the group is alive: {{ranks.item()}}", file=sys.stderr, flush=True)
    dist.barrier()
    return end
loop.run = run
"""


@pytest.mark.parametrize("with_variables", [False, True], ids=["alone", "torchrun's variables"])
def test_a_process_group_that_exists_is_used_and_left_alive(
    sedd: Sedd, corpus: Path, run: Path, tmp_path: Path, with_variables: bool
) -> None:
    """As under Ray Train, whose workers have made their group before they call ``sedd.train``."""
    out = tmp_path / "two"
    before = IN_A_GROUP.format(with_variables=with_variables, store=tmp_path / "store")
    done = sedd("train", corpus, *WORDS, "--out", out, before=before)
    ok(done)
    assert done.stderr.count("the group is alive: 3.0") == 2
    assert "Traceback" not in done.stderr
    for a, b in zip(log(run), log(out), strict=True):
        assert a["step"] == b["step"]
        assert abs(a["loss"] - b["loss"]) < 1e-5


DIES = """
if rank == 1:
    from sedd.training import loop
    step = loop.train_step
    loop.train_step = lambda trainer, *given: die() if trainer.state.step == 6 else step(trainer, *given)
"""


def test_a_process_whose_peer_was_killed_says_one_sentence(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """And what was saved is resumed by one process, whose losses are those of two."""
    out = tmp_path / "two"
    before = IN_A_GROUP.format(with_variables=True, store=tmp_path / "store")
    done = sedd("train", corpus, *WORDS, "--out", out, before=before + DIES)
    refused(done, "sedd: process 0 stops because another process of the run has ended", "--resume")
    assert done.stderr.count("sedd:") == 2  # the first line states what is trained
    ok(sedd("train", "--out", out, "--resume"))
    assert [record["step"] for record in log(out)] == list(range(1, 11))


def test_a_push_writes_to_a_private_folder_and_leaves_nothing(sedd: Sedd, run: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    before = f"import tempfile; tempfile.tempdir = {str(temporary)!r}\nfrom sedd.hub import client\n"
    before += "client.upload = lambda folder, *rest: f'{len(list(folder.iterdir()))} {folder.parent.stat().st_mode:o}'"
    done = sedd("push", run, "owner/name", before=before)
    ok(done)
    assert " 40700" in done.stdout
    assert list(temporary.iterdir()) == []
