"""The command line: one function per command, registered with `root.app`.

Data goes to stdout, everything else to stderr; commands import torch only when they run.
"""

import errno
import os
import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

# imported to register their commands
from sedd.cli import audit, convert, data, evaluate, info, quality, runs, sample, serve, train  # noqa: F401
from sedd.cli.root import app as app
from sedd.terminal import warn

GPU_MEMORY = (
    "the GPU has too little memory. For training, accumulate gradients (--set train.grad_accumulation=4), use "
    "activation checkpointing (--set train.activation_checkpointing=selective) or turn CUDA graphs off (--set "
    "train.cuda_graphs=false); otherwise use a smaller --batch"
)
ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space, or write elsewhere"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "choose a place that you may read and write"),
    errno.EROFS: "choose a place that can be written to",
    errno.EMFILE: "allow more open files with ulimit -n",
    errno.ENFILE: "close some programs: the system has too many open files",
    errno.ENOMEM: "choose smaller numbers, or free some memory",
}
"""What to do, by the number of a system error."""


def main() -> None:
    """Run the command line; print errors as sentences: of the input with exit code 2, of the machine with 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # work that is done does not fail at a ± in ASCII
    try:
        app()
    except ValueError as error:
        warn(str(error))
        _exit(2)
    except (MemoryError, OSError, RuntimeError) as error:
        if (sentence := explain(error, sys.argv[1:])) is None:
            raise
        warn(sentence)
        _exit(1)
    except SystemExit as end:
        _exit(end.code)


def _exit(code: str | int | None) -> NoReturn:
    """Exit; one of several processes skips cleanup, in which threads left by gloo may abort it."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not isinstance(code, str):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    raise SystemExit(code) from None


def explain(error: BaseException, words: Sequence[str]) -> str | None:
    """Describe an error of the machine in a sentence; return None for any other, which is a mistake in the code.

    Where memory is short, the sentence names the largest number in the command line ``words``.
    """
    if isinstance(error, RuntimeError) and type(error).__name__ == "OutOfMemoryError":  # of torch
        return f"{GPU_MEMORY}. {'. '.join(str(error).split('. ')[:3])}"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate" in str(error):
        request = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ \w+)", str(error))
        amount = "" if request is None else f" for {request[2] or f'{int(request[1]):,} bytes'}"
        return f"there is not enough memory{amount}; {_advice(words)}"
    if isinstance(error, RecursionError):
        return "what was given is nested too deeply; use a simpler file or option"
    if isinstance(error, OSError):
        advice = ADVICE.get(error.errno or 0, "check that it exists and that you may read and write it")
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror or error}; {advice}"
    return None


def _advice(words: Sequence[str]) -> str:
    """Name the largest number of a command line, with its option."""
    numbers = [
        (int(found[2]), found[1] or f"{before} " * before.startswith("-"))
        for before, word in zip(("", *words), words, strict=False)
        if (found := re.fullmatch(r"(.*=)?(\d{1,4000})", word))
    ]
    if not numbers:
        return ADVICE[errno.ENOMEM]
    value, option = max(numbers)
    return f"the largest number that was given is {option}{value}: choose a smaller one, or free some memory"
