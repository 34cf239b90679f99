"""CUDA graphs: kernels are captured once per shape and launched together, in training and in inference.

At small batches launching the kernels of a transformer one by one takes longer than running them; a graph is one
launch. It has its own memory: inputs are copied there, and outputs are valid until the next replay.

Training does not use `torch.cuda.make_graphed_callables`: it captures in global mode, which fails while a prefetching
thread uses CUDA; it rejects autocast's cache and arguments that are None; and it returns static gradients that become
``weight.grad``, so that accumulating a second backward pass adds a buffer to itself.
"""

import functools
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.parameterization import Backbone
from sedd.tensors import PerSequence, Tokens

OptionalTensors = tuple[Tensor | None, ...]
MAX_GRAPHS = 4  # captures of a `GraphedFunction`; each holds the memory of a whole forward and backward pass
MAX_TOKENS = 2**17  # batches of more tokens than this run without a graph in inference: launches do not limit them


@dataclass
class CapturedGraphs:
    """The graphs of a forward and a backward pass, with their static inputs and outputs."""

    forward: Any
    inputs: OptionalTensors
    outputs: OptionalTensors
    backward: Any
    grad_outputs: OptionalTensors  # gradients of the outputs; None for outputs that have none
    grad_inputs: OptionalTensors  # gradients of the inputs, then of the weights
    replays: int = 0  # replays of either graph; each overwrites what the one before it wrote


