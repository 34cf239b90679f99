"""Seconds, bytes, and the ceiling of this machine.

Rates are medians over repeated calls with random data. The share of the ceiling is useful arithmetic, by the formula
that is shown with it, over what the same machine reaches in one large matrix product in the same precision.
"""

import gc
import itertools
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from sedd.runtime import cuda_graphs


class Row(NamedTuple):
    """One way to do the work, measured."""

    way: str
    milliseconds: float | None
    """Of a step. None: it does not fit in memory, and the rest is None as well."""
    tokens_per_second: float | None
    peak_gib: float | None
    """On a CPU the most this process ever held, so far."""
    share_of_ceiling: float | None


class Machine(NamedTuple):
    """What was measured on, and how fast it multiplies."""

    device: str
    name: str
    torch: str
    commit: str
    precision: str
    ceiling_tflops: float


def machine(device: str, precision: str) -> Machine:
    """This machine, with its ceiling measured."""
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} cores"
    )
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return Machine(device, name, torch.__version__, commit or "unknown", precision, ceiling(device, precision) / 1e12)


class PositionEmbedding(NamedTuple):
    """A kind of device, and what is worth measuring on it."""

    device: str
    precision: str
    recipe: str
    batch: int
    rows: int
    width: int
    vocab_size: int


def place(device: str | None) -> PositionEmbedding:
    """An accelerator with the sizes of published models, or a CPU with ones that take seconds."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and torch.cuda.is_available():
        return PositionEmbedding("cuda", "bfloat16", "small", 64, 65_536, 768, 50_257)
    if device == "cpu":
        return PositionEmbedding("cpu", "float32", "tiny", 8, 1024, 128, 4096)
    raise ValueError(f"device is {device!r}; it must be cpu, or cuda where there is a GPU")


def ceiling(device: str, precision: str) -> float:
    """Floating-point operations a second of one large matrix product of random numbers."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype(precision)) for _ in "ab")
    return 2 * size**3 / clock(lambda: a @ b, device, repeats=20).median


def dtype(precision: str) -> torch.dtype:
    """The one of that name; for float8 the one around it, in which the ceiling is measured as well."""
    if precision not in ("float32", "bfloat16", "float8"):
        raise ValueError(f"precision is {precision!r}; choose one of float32, bfloat16, float8")
    return torch.float32 if precision == "float32" else torch.bfloat16


class Clocked(NamedTuple):
    """Seconds of repeated calls, and the most memory during them."""

    seconds: list[float]
    peak: int

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)


def clock(work: Callable[[], object], device: str, repeats: int, warmup: int = 3) -> Clocked:
    """Time ``work``, call by call, after ``warmup`` calls that do not count."""
    for _ in range(warmup):
        work()
    if device != "cuda":
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return Clocked(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:  # the host runs ahead, as it does in training
        work()
        mark.record()
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    return Clocked(seconds, cuda_graphs.peak_memory())


def row(
    way: str,
    work: Callable[[], object],
    on: Machine,
    repeats: int,
    tokens: int,
    flops: float,
    parts: int = 1,
    warmup: int = 3,
) -> Row:
    """``work`` measured; a call has so many tokens, so much arithmetic, and ``parts`` that the time is given for."""
    try:
        clocked = clock(work, on.device, repeats, warmup)
    except torch.OutOfMemoryError:
        return Row(way, None, None, None, None)
    share = flops / clocked.median / (on.ceiling_tflops * 1e12)
    return Row(way, clocked.median * 1e3 / parts, tokens / clocked.median, clocked.peak / 2**30, share)


def forget(device: str) -> None:
    """Give back the memory of what came before."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
