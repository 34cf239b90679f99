"""Where the time of a training step goes on one GPU: throughput, attention, matrix products, and the step by kernel.

python benchmarks/anatomy.py                       everything, about five minutes
python benchmarks/anatomy.py attention products    some of it: attention, products, loss, variants, whole

Variants compile the blocks one by one (one graph for all of them), which takes seconds where the whole trunk takes a
minute; compare a variant with the baseline of the same list. `whole` is what training uses, with a profile.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from loss import LossSetting, measure_loss
from measure import describe_machine, free_memory, time_calls
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from train import NoisyBatch, TrainingSteps, TrainSetting, count_in_loss, random_batch

from sedd.ops import fused_loss, fused_loss_triton
from sedd.ops.fused_loss import EntropyTerms
from sedd.ops.fused_loss_triton import TRITON
from sedd.training.setup import build_setup

TOKENS, LENGTH, WIDTH, HEADS = 64 * 1024, 1024, 768, 12
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
START = time.perf_counter()


def log(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.perf_counter() - START:5.0f}] {text}", flush=True)


def seconds(work: Callable[[], object]) -> float:
    """Return the median of 15 calls."""
    return time_calls(work, "cuda", 15).median


def attention() -> None:
    """Time attention forward and backward, by every kernel and by the one that torch chooses."""
    shape = TOKENS // LENGTH, LENGTH, HEADS, WIDTH // HEADS
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    leaves = [a.requires_grad_() for a in (q, k, v)]
    flops = 4 * TOKENS * LENGTH * WIDTH
    for name in ("torch's choice", *BACKENDS):
        with contextlib.nullcontext() if name not in BACKENDS else sdpa_kernel(BACKENDS[name]):
            output = scaled_dot_product_attention(q, k, v)
            forward = seconds(lambda: scaled_dot_product_attention(q, k, v))
            both = seconds(lambda: torch.autograd.grad(scaled_dot_product_attention(q, k, v), leaves, grad))
        backward = both - forward
        rates = f"{flops / forward / 1e12:.0f} and {2.5 * flops / backward / 1e12:.0f} TFLOP/s"
        log(
            f"attention, {name}: {forward * 1e3:.3f} + {backward * 1e3:.3f} ms, {rates}, "
            f"{output.grad_fn.__class__.__name__}"
        )


def products() -> None:
    """Time the matrix products of a block: output, gradient of the input, gradient of the weights."""
    for inputs, outputs in ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)):
        x, w, y = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((TOKENS, inputs), (outputs, inputs), (TOKENS, outputs))
        )
        times = [seconds(work) for work in (lambda: x @ w.t(), lambda: y @ w, lambda: y.t() @ x)]  # noqa: B023
        rates = ", ".join(f"{s * 1e3:.3f} ms {2 * TOKENS * inputs * outputs / s / 1e12:.0f}" for s in times)
        log(f"products {inputs} → {outputs}: {rates} TFLOP/s")


def loss_kernels() -> None:
    """Time the two kernels of the linear loss with other launch sizes, and reading the logits once."""
    rows, states, width = 10_240, 50_257, 50_304
    z = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    bias, weight = torch.zeros(states, device="cuda"), torch.rand(rows, device="cuda")
    scale, data = torch.full_like(weight, -11.0), torch.randint(states, (rows,), device="cuda")
    terms = EntropyTerms(states, bias, scale, weight, data, weight)
    log(f"read once: {seconds(lambda: z.sum(dtype=torch.float32)) * 1e3:.3f} ms")
    for sizes in itertools.product((64, 128), (256, 512), (1, 2, 3, 4)):
        with set_to(fused_loss_triton.SIZES, False, sizes):
            elapsed = seconds(lambda: TRITON.entropy_and_grad_(z, terms))
        log(f"entropy and gradient, rows, columns and stages {sizes}: {elapsed * 1e3:.3f} ms")
    for sums in itertools.product((2, 4, 8), (512, 1024), (1, 3), (2, 4)):
        with contextlib.ExitStack() as stack:
            for name, value in zip(("SUM_ROWS", "SUM_COLUMNS", "SUM_STAGES", "SUM_WARPS"), sums, strict=True):
                stack.enter_context(set_to(vars(fused_loss_triton), name, value))
            elapsed = seconds(lambda: TRITON.logsumexp(z, states, bias))
        log(f"logsumexp, rows, columns, stages and warps {sums}: {elapsed * 1e3:.3f} ms")
    machine = describe_machine("cuda", "bfloat16")
    for power, kind in itertools.product((28, 29, 30), ("score", "mean")):
        with set_to(fused_loss.MAX_LOGITS, "cuda", 2**power):
            row = next(measure_loss(LossSetting(parameterization=kind), machine))
        times = f"{row.milliseconds:.2f} ms, {row.utilization:.1%}, {row.peak_gib:.2f} GiB"
        log(f"loss, {kind}, 2^{power} logits: {times}")


@contextlib.contextmanager
def set_to(mapping: dict[Any, Any], name: object, value: object) -> Iterator[None]:
    """Set an entry of a dictionary for the duration of the context."""
    before, mapping[name] = mapping[name], value
    try:
        yield
    finally:
        mapping[name] = before


@contextlib.contextmanager
def only_attention(backend: str) -> Iterator[None]:
    """Enable one attention kernel and no other."""
    names = ("flash", "mem_efficient", "math", "cudnn")
    before = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in names]
    for name in names:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == backend)
    try:
        yield
    finally:
        for name, was in zip(names, before, strict=True):
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(was)


def training(setting: TrainSetting, dropout: float | None = None, piecewise: bool = False) -> TrainingSteps:
    """Return a network in training on four random batches."""
    run = setting.run()
    run.model.dropout = run.model.dropout if dropout is None else dropout
    parts = build_setup(run, setting.vocab_size)
    generator = torch.Generator().manual_seed(0)
    cpu_batches = [random_batch(parts, setting, run.model.seq_len, generator) for _ in range(4)]
    counts = [count_in_loss(parts, b.x_t) for b in cpu_batches]
    steps = TrainingSteps(run, parts, setting, True, [NoisyBatch(*(a.cuda() for a in b)) for b in cpu_batches], counts)
    if piecewise:
        for part in (*steps.network.blocks, steps.network.output_layer):
            part.compile(fullgraph=True, dynamic=False)
    return steps


def measure(name: str, steps: TrainingSteps) -> None:
    """Log time and memory of a step, after a first one that compiles."""
    start = time.perf_counter()
    loss, norm = (a.item() for a in steps())
    first = time.perf_counter() - start
    timing = time_calls(steps, "cuda", 15)
    rate = steps.batches[0].x_0.numel() / timing.median
    log(
        f"{name}: {timing.median * 1e3:.2f} ms, {rate:,.0f} tok/s, {timing.peak / 2**30:.2f} GiB "
        f"(first {first:.0f} s, loss {loss:.4f}, norm {norm:.3f}, slowest {max(timing.seconds) * 1e3:.2f} ms)"
    )


def log_kernels(steps: TrainingSteps, count: int = 40) -> None:
    """Log the time of a step by kernel, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            steps()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    for event in itertools.islice(events, count):
        log(f"{event.self_device_time_total / 3e3:8.3f} ms {event.count / 3:6.1f} × {event.key[:100]}")
    log(f"{sum(e.self_device_time_total for e in events) / 3e3:8.3f} ms in all")


