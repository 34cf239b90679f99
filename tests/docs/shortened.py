"""Programs of the documentation with a smaller budget: ``python shortened.py PROGRAM WORD …`` runs what is typed there.

`SHORTER` is the one table of what is changed. A test puts one script per key of `PROGRAMS` first on the PATH; each
starts this file, so the shell itself reads pipes, quotes, variables and comments.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

TINY = [*("--steps", "3", "--batch-size", "4"), *("--set", "model.width=32", "--set", "model.depth=1")]
TINY += [*("--set", "model.heads=2", "--set", "train.grad_accumulation=1", "--set", "train.eval_sequences=8")]
RESUMED = [*TINY, "--steps", "5"]  # a run of `TINY` that goes on
SHORTER: dict[str, list[str]] = {  # appended to the words of a command: the last value of an option holds
    "train": TINY,
    "sample": ["--steps", "4"],
    "infill": ["--steps", "4"],
    "trace": ["--steps", "4"],
    "quality": ["--steps", "4", "-n", "4"],
    "eval": ["--draws", "2"],
    "score": ["--draws", "2"],
}
EXAMPLES = {f"examples/{name}.py": ["--steps", "20"] for name in ("dna", "molecules", "sudoku")}
UNLESS = {"quality": "--sweep", "eval": "--orders", "score": "--orders"}
"""Commands that keep their budget if they are given this option, which would contradict the shorter one."""
INSTEAD = {  # words at the beginning of a command, and what is run in their place
    ("eval", "run", "corpora"): ["eval", "long", "corpora"],  # the published protocols are for sequences of 1024 tokens
}
PROCESSES = ["--nproc-per-node", "2"]  # of torchrun, whatever the page has
PORT = "8321"


def shorten(words: list[str]) -> list[str]:
    """Return the words of a ``sedd`` command with a small budget."""
    for given, instead in INSTEAD.items():
        if tuple(words[: len(given)]) == given:
            words = [*instead, *words[len(given) :]]
    command = next((name for name in (" ".join(words[:2]), *words[:1]) if name in SHORTER), "")
    kept = UNLESS.get(command)
    if not command or "--help" in words or (kept and kept in words):
        return words
    if command == "train" and "--resume" in words:
        return [*words, *RESUMED]
    if command == "train":
        give_way(Path(value_of(words, "--out") or "run"))
    return [*words, *SHORTER[command]]


def value_of(words: list[str], option: str) -> str | None:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def give_way(folder: Path) -> None:
    """Remove a prepared run (see `prepared.py`), so that the page can train one of that name."""
    if (folder / "PREPARED").exists():
        shutil.rmtree(folder)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def with_server(words: list[str], use: Callable[[str], int]) -> int:
    """Start ``sedd serve``, wait for its ``/health``, call ``use`` with its port, and end it with SIGTERM."""
    port = free_port()
    process = subprocess.Popen([real("sedd"), *words, "--port", port])
    try:
        for _ in range(1200):
            if process.poll() is not None:
                return process.returncode or 1
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        code = use(port)
    finally:
        process.send_signal(signal.SIGTERM)
        ended = process.wait(60)
    return code or ended


def real(program: str) -> str:
    return os.path.join(os.environ["DOCUMENTED_BIN"], program)


def run_sedd(words: list[str]) -> int:
    if words[:1] == ["serve"] and "--help" not in words:
        return with_server(words, lambda _: 0)
    return subprocess.run([real("sedd"), *shorten(words)], check=False).returncode


def run_torchrun(words: list[str]) -> int:
    """Two processes of the same command."""
    start = words.index("-m")
    options = [re.sub(r"^--nproc[-_]per[-_]node=.*", "--nproc-per-node=2", word) for word in words[:start]]
    command = ["-m", words[start + 1], *shorten(words[start + 2 :])]
    return subprocess.run([real("torchrun"), *options, *PROCESSES, *command], check=False).returncode


def run_curl(words: list[str]) -> int:
    """Ask a server that is started for this one request."""
    curl = shutil.which("curl", path=os.environ["PATH_BEFORE"])
    if not curl:
        raise FileNotFoundError("curl is not installed; install it, the pages use it")

    def ask(port: str) -> int:
        given = [word.replace(f":{PORT}/", f":{port}/") for word in words]
        return subprocess.run([curl, "--fail-with-body", "--silent", "--show-error", *given], check=False).returncode

    return with_server(["serve", os.environ.get("DOCUMENTED_SERVED", "run")], ask)


def run_python(words: list[str]) -> int:
    """An example with fewer steps; anything else as it is."""
    more = EXAMPLES.get(words[0], []) if words else []
    return subprocess.run([real("python"), *words, *more], check=False).returncode


PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "sedd": run_sedd,
    "torchrun": run_torchrun,
    "curl": run_curl,
    "python": run_python,
}

if __name__ == "__main__":
    sys.exit(PROGRAMS[sys.argv[1]](sys.argv[2:]))
