"""Errors of the machine as sentences: too little memory, a full or read-only disk, too many open files."""

import errno
import re
from collections.abc import Sequence

GPU_MEMORY = (
    "the GPU has too little memory. For training, accumulate gradients (--set train.grad_accumulation=4), use "
    "activation checkpointing (--set train.activation_checkpointing=selective) or turn CUDA graphs off (--set "
    "train.cuda_graphs=false); otherwise use a smaller --batch"
)
ADVICE = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "free some space, or write elsewhere",
    errno.EFBIG: "free some space, or write elsewhere",
    errno.EROFS: "choose a place that can be written to",
    errno.EACCES: "choose a place that you may read and write",
    errno.EPERM: "choose a place that you may read and write",
    errno.EMFILE: "allow more open files with ulimit -n",
    errno.ENFILE: "close some programs: the system has too many open files",
    errno.ENOMEM: "choose smaller numbers, or free some memory",
}
"""What to do, by the number of a system error."""


def explain(error: BaseException, words: Sequence[str]) -> str | None:
    """Return the sentence for an error of the machine, or None for any other, which is a mistake in the code.

    Args:
        words: The command line, whose largest number is named where memory is short.
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
    options = ("", *words)
    numbers = [
        (int(found[2]), found[1] or f"{before} " * before.startswith("-"))
        for before, word in zip(options, words, strict=False)
        if (found := re.fullmatch(r"(.*=)?(\d{1,4000})", word))
    ]
    if not numbers:
        return "choose smaller numbers, or free some memory"
    value, option = max(numbers)
    return f"the largest number that was given is {option}{value}: choose a smaller one, or free some memory"