def free_all() -> None:
    """Free memory and compiled graphs."""
    torch._dynamo.reset()
    free_memory("cuda")


def variants() -> None:
    """Time a step with one thing changed, with compiled blocks."""
    base = TrainSetting(compile=False)
    checkpointed = TrainSetting(compile=False, activation_checkpointing="selective")
    steps = training(base, piecewise=True)
    measure("baseline", steps)
    log_kernels(steps)
    del steps
    cases: list[tuple[str, TrainSetting, float | None, contextlib.AbstractContextManager[None]]] = [
        ("selective checkpointing", checkpointed, None, contextlib.nullcontext()),
        ("no dropout", base, 0.0, contextlib.nullcontext()),
        ("flash attention only", base, None, only_attention("flash")),
        ("cudnn attention only", base, None, only_attention("cudnn")),
    ]
    for name, setting, dropout, context in cases:
        free_all()
        with context:
            steps = training(setting, dropout, piecewise=True)
            measure(name, steps)
            del steps


def whole() -> None:
    """Time and profile a step with the trunk compiled as one graph, as in training."""
    for checkpointing in ("selective", "none"):
        free_all()
        steps = training(TrainSetting(activation_checkpointing=checkpointing))
        measure(f"one graph, checkpointing {checkpointing}", steps)
        log_kernels(steps)
        del steps


PARTS: dict[str, Callable[[], None]] = {
    "attention": attention,
    "products": products,
    "loss": loss_kernels,
    "variants": variants,
    "whole": whole,
}

if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(PARTS):
        raise SystemExit(f"there is no {', '.join(sorted(unknown))}; choose among {', '.join(PARTS)}")
    for part in sys.argv[1:] or PARTS:
        try:
            PARTS[part]()
        except (RuntimeError, torch.OutOfMemoryError) as error:  # measure the rest all the same
            log(f"{part} failed: {str(error)[:500]}")
        free_all()
