"""Time and memory of a loss or a training step on this machine, each beside its plain twin in the same run.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from sedd import build, ema, optim
from sedd.config import Run
from sedd.fused import Fused
from sedd.layers import Linear
from sedd.recipes import RECIPES
from sedd.schedule import stratified
from sedd.transformer import every_entry


class Row(NamedTuple):
    """One way to do the work, measured."""

    way: str
    milliseconds: float | None
    """None: it does not fit in memory, and the rest is None as well."""
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


class Place(NamedTuple):
    """A kind of device, and what is worth measuring on it."""

    device: str
    precision: str
    recipe: str
    batch: int
    rows: int
    width: int
    vocab_size: int


def place(device: str | None) -> Place:
    """An accelerator with the sizes of published models, or a CPU with ones that take seconds."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and torch.cuda.is_available():
        return Place("cuda", "bfloat16", "small", 64, 65_536, 768, 50_257)
    if device == "cpu":
        return Place("cpu", "float32", "tiny", 8, 1024, 128, 4096)
    raise ValueError(f"device is {device!r}; it must be cpu, or cuda where there is a GPU")


def ceiling(device: str, precision: str) -> float:
    """Floating-point operations a second of one large matrix product of random numbers."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=_dtype(precision)) for _ in "ab")
    return 2 * size**3 / clock(lambda: a @ b, device, repeats=20).median


def _dtype(precision: str) -> torch.dtype:
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision is {precision!r}; choose one of float32, bfloat16")
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
    return Clocked(seconds, torch.cuda.max_memory_allocated())


def _row(way: str, work: Callable[[], object], on: Machine, repeats: int, tokens: int, flops: float) -> Row:
    try:
        clocked = clock(work, on.device, repeats)
    except torch.OutOfMemoryError:
        return Row(way, None, None, None, None)
    share = flops / clocked.median / (on.ceiling_tflops * 1e12)
    return Row(way, clocked.median * 1e3, tokens / clocked.median, clocked.peak / 2**30, share)


def forget(device: str) -> None:
    """Give back the memory of what came before."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


# The loss alone --------------------------------------------------------------------------------------------

LOSS_FLOPS = "6 · rows that count · width · vocabulary"


@dataclass(frozen=True)
class LossSetting:
    """A head and a loss, forwards and backwards."""

    process: str = "absorbing"
    parameterization: str = "score"
    rows: int = 65_536
    masked: float = 0.5
    """The share of rows that noise has touched."""
    width: int = 768
    vocab_size: int = 50_257
    precision: str = "bfloat16"
    device: str = "cuda"
    repeats: int = 15

    def __post_init__(self) -> None:
        if not 0 < self.masked < 1:
            raise ValueError(f"masked is {self.masked}; it is a share and must lie between 0 and 1")