@final
class GraphedFunction:
    """A function of tensors and of ``weights`` that runs as CUDA graphs, differentiable in both.

    The last `MAX_GRAPHS` combinations of shapes and precision stay captured, in the training mode of their first call.
    The backward pass must run once before the next forward pass, which overwrites gradients not stored as ``.grad``.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.weights = tuple(weights)
        self._graphs: dict[object, CapturedGraphs] = {}

    def __call__(self, function: Callable[..., OptionalTensors], *inputs: Tensor | None) -> tuple[Any, ...]:
        """Return ``function(*inputs)`` for tensors on a GPU; every call must pass the same function."""
        if not any(map(_requires_grad, (*inputs, *self.weights))):
            return function(*inputs)
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        shapes = (None if a is None else (a.shape, a.dtype, a.requires_grad) for a in inputs)
        key = autocast, *shapes, *((w.data_ptr(), w.dtype, w.requires_grad) for w in self.weights)
        if key not in self._graphs:
            if len(self._graphs) == MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]  # the oldest
            self._graphs[key] = _capture(function, inputs, self.weights)
        graphs = self._graphs[key]
        for weight, buffer in zip(self.weights, graphs.grad_inputs[len(inputs) :], strict=True):
            if weight.grad is not None and buffer is not None and weight.grad.data_ptr() == buffer.data_ptr():
                weight.grad = weight.grad.clone()  # accumulated: this backward pass will overwrite the buffer
        outputs: OptionalTensors = _Replay.apply(graphs, *inputs, *self.weights)  # type: ignore[no-untyped-call]
        return outputs

    def __getstate__(self) -> dict[str, object]:
        """Leave the graphs out of copies: they refer to the weights of this one."""
        return vars(self) | {"_graphs": {}}


def _capture(
    function: Callable[..., OptionalTensors], given: OptionalTensors, weights: tuple[Tensor, ...]
) -> CapturedGraphs:
    inputs = tuple(None if a is None else a.detach().clone().requires_grad_(a.requires_grad) for a in given)
    leaves = [a for a in (*inputs, *weights) if _requires_grad(a)]

    @torch.enable_grad()
    def run_forward() -> OptionalTensors:
        return function(*inputs)

    def run_backward(outputs: OptionalTensors, grad_outputs: OptionalTensors) -> OptionalTensors:
        differentiable = [a for a in outputs if _requires_grad(a)]
        with torch.autocast("cuda", enabled=False):  # autocast belongs to the forward pass
            grads = iter(torch.autograd.grad(differentiable, leaves, [g for g in grad_outputs if g is not None]))
        return tuple(next(grads) if _requires_grad(a) else None for a in (*inputs, *weights))

    device = next(a.device for a in inputs if a is not None)
    torch.ones((), device=device, requires_grad=True).exp().backward()  # starts autograd's thread outside the capture
    gc.collect()  # graphs of a deleted network must not be destroyed during the capture
    with capture_stream(device) as stream:
        with torch.cuda.stream(stream), torch.random.fork_rng([device]):
            outputs = run_forward()  # libraries initialize in their first calls, which cannot be captured
            grad_outputs = tuple(torch.zeros_like(a) if _requires_grad(a) else None for a in outputs)
            run_backward(outputs, grad_outputs)
        del outputs
        forward, backward, pool = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with torch.cuda.graph(forward, pool, stream, "thread_local"):  # another thread may be copying batches
            outputs = run_forward()
        with torch.cuda.graph(backward, pool, stream, "thread_local"):
            grad_inputs = run_backward(outputs, grad_outputs)
    outputs = tuple(None if a is None else a.detach() for a in outputs)
    gc.collect()  # frees the autograd graph, for which later passes would wait on the capture stream
    return CapturedGraphs(forward, inputs, outputs, backward, grad_outputs, grad_inputs)


def _requires_grad(a: Tensor | None) -> TypeGuard[Tensor]:
    return a is not None and a.requires_grad


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: CapturedGraphs, *given: Tensor | None) -> OptionalTensors:
        _copy(graphs.inputs, given)
        graphs.forward.replay()
        graphs.replays += 1
        torch.autograd.graph.increment_version([a for a in graphs.outputs if a is not None])
        ctx.graphs, ctx.replays = graphs, graphs.replays
        outputs = tuple(None if a is None else a.detach() for a in graphs.outputs)
        pairs = zip(outputs, graphs.grad_outputs, strict=True)
        ctx.mark_non_differentiable(*(a for a, g in pairs if a is not None and g is None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> OptionalTensors:
        graphs: CapturedGraphs = ctx.graphs
        if graphs.replays != ctx.replays:
            raise RuntimeError("backward must run once, before the next forward pass; otherwise disable CUDA graphs")
        _copy(graphs.grad_outputs, grads)
        graphs.backward.replay()
        graphs.replays += 1
        return None, *(None if a is None else a.detach() for a in graphs.grad_inputs)


def _copy(buffers: OptionalTensors, given: OptionalTensors) -> None:
    with torch.no_grad():
        for buffer, a in zip(buffers, given, strict=False):
            if buffer is not None and a is not None:
                buffer.copy_(a)


def batch_bucket(rows: int) -> int:
    """Return the least of 1, 2, 3, 4, 6, 8, 12, 16 … that is at least ``rows``: padded batches share a few graphs."""
    size = 1
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 and size > 1 else 1 << size.bit_length()
    return size


class _HiddenGraph(NamedTuple):
    """A captured forward pass with its static inputs and output."""

    graph: Any
    inputs: OptionalTensors
    hidden: Tensor


@final
class GraphedBackbone:
    """The two parts of a network in inference: hidden states by CUDA graphs, one per batch bucket, and the head.

    On a CPU, and for batches of more than `MAX_TOKENS` tokens, it calls the network directly.
    """

    def __init__(self, network: nn.Module) -> None:
        if not isinstance(network, Backbone):
            raise ValueError(f"{type(network).__name__} has no hidden states and head; CUDA graphs need both")
        self._network: Any = network
        self._padded_head = _pad_head(network.head) if hasattr(network.head, "weight") else None
        self._graphs: dict[tuple[int, int, bool, bool], _HiddenGraph] = {}

    def logits(self, hidden: Float[Tensor, "k h"]) -> Float[Tensor, "k m"]:
        """Return the head's output, followed by padding that has no meaning."""
        if self._padded_head is not None:
            return F.linear(hidden, *self._padded_head)
        logits: Tensor = self._network.head(hidden)
        return logits

    @torch.no_grad()
    def hidden(
        self, x: Tokens, sigma: PerSequence, valid: Tensor | None = None, label: Tensor | None = None
    ) -> Float[Tensor, "b L h"]:
        """Return the hidden states that the head reads."""
        inputs = x, sigma, valid, label
        rows, length = x.shape
        if not x.is_cuda or batch_bucket(rows) * length > MAX_TOKENS:
            return self._call(*inputs)
        key = batch_bucket(rows), length, valid is not None, label is not None
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key, x.device)
        captured = self._graphs[key]
        _copy(tuple(None if buffer is None else buffer[:rows] for buffer in captured.inputs), inputs)
        captured.graph.replay()
        return captured.hidden[:rows].clone()  # the next replay overwrites it

    def _capture(self, rows: int, length: int, padded: bool, labelled: bool, device: torch.device) -> _HiddenGraph:
        x = torch.zeros(rows, length, dtype=torch.long, device=device)
        valid = torch.ones_like(x, dtype=torch.bool) if padded else None
        inputs = x, torch.ones(rows, device=device), valid, x.new_zeros(rows) if labelled else None
        graph = torch.cuda.CUDAGraph()
        pool = next((g.graph.pool() for g in self._graphs.values()), None)  # shared: one graph runs at a time
        with capture_stream(device) as stream:
            with torch.cuda.stream(stream):  # libraries initialize in their first calls, which cannot be captured
                for _ in range(2):
                    self._call(*inputs)
            with torch.cuda.graph(graph, pool, stream, "thread_local"):  # another thread may be sampling
                hidden = self._call(*inputs)
        return _HiddenGraph(graph, inputs, hidden)

    def _call(self, x: Tensor, sigma: Tensor, valid: Tensor | None, label: Tensor | None) -> Tensor:
        hidden: Tensor = self._network.hidden(x, sigma, valid, **({} if label is None else {"label": label}))
        return hidden

    def __getstate__(self) -> dict[str, object]:
        """Leave the graphs out of copies: they refer to the weights of this one."""
        return vars(self) | {"_graphs": {}}


def _pad_head(head: Any) -> tuple[Tensor, Tensor | None]:
    """Pad weight and bias to a multiple of 128 rows: matrix products with 50,257 rows take several times longer."""
    missing = -len(head.weight) % 128
    weight = F.pad(head.weight.detach(), (0, 0, 0, missing))
    return weight, None if head.bias is None else F.pad(head.bias.detach(), (0, missing))


_LOCK = threading.Lock()


@contextmanager
def capture_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Enter the one stream for captures on this GPU (libraries allocate a workspace for each), a thread at a time."""
    with _LOCK, torch.cuda.device(device):
        stream = _capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        yield stream


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def peak_memory() -> int:
    """Return a GPU's peak memory in bytes: of tensors, and what pools of graphs captured before its last reset hold."""
    pools = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0)]
    reserved: int = sum(part["total_size"] - part["allocated_size"] for part in pools)
    return torch.cuda.max_memory_allocated() + reserved
