"""What faults need: a place to work in, commands that can be killed, and what an uninterrupted command leaves."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import publications
import torch
from commands import Commands, Signals, start_server
from safetensors.torch import load_file

from sedd.training import checkpoint

Outcome = str | None
"""What a trial lost; None: nothing."""
Done = subprocess.CompletedProcess[str]
STEPS = 10
TRAIN = [
    *("--set", "model.width=16", "--set", "model.depth=1", "--set", "model.heads=2", "--set", "model.seq_len=16"),
    *("--set", "train.batch_size=4", "--set", "train.log_every=1", "--set", "train.eval_every=5"),
    *("--set", "train.eval_sequences=4", "--set", "train.keep_checkpoints=2", "--set", "optim.warmup_steps=3"),
    *("--save-every", "2", "--steps", str(STEPS)),
]
KILLED = -signal.SIGKILL


class Place:
    """A folder in which faults are tried, with the material they need and a server that runs commands."""

    def __init__(self, folder: Path, server: "subprocess.Popen[str] | None" = None) -> None:
        self.folder, self.random, self._count, self._server = folder, random.Random(0), 0, server
        self._references: dict[str, Reference] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SEDD_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}

    @cached_property
    def commands(self) -> Commands:
        commands = Commands(self._server or start_server(self.environment), self.new_folder("output"))
        assert commands("--version").returncode == 0  # the server is ready: times are those of commands alone
        return commands

    def close(self) -> None:
        """End the server, if it is its own, and remove everything."""
        if "commands" in vars(self) and self._server is None:
            server = self.commands.server
            assert server.stdin
            server.stdin.close()
            server.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def sedd(self, *words: object, before: str = "", signals: Signals = ()) -> Done:
        return self.commands(*words, before=before, signals=signals)

    def new_folder(self, name: str = "trial") -> Path:
        self._count += 1
        folder = self.folder / f"{name}-{self._count}"
        folder.mkdir()
        return folder

    # Material ----------------------------------------------------------------------------------------------

    @cached_property
    def corpus(self) -> Path:
        """About 120,000 characters of random words."""
        draw = random.Random(0)
        words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "small", "birds", "fly", "over", "houses"]
        path = self.folder / "words.txt"
        path.write_text("".join(" ".join(draw.choices(words, k=8)) + "\n" for _ in range(3500)))
        return path

    @cached_property
    def text(self) -> Path:
        """A text to evaluate."""
        path = self.folder / "text.txt"
        path.write_text("the cat sat on a mat and saw two small birds\n" * 30)
        return path

    @cached_property
    def source(self) -> Path:
        """A published checkpoint, pickled."""
        return publications.folder(self.folder / "published", publications.KINDS[0], "pickle")

    def train(self, out: Path, *more: object, before: str = "", signals: Signals = ()) -> Done:
        """Start a run in ``out``, or resume it if it has a checkpoint."""
        resume = ["--resume"] if checkpoint.list_checkpoints(out / checkpoint.CHECKPOINTS) else []
        return self.sedd("train", self.corpus, *TRAIN, *more, "--out", out, *resume, before=before, signals=signals)

    def reference(self, name: str, command: Callable[[Path], Done]) -> "Reference":
        """Return what a command leaves if nothing interrupts it; it is run once."""
        if name not in self._references:
            out, _ = self.new_folder("whole") / name, self.commands
            start = time.monotonic()
            done = command(out)
            assert done.returncode == 0, done.stderr
            self._references[name] = Reference(out, time.monotonic() - start)
        return self._references[name]

    @property
    def run(self) -> "Reference":
        """A run that nothing interrupted."""
        return self.reference("run", self.train)


class Reference(NamedTuple):
    """What an uninterrupted command wrote, and how long it took."""

    out: Path
    seconds: float


# What may not be lost --------------------------------------------------------------------------------------


def refusal(done: Done, codes: tuple[int, ...] = (1, 2)) -> Outcome:
    """Return what is wrong with a command that had to fail: it must end with a sentence, not a traceback."""
    if "Traceback" in done.stderr:
        return f"a traceback: {last_line(done)}"
    if done.returncode not in codes:
        return f"exit code {done.returncode}: {last_line(done)}"
    if done.returncode in (1, 2) and "sedd: " not in done.stderr:
        return f"no sentence: {last_line(done)}"
    return None


def success(done: Done) -> Outcome:
    """Return what is wrong with a command that had to succeed."""
    return None if done.returncode == 0 else f"exit code {done.returncode}: {last_line(done)}"


def last_line(done: Done) -> str:
    return (done.stderr.strip().splitlines() or ["(nothing)"])[-1][:200]


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file under a folder; nothing if it does not exist."""
    if folder.is_file():
        return {"": folder.read_bytes()}
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same_files(folder: Path, reference: Path) -> Outcome:
    """Compare every file, of which paths of the two folders themselves may differ."""
    ours, theirs = files(folder), files(reference)
    if ours.keys() != theirs.keys():
        return f"{folder.name}: {sorted(ours.keys() ^ theirs.keys())[:4]} are not in both"
    place = (str(folder).encode(), str(reference).encode())
    different = [name for name in ours if ours[name].replace(place[0], place[1]) != theirs[name]]
    return f"{different[0] or folder.name} differs" if different else None


def same_run(run: Path, reference: Path, log: bool = True) -> Outcome:
    """Compare the last checkpoint of two runs bit for bit, and what their logs say about each step."""
    name = checkpoint.step_name(STEPS)
    ours, theirs = (folder / checkpoint.CHECKPOINTS / name for folder in (run, reference))
    if not ours.is_dir():
        return f"there is no {name}"
    if reason := checkpoint.corruption(ours):
        return f"{name} is damaged: {reason}"
    for stem in ("model", "ema", "optimizer"):
        path = ours / f"{stem}.safetensors"
        if not path.is_file():
            return f"{name} has no {path.name}"
        one, two = load_file(path), load_file(theirs / path.name)
        if one.keys() != two.keys() or not all(torch.equal(one[key], two[key]) for key in one):
            return f"{path.name} differs from that of an uninterrupted run"
    if log and records(run) != records(reference):
        return "log.jsonl differs from that of an uninterrupted run"
    return None


def records(run: Path) -> list[dict[str, Any]]:
    """Return the log of a run without what depends on the machine."""
    from sedd.runtime.run_log import read_log

    timing = ("seconds", "eval_seconds", "save_seconds", "tokens_per_second")
    return [{key: value for key, value in record.items() if key not in timing} for record in read_log(run)]


def left_behind(folder: Path, *expected: Path) -> Outcome:
    """Return what an interrupted command left beside what it was to write."""
    more = sorted(path.name for path in folder.iterdir() if path not in expected)
    return f"{more[:3]} is left behind" if more else None
