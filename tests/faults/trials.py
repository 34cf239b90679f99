"""The faults: each is a generator of trials, and yields for each what was lost, or None."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import local_hub
from harness import (
    KILLED,
    STEPS,
    TRAIN,
    Done,
    Outcome,
    Place,
    files,
    left_behind,
    refusal,
    same_files,
    same_run,
    success,
)

from sedd.training import checkpoint

Trials = Iterator[Outcome]
Fault = Callable[[Place, int], Trials]
OLD = "what was there before\n"
MOST_ATTEMPTS = 20
"""Times that a fault may miss, for each time that it is to happen."""


# Killed at a random moment ---------------------------------------------------------------------------------


def killed_training(place: Place, count: int, before: str = "", slower: float = 1.0) -> Trials:
    """Runs that are killed and resumed until they end; each must end as if nothing had happened."""
    kills = 0
    while kills < count:
        out, here, problem = place.new_folder() / "run", 0, None
        for _ in range(MOST_ATTEMPTS):
            moment = place.random.uniform(0, 1.3 * slower * place.run.seconds)
            done = place.train(out, before=before, signals=[(moment, signal.SIGKILL)])
            if done.returncode != KILLED:
                problem = success(done)
                break
            here += 1
        else:
            problem = success(place.train(out))
        problem = problem or same_run(out, place.run.out)
        yield from [problem, *[None] * (here - 1)] if here or problem else []
        kills += here
        shutil.rmtree(out.parent)


SLOW = """
import time
def hook(name, arguments):
    if name in ("open", "os.rename", "os.mkdir", "os.remove"):
        time.sleep(0.003)