@final
class _Head(nn.Module):
    """A network that is nothing but a head over random states."""

    def __init__(self, s: LossSetting, states: int, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = Linear(s.width, states)
        self.linear.draw(generator)
        self.states = nn.Parameter(torch.randn(1, s.rows, s.width, generator=generator))
        self.halved = s.precision == "bfloat16"

    def forward(
        self,
        x: Tensor,
        sigma: Tensor,
        valid: Tensor | None = None,
        read: Callable[[Tensor, Linear], Any] = every_entry,
    ) -> Any:
        with torch.autocast(self.states.device.type, torch.bfloat16, enabled=self.halved):
            return read(self.states, self.linear)


def loss(s: LossSetting, on: Machine) -> Iterator[Row]:
    """Time of head and loss with all gradients, fused and plain."""
    generator = torch.Generator().manual_seed(0)
    process, schedule = build.process(s.process, s.vocab_size), build.schedule("log-linear")
    objective = build.objective("score-entropy", process, schedule)
    t = schedule.t(-torch.log1p(-torch.tensor([s.masked])))
    x_0 = torch.randint(s.vocab_size, (1, s.rows), generator=generator)
    x_t = objective.corrupt(x_0, t, generator)
    count = int(process.unknown(x_t).sum())
    head = _Head(s, process.num_states, generator).to(s.device)
    model = build.parameterization(s.parameterization, head, process)
    x_0, x_t, t = (a.to(s.device) for a in (x_0, x_t, t))
    weight, leaves, small = torch.ones_like(t), list(head.parameters()), Fused(objective, model)
    ways: dict[str, Callable[[], object]] = {
        "fused": lambda: torch.autograd.grad(small(x_t, x_0, t, weight, count=count).total, leaves),
        "plain": lambda: torch.autograd.grad(objective.loss(model, x_t, x_0, t).sum(), leaves),
    }
    flops = 6.0 * count * s.width * s.vocab_size
    for way, work in ways.items():
        forget(s.device)
        yield _row(way, work, on, s.repeats, s.rows, flops)


# A training step -------------------------------------------------------------------------------------------

TRAIN_FLOPS = "a token: 72 · depth · width² + 12 · depth · length · width + 6 · share that counts · width · vocabulary"


@dataclass(frozen=True)
class TrainSetting:
    """A training step: loss, gradients, clipping, AdamW, average."""

    recipe: str = "small"
    process: str = "absorbing"
    objective: str = "score-entropy"
    parameterization: str | None = None
    batch: int = 64
    length: int | None = None
    """That of the recipe, if None."""
    vocab_size: int = 50_257
    precision: str = "bfloat16"
    device: str = "cuda"
    compile: bool = True
    recompute: str = "nothing"
    repeats: int = 20

    def run(self) -> Run:
        """The configuration of such a run."""
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe is {self.recipe!r}; choose one of {', '.join(RECIPES)}")
        run = Run.from_dict(RECIPES[self.recipe] | {"objective": self.objective})
        run.noise.process, run.model.parameterization = self.process, self.parameterization
        run.model.length = self.length or run.model.length
        return run.resolved()


class Batch(NamedTuple):
    """What a step is given."""

    x_t: Tensor
    x_0: Tensor
    t: Tensor
    weight: Tensor


def train(s: TrainSetting, on: Machine) -> Iterator[Row]:
    """Time of a training step, fused and plain."""
    run = s.run()
    parts = build.parts(run, s.vocab_size)
    generator = torch.Generator().manual_seed(0)
    made = [batch(parts, s, run.model.length, generator) for _ in range(4)]
    counts = [int(parts.process.unknown(b.x_t).sum()) for b in made]
    batches = [Batch(*(a.to(s.device) for a in b)) for b in made]
    tokens = s.batch * run.model.length
    m, share = run.model, sum(counts) / len(counts) / tokens
    each = m.depth * (72.0 * m.width**2 + 12 * m.length * m.width) + 6 * share * m.width * s.vocab_size
    for way in ("fused", "plain"):
        forget(s.device)
        yield _row(way, Steps(run, parts, s, way == "fused", batches, counts), on, s.repeats, tokens, each * tokens)


def batch(parts: build.Parts, s: TrainSetting, length: int, generator: torch.Generator) -> Batch:
    """Random tokens, noised."""
    times = parts.objective.times(stratified(s.batch, generator))
    x_0 = torch.randint(s.vocab_size, (s.batch, length), generator=generator)
    return Batch(parts.objective.corrupt(x_0, times.t, generator), x_0, *times)


@final
class Steps:
    """A network in training; every call is a step on the next of a few batches."""

    def __init__(
        self, run: Run, parts: build.Parts, s: TrainSetting, small: bool, batches: list[Batch], counts: list[int]
    ) -> None:
        self.config, self.batches, self.counts, self.done = run, batches, counts, 0
        self.network, self.average = (build.run_network(run, parts).to(s.device) for _ in range(2))
        self.average.requires_grad_(False)
        self.optimizers = optim.make(self.network, run.optim)
        if s.precision == "bfloat16":
            half = torch.autocast(s.device, torch.bfloat16)
            self.network.forward = half(self.network.forward)  # type: ignore[method-assign]
        model = build.run_model(run, self.network, parts)
        if small:
            self.network.pass_through = build.recompute(s.recompute)
            if s.compile:
                self.network.compile_trunk()
            self.loss = self._fused(Fused(parts.objective, model))
        else:
            self.loss = self._plain(parts, model)

    def _fused(self, loss: Fused) -> Callable[[int], Tensor]:
        return lambda i: loss(*self.batches[i], count=self.counts[i]).total

    def _plain(self, parts: build.Parts, model: nn.Module) -> Callable[[int], Tensor]:
        def loss(i: int) -> Tensor:
            x_t, x_0, t, weight = self.batches[i]
            each = parts.objective.loss(model, x_t, x_0, t)
            return (weight.to(each.dtype)[:, None] * each).sum()

        return loss

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The loss in nats a token and the norm of the gradient, for which nobody has waited."""
        i = self.done % len(self.batches)
        loss = self.loss(i) / self.batches[i].x_0.numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optim.clip)
        optim.step(self.optimizers, norm.isfinite())
        ema.update(self.average, self.network, ema.decay_at(self.done, self.config.optim.ema))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.done += 1
        return loss.detach(), norm
