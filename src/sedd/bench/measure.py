"""Time, memory and arithmetic throughput of this machine."""

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


class Measurement(NamedTuple):
    """Time and memory of one variant."""

    variant: str
    milliseconds: float | None
    """Per step. None, like all other fields, if the variant does not fit in memory."""
    tokens_per_second: float | None
    peak_gib: float | None
    """Peak memory; on a CPU that of the whole process so far."""
    utilization: float | None


class Machine(NamedTuple):
    """The machine of a measurement, and the throughput of its matrix products."""

    device: str
    name: str
    torch: str
    commit: str
    precision: str
    matmul_tflops: float


def describe_machine(device: str, precision: str) -> Machine:
    """Describe this machine and measure its matrix-product throughput."""
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} cores"
    )
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return Machine(
        device, name, torch.__version__, commit or "unknown", precision, matmul_flops(device, precision) / 1e12
    )


class DeviceDefaults(NamedTuple):
    """Default sizes of the benchmarks on a kind of device."""

    device: str
    precision: str
    recipe: str
    batch: int
    rows: int
    width: int
    vocab_size: int


def device_defaults(device: str | None) -> DeviceDefaults:
    """Return the sizes of published models for a GPU, or sizes that take seconds for a CPU."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and torch.cuda.is_available():
        return DeviceDefaults("cuda", "bfloat16", "small", 64, 65_536, 768, 50_257)
    if device == "cpu":
        return DeviceDefaults("cpu", "float32", "tiny", 8, 1024, 128, 4096)
    raise ValueError(f"device is {device!r}; it must be cpu, or cuda if there is a GPU")


def matmul_flops(device: str, precision: str) -> float:
    """Measure the floating-point operations per second of one large matrix product of random numbers."""
    size, repeats = (8192, 20) if device == "cuda" else (512, 5)  # a CPU without bfloat16 takes 0.3 s for one of 512
    a, b = (torch.randn(size, size, device=device, dtype=torch_dtype(precision)) for _ in "ab")
    return 2 * size**3 / time_calls(lambda: a @ b, device, repeats).median


def torch_dtype(precision: str) -> torch.dtype:
    """Return the dtype of that name; for float8, bfloat16, in which the matrix product is measured as well."""
    if precision not in ("float32", "bfloat16", "float8"):
        raise ValueError(f"precision is {precision!r}; choose one of float32, bfloat16, float8")
    return torch.float32 if precision == "float32" else torch.bfloat16


class Timing(NamedTuple):
    """Seconds of each call, and the peak memory in bytes."""

    seconds: list[float]
    peak: int

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)


def time_calls(work: Callable[[], object], device: str, repeats: int, warmup: int = 3) -> Timing:
    """Time each call of ``work`` after ``warmup`` calls."""
    for _ in range(warmup):
        work()
    if device != "cuda":
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return Timing(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:  # kernels are queued asynchronously, as in training
        work()
        mark.record()
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    return Timing(seconds, cuda_graphs.peak_memory())


def time_variant(
    variant: str,
    work: Callable[[], object],
    machine: Machine,
    repeats: int,
    tokens: int,
    flops: float,
    parts: int = 1,
    warmup: int = 3,
) -> Measurement:
    """Measure ``work``.

    Args:
        variant: Name of the variant.
        work: The function to call.
        machine: The machine.
        repeats: Number of timed calls.
        tokens: Tokens per call.
        flops: Useful floating-point operations per call.
        parts: Steps per call; times are given per step.
        warmup: Calls before the timed ones.
    """
    try:
        timing = time_calls(work, machine.device, repeats, warmup)
    except torch.OutOfMemoryError:
        return Measurement(variant, None, None, None, None)
    utilization = flops / timing.median / (machine.matmul_tflops * 1e12)
    return Measurement(variant, timing.median * 1e3 / parts, tokens / timing.median, timing.peak / 2**30, utilization)


def free_memory(device: str) -> None:
    """Free the memory of earlier work."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
