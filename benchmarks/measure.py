"""Time, memory and arithmetic throughput of this machine, and the options and tables of the benchmarks.

Times are medians over repeated calls with random data. Utilization is the useful arithmetic, by the formula shown with
the results, divided by the throughput of one large matrix product on the same machine in the same precision.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import platform
import resource
import statistics
import subprocess
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sedd.runtime import cuda_graphs
from sedd.training import recipes


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


def describe_machine(device: str | None = None, precision: str | None = None) -> Machine:
    """Describe this machine and measure its matrix-product throughput; by default of a GPU, in bfloat16, if any."""
    device = choose_device(device)
    precision = precision or ("bfloat16" if device == "cuda" else "float32")
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} cores"
    )
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return Machine(
        device, name, torch.__version__, commit or "unknown", precision, matmul_flops(device, precision) / 1e12
    )


def choose_device(device: str | None = None) -> str:
    """Return the device, by default cuda if there is a GPU."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" or (device == "cuda" and torch.cuda.is_available()):
        return device
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


HELP = {
    "recipe": f"network: {', '.join(recipes.RECIPES)}",
    "process": "noise process",
    "objective": "training objective; it decides the network",
    "parameterization": "network output: score or mean",
    "sampler": "sampler; by default one that fits the model",
    "steps": "sampling steps",
    "rows": "token positions",
    "masked": "fraction of positions changed by noise",
    "width": "width of the network",
    "batch": "sequences per step",
    "length": "tokens per sequence; by default the recipe's",
    "vocab_size": "vocabulary size",
    "precision": "float8 (training only), bfloat16 or float32",
    "compile": "use torch.compile",
    "cuda_graphs": "capture blocks in CUDA graphs, on a GPU",
    "activation_checkpointing": "none, selective or full",
    "sets": "set another configuration key, as in --set optim.name=muon; repeatable",
    "device": "cuda or cpu; by default cuda if there is a GPU",
    "repeats": "timed calls, of which the median is shown",
}
"""Descriptions of the fields of settings, which are the options of the scripts."""
FLAGS = {"vocab_size": "--vocab", "sets": "--set"}
"""Flags that differ from the name of the field."""


def build_parser(description: str | None, kind: Any, without: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """Return a parser with an option for every field of a setting, and ``--json``.

    A setting is a dataclass with the default values for a GPU; its ``CPU`` has those for a CPU.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(kind):
        if field.name in without:
            continue
        flag, help = FLAGS.get(field.name, f"--{field.name.replace('_', '-')}"), HELP[field.name]
        if field.name != "device" and not isinstance(field.default, (bool, tuple, type(None))):
            help += f" (default: {field.default}"
            help += f", on a CPU {kind.CPU[field.name]})" if field.name in kind.CPU else ")"
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": help}
        if field.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif isinstance(field.default, tuple):
            parser.add_argument(flag, action="append", **options)
        else:
            kinds = typing.get_args(field.type) or (field.type,)
            parser.add_argument(flag, type=kinds[0], metavar=kinds[0].__name__, **options)
    parser.add_argument("--json", action="store_true", help="print one JSON record")
    return parser


def read_setting(parser: argparse.ArgumentParser, args: argparse.Namespace, kind: Any) -> Any:
    """Return the setting with the options that were given and the defaults of the device for the others."""
    names = {field.name for field in dataclasses.fields(kind)}
    given: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in vars(args).items() if name in names
    }
    try:
        device = choose_device(given.get("device"))
        return kind(**{**(kind.CPU if device == "cpu" else {}), **given, "device": device})
    except ValueError as error:
        parser.error(str(error))


def print_measurements(
    setting: Mapping[str, object], machine: Machine, formula: str, rows: Iterator[Measurement], as_json: bool
) -> None:
    """Measure, and print a table or one JSON record."""
    measured = list(track(rows, "measuring", 2, console=Console(stderr=True), transient=True))
    if as_json:
        record = {"machine": machine._asdict(), "setting": setting, "flops": formula}
        print(json.dumps({**record, "rows": [row._asdict() for row in measured]}))
        return
    table = Table("variant", "ms", "tokens/s", "GiB", "utilization", "speedup", box=None, pad_edge=False)
    reference = measured[-1].milliseconds
    for row in measured:
        if row.milliseconds is None or row.tokens_per_second is None:
            table.add_row(row.variant, "out of memory")
            continue
        speedup = "" if reference is None else f"{reference / row.milliseconds:.2f}×"
        utilization = f"{row.utilization or 0:.1%}"
        times = f"{row.milliseconds:,.2f}", f"{row.tokens_per_second:,.0f}", f"{row.peak_gib or 0:.2f}"
        table.add_row(row.variant, *times, utilization, speedup)
    speed = f"matrix products {machine.matmul_tflops:.3g} TFLOP/s"
    print(f"{machine.name}, torch {machine.torch}, {machine.precision}, {speed}")
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setting.items()))
    print(f"FLOPs: {formula}")
    Console().print(table)