sys.addaudithook(hook)
fsync = os.fsync
os.fsync = lambda file: (time.sleep(0.01), fsync(file))[1]
"""
"""A disk on which every operation takes milliseconds, so that more moments lie between two of them."""


def killed_training_on_a_slow_disk(place: Place, count: int) -> Trials:
    """As before; the run takes about three times as long."""
    yield from killed_training(place, count, SLOW, 3.0)


def killed_command(place: Place, count: int, name: str) -> Trials:
    """Kill a command, check what it left, and run it again; files are there before in half of the trials."""
    command = COMMANDS[name](place)
    whole = place.reference(name, command)
    kills = attempts = 0
    while kills < count and attempts < MOST_ATTEMPTS * count:
        attempts += 1
        out = place.new_folder() / name
        if whole.out.is_file() and attempts % 2:
            out.write_text(OLD)
        was = files(out)
        moment = place.random.uniform(0, 1.1 * whole.seconds)
        if command(out, signals=[(moment, signal.SIGKILL)]).returncode == KILLED:
            kills += 1
            yield check_again(command, out, was, whole.out)
        shutil.rmtree(out.parent)


def check_again(command: Callable[..., Done], out: Path, was: dict[str, bytes], whole: Path) -> Outcome:
    """After a fault: what was there is there, or what was to be written; run again, the command leaves that alone."""
    if out.exists() and files(out) != was and same_files(out, whole):
        return f"{out.name} is neither what was there before nor what was to be written"
    if out.is_dir() and not same_files(out, whole):
        return left_behind(out.parent, out)  # it was complete: nothing to do again
    return success(command(out)) or same_files(out, whole) or left_behind(out.parent, out)


def _prepare(place: Place) -> Callable[..., Done]:
    return lambda out, **how: place.sedd("data", "prepare", place.corpus, "--workers", 1, "--out", out, **how)


def _import(place: Place) -> Callable[..., Done]:
    return lambda out, **how: place.sedd("import", place.source, "--out", out, **how)


def _sample(place: Place) -> Callable[..., Done]:
    run = place.run.out
    return lambda out, **how: place.sedd("sample", run, "-n", 48, "--batch", 8, "--steps", 8, "--out", out, **how)


def _evaluate(place: Place) -> Callable[..., Done]:
    run = place.run.out
    return lambda out, **how: place.sedd("eval", run, place.text, "--draws", 4, "--out", out, **how)


COMMANDS: dict[str, Callable[[Place], Callable[..., Done]]] = {
    "run": lambda place: place.train,
    "shards": _prepare,
    "model": _import,
    "samples.txt": _sample,
    "result.json": _evaluate,
}
"""Every command that writes, by the name of what it writes; ``command(out, **how)`` runs it."""


def killed_push(place: Place, count: int) -> Trials:
    """`sedd push` to a Hub on this machine, which must hold all files or none; a push that ends leaves no weights."""
    with local_hub.serve() as hub:
        temporary = place.new_folder("temporary")
        before = (
            "import tempfile; from huggingface_hub import constants\n"
            f"tempfile.tempdir, constants.ENDPOINT = {str(temporary)!r}, {hub.address!r}\n"
            "os.environ['HF_TOKEN'], constants.HF_HUB_DISABLE_TELEMETRY = 'hf_token', True\n"
        )

        def push(name: str, **how: object) -> Done:
            return place.sedd("push", place.run.out, name, before=before, **how)  # type: ignore[arg-type]

        assert not success(push("owner/first"))
        start = time.monotonic()
        assert not success(push("owner/whole"))
        seconds, whole = time.monotonic() - start, hub.files["owner/whole"]
        kills = attempts = 0
        while kills < count and attempts < MOST_ATTEMPTS * count:
            attempts += 1
            name = f"owner/name-{attempts}"
            moment = place.random.uniform(0, 1.1 * seconds)
            if push(name, signals=[(moment, signal.SIGKILL)]).returncode != KILLED:
                continue
            kills += 1
            found = hub.files.get(name, {}).keys()
            if found and found != whole.keys():
                yield f"the Hub holds {sorted(found)}"
                continue
            for path in temporary.iterdir():  # what a killed process leaves is the system's to remove
                shutil.rmtree(path, ignore_errors=True)
            problem = success(push(name))
            if not problem and hub.files[name].keys() != whole.keys():
                problem = "the second push is not complete"
            weights = list(temporary.rglob("*.safetensors"))
            yield problem or (f"{weights[0].name} is left in TMPDIR" if weights else None)


# Disks -----------------------------------------------------------------------------------------------------


LEAST_LIMIT = 400
"""Bytes: the sentence that a command prints goes to a file too."""


def _limited(size: int) -> str:
    return f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"


def file_too_large(place: Place, count: int) -> Trials:
    """Every command that writes, with a random limit on the size of files, as on a full disk; then without it."""
    for name, build in COMMANDS.items():
        command = build(place)
        whole = place.reference(name, command)
        largest = max(len(content) for content in files(whole.out).values())
        tried = 0
        for _ in range(3 * count):
            out = place.new_folder() / name
            if whole.out.is_file():
                out.write_text(OLD)
            was = files(out)
            done = command(out, before=_limited(place.random.randrange(LEAST_LIMIT, largest)))
            if done.returncode:
                tried += 1
                problem = refusal(done) or check_after(command, out, was, whole.out)
                yield f"{name}: {problem}" if problem else None
            shutil.rmtree(out.parent)
            if tried == count:
                break


def check_after(command: Callable[..., Done], out: Path, was: dict[str, bytes], whole: Path) -> Outcome:
    if out.name == "run":
        return success(command(out)) or same_run(out, whole)
    return check_again(command, out, was, whole)


def full_disk(place: Place, count: int) -> Trials:
    """Training, preparing and sampling on a small file system that fills up; then it is made larger."""
    for name, build in COMMANDS.items():
        command = build(place)
        whole = place.reference(name, command)
        needed = sum(len(content) + 4096 for content in files(whole.out).values())
        for _ in range(count):
            disk = place.new_folder("disk")
            size = place.random.randrange(4096, needed)
            if subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", disk], capture_output=True
            ).returncode:
                return  # no right to mount
            try:
                out = disk / name
                done = command(out)
                if done.returncode:
                    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True, capture_output=True)
                    problem = refusal(done) or check_after(command, out, {}, whole.out)
                    yield f"{name}: {problem}" if problem else None
            finally:
                subprocess.run(["umount", disk], check=True)


def read_only(place: Place, count: int) -> Trials:
    """Folders that may not be written to: one sentence, and what is there stays."""
    for name, build in COMMANDS.items():
        command = build(place)
        whole = place.reference(name, command)
        for _ in range(count):
            out = place.new_folder() / name
            if whole.out.is_file():
                out.write_text(OLD)
            elif name == "run":
                shutil.copytree(whole.out, out)
            was = files(out.parent)
            with _read_only(out.parent, place.folder) as before:
                done = command(out, *(["--steps", STEPS + 2] if name == "run" else []), before=before)
            problem = refusal(done) or (None if files(out.parent) == was else "it was changed")
            yield f"{name}: {problem}" if problem else None
            shutil.rmtree(out.parent)


class _read_only:  # noqa: N801
    """Take the right to write away; root, who may write anywhere, becomes nobody in the command, who may read."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder, self.place = folder, place

    def __enter__(self) -> str:
        for path in [self.folder, *self.folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        if os.getuid():
            return ""
        for path in [self.place.parent, self.place, *self.place.rglob("*")]:
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
        return "os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)"

    def __exit__(self, *_: object) -> None:
        for path in [self.folder, *self.folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


# Damaged files ---------------------------------------------------------------------------------------------


def _damage(path: Path, place: Place) -> str:
    """Truncate a file or change one of its bits; return what was done."""
    content = path.read_bytes()
    if place.random.random() < 0.5 or not content:
        kept = place.random.randrange(len(content) or 1)
        path.write_bytes(content[:kept])
        return f"{path.name} cut to {kept} of {len(content)} bytes"
    at, bit = place.random.randrange(len(content)), 1 << place.random.randrange(8)
    path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
    return f"{path.name} with bit {bit} of byte {at} changed"


def damaged_run(place: Place, count: int) -> Trials:
    """Every file of a stopped run: it resumes to the same weights, or one sentence says what is wrong."""
    half = place.new_folder() / "run"
    stop = f"kill_at('open', 'log.jsonl', after='step-{STEPS // 2 + 1:08d}')"
    assert place.train(half, before=stop).returncode == KILLED
    yield from _damaged(
        place, count, half, lambda run: place.train(run), lambda run: same_run(run, place.run.out, False)
    )


def damaged_data(place: Place, count: int) -> Trials:
    """Every file of prepared data: refused, or harmless."""
    shards = place.reference("shards", _prepare(place)).out

    def train(folder: Path) -> Done:
        return place.sedd("train", folder, *TRAIN, "--out", folder.parent / "run")

    whole = place.new_folder() / "shards"
    shutil.copytree(shards, whole)
    assert not success(train(whole))
    check = lambda folder: same_run(folder.parent / "run", whole.parent / "run")  # noqa: E731
    yield from _damaged(place, count, shards, train, check)


def damaged_model(place: Place, count: int) -> Trials:
    """Every file of a model folder: refused, or the same samples."""
    model = place.reference("model", _import(place)).out

    def sample(folder: Path) -> Done:
        return place.sedd(
            "sample", folder, "-n", 2, "--steps", 4, "--length", 8, "--out", folder.parent / "samples.txt"
        )

    whole = place.new_folder() / "model"
    shutil.copytree(model, whole)
    assert not success(sample(whole))
    check = lambda folder: same_files(folder.parent / "samples.txt", whole.parent / "samples.txt")  # noqa: E731
    yield from _damaged(place, count, model, sample, check)


def damaged_results(place: Place, count: int) -> Trials:
    """Results of `sedd eval --out` and samples: used by other commands, or refused in a sentence."""
    result = place.reference("result.json", _evaluate(place)).out
    sample = lambda out: place.sedd("sample", place.run.out, "-n", 4, "--steps", 4, "--out", out)  # noqa: E731
    lines = place.reference("samples.jsonl", sample).out
    for _ in range(count):
        for source, use in (
            (
                result,
                lambda path: place.sedd("push", place.run.out, "a/b", "--result", path, "--out", path.parent / "o"),
            ),
            (lines, lambda path: place.sedd("quality", path)),
            (lines, lambda path: place.sedd("report", path, "--out", path.parent / "report.html")),
        ):
            path = place.new_folder() / source.name
            shutil.copy(source, path)
            what = _damage(path, place)
            done = use(path)
            problem = refusal(done, (0, 1, 2))
            yield f"{what}: {problem}" if problem else None
            shutil.rmtree(path.parent)


def _damaged(
    place: Place, count: int, source: Path, use: Callable[[Path], Done], check: Callable[[Path], Outcome]
) -> Trials:
    """Damage every file of a folder in turn, ``count`` times; use the folder."""
    names = sorted(name for name in files(source) if "tensorboard" not in name)
    for _ in range(count):
        for name in names:
            folder = place.new_folder() / source.name
            shutil.copytree(source, folder)
            what = _damage(folder / name, place)
            done = use(folder)
            problem = check(folder) if done.returncode == 0 else refusal(done)
            yield f"{what}: {problem}" if problem else None
            shutil.rmtree(folder.parent)


# Numbers, signals, other processes, data -------------------------------------------------------------------

NAN = """
from sedd.training import optimizer
clip, calls = optimizer.clip_grad_norm, []
def clip_to_nan(*given):
    calls.append(1)
    return clip(*given) * (float("nan") if len(calls) == {step} else 1)
optimizer.clip_grad_norm = clip_to_nan
"""


def not_a_number(place: Place, count: int) -> Trials:
    """NaN at a random step: the run stops with the weights from before it, or skips the step."""
    for i in range(count):
        out, step = place.new_folder() / "run", place.random.randint(1, STEPS) if i > 1 else 1
        done = place.train(out, *(["--on-nonfinite", "skip"] if i % 2 else []), before=NAN.format(step=step))
        if i % 2:
            problem = success(done)
            weights = out / checkpoint.CHECKPOINTS / checkpoint.step_name(STEPS)
            problem = problem or checkpoint.corruption(weights)
        else:
            problem = refusal(done, (1,)) or success(place.train(out)) or same_run(out, place.run.out, log=False)
        yield f"at step {step}: {problem}" if problem else None
        shutil.rmtree(out.parent)


MARK = """
from sedd.training import loop
signals = loop._signals
loop._signals = lambda: (open({marker!r}, "w").close(), signals())[1]
"""
"""Leave a file when signals begin to be handled: before that there is nothing to save."""


def _stopped(place: Place, count: int, *numbers: int) -> Trials:
    """Signals at a random moment of training: what is done is saved, and the run resumes as if nothing happened."""
    tried = attempts = 0
    while tried < count and attempts < MOST_ATTEMPTS * count:
        attempts += 1
        out, moment = place.new_folder() / "run", place.random.uniform(0, place.run.seconds)
        marker = out.parent / "marker"
        done = place.train(
            out,
            before=MARK.format(marker=str(marker)),
            signals=[(moment + 0.05 * i, number) for i, number in enumerate(numbers)],
        )
        if done.returncode == 0 or not marker.exists():  # too late, or before training began
            shutil.rmtree(out.parent)
            continue
        tried += 1
        log = (out / "log.jsonl").read_text().splitlines() if (out / "log.jsonl").exists() else []
        logged = [json.loads(line)["step"] for line in log]
        saved = checkpoint.list_checkpoints(out / checkpoint.CHECKPOINTS)
        problem = refusal(done, tuple(128 + n for n in numbers))
        if not problem and (not saved or int(saved[0].name[-8:]) < max(logged, default=0)):
            problem = f"step {max(logged, default=0)} was done and not saved"
        yield problem or success(place.train(out)) or same_run(out, place.run.out, log=False)
        shutil.rmtree(out.parent)


def hangup(place: Place, count: int) -> Trials:
    """SIGHUP, as when a terminal is closed."""
    yield from _stopped(place, count, signal.SIGHUP)


def terminated_twice(place: Place, count: int) -> Trials:
    """SIGTERM, and again while the run is being saved."""
    yield from _stopped(place, count, signal.SIGTERM, signal.SIGTERM)


def two_runs_in_one_folder(place: Place, count: int) -> Trials:
    """The same command twice at once: one of them is refused, or waits; the run is that of one alone."""
    other = Place(place.new_folder("other"))
    vars(other)["corpus"] = place.corpus
    try:
        other.environment["SEDD_CACHE"] = place.environment["SEDD_CACHE"]
        assert not success(other.train(other.new_folder() / "run"))
        for _ in range(count):
            out, delay = place.new_folder() / "run", place.random.uniform(0, 0.7 * place.run.seconds)
            with ThreadPoolExecutor(2) as pool:
                first = pool.submit(place.train, out)
                time.sleep(delay)
                ends = [first, pool.submit(other.train, out)]
            problems = [refusal(end.result(), (0, 1, 2)) for end in ends]
            if not any(end.result().returncode == 0 for end in ends):
                problems.append("neither ended well")
            yield next(filter(None, problems), None) or same_run(out, place.run.out)
            shutil.rmtree(out.parent)
    finally:
        vars(other).pop("corpus")
        other.close()


def changed_data(place: Place, count: int) -> Trials:
    """Data that was changed after a run was stopped: resuming it is refused, or the run is told the truth."""
    for i in range(count):
        folder = place.new_folder()
        data, out = folder / "words.txt", folder / "run"
        shutil.copy(place.corpus, data)
        words = ["train", data, *TRAIN, "--out", out]
        stop = f"kill_at('open', 'log.jsonl', after='step-{STEPS // 2 + 1:08d}')"
        assert place.sedd(*words, before=stop).returncode == KILLED
        text = data.read_text()
        data.write_text(text + text[: len(text) // 2] if i % 2 else text.replace("cat", "dog"))
        done = place.sedd(*words, "--resume")
        yield refusal(done, (2,)) and f"changed data: {refusal(done, (2,))}"
        shutil.rmtree(folder)


def dead_rank(place: Place, count: int) -> Trials:
    """One of two ranks under torchrun is killed at a random step; the run is resumed by two."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "sedd"]

    def command(out: Path, *more: str) -> list[str]:
        return [*launch, "train", str(place.corpus), *map(str, TRAIN), "--steps", "200", "--out", str(out), *more]

    for _ in range(count):
        out = place.new_folder() / "run"
        with subprocess.Popen(command(out), env=place.environment, stderr=subprocess.PIPE, text=True) as launcher:
            step, log = place.random.randint(3, 40), out / "log.jsonl"
            while launcher.poll() is None and not (log.exists() and log.read_text().count("\n") >= step):
                time.sleep(0.01)
            ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            os.kill(int(place.random.choice(ranks)), signal.SIGKILL)
            errors = launcher.communicate(timeout=120)[1]
        saved = checkpoint.list_checkpoints(out / checkpoint.CHECKPOINTS)
        broken = next(filter(None, map(checkpoint.corruption, saved)), None)
        ended = subprocess.run(command(out, "--resume"), env=place.environment, capture_output=True, text=True)
        problem = broken or (None if ended.returncode == 0 else f"it did not resume: {ended.stderr[-300:]}")
        ours = [line for line in errors.splitlines() if "sedd: " in line or ("/sedd/" in line and "File" in line)]
        if not problem and any("File" in line for line in ours):
            problem = f"the other rank shows a traceback: {ours[0].strip()}"
        yield problem
        shutil.rmtree(out.parent)


FAULTS: dict[str, tuple[Fault, int]] = {
    "training killed": (killed_training, 100),
    "training on a slow disk killed": (killed_training_on_a_slow_disk, 20),
    "data prepare killed": (partial(killed_command, name="shards"), 25),
    "import killed": (partial(killed_command, name="model"), 25),
    "sample --out killed": (partial(killed_command, name="samples.txt"), 25),
    "eval --out killed": (partial(killed_command, name="result.json"), 25),
    "push killed": (killed_push, 20),
    "files limited in size": (file_too_large, 3),
    "disk full": (full_disk, 2),
    "folder read-only": (read_only, 1),
    "file of a run damaged": (damaged_run, 3),
    "file of prepared data damaged": (damaged_data, 5),
    "file of a model damaged": (damaged_model, 5),
    "results and samples damaged": (damaged_results, 8),
    "NaN at a step": (not_a_number, 8),
    "SIGHUP": (hangup, 5),
    "SIGTERM twice": (terminated_twice, 5),
    "two runs in one folder": (two_runs_in_one_folder, 10),
    "data changed before --resume": (changed_data, 4),
    "a rank killed under torchrun": (dead_rank, 2),
}
"""Each fault, and how often the long form tries it; for some, with each command or file."""
