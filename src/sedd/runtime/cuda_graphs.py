"""A part of a network in training without the host: its launches, there and back, are recorded once and replayed.

The blocks of a transformer are some hundreds of launches each way. Where a batch is small or a host slow, to say them
one by one takes longer than to run them; a recording is one launch there and one back. It has memory of its own, where
every tensor keeps its place: what goes in is copied there, and what comes out lies there until the next replay.
"""

import functools
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Some = tuple[Tensor | None, ...]
MOST = 4
"""Recordings; each keeps the memory of a whole pass."""


@dataclass
class Graphs:
    """One each way, where they read and where they write."""

    forwards: Any
    inputs: Some
    outputs: Some
    backwards: Any
    sent: Some
    """Gradients of the outputs that have one."""
    gradients: Some
    """Of inputs, then of weights."""
    replays: int = 0
    """Of either. Each writes over what the one before it left."""


@final
class Recorded:
    """Calls of functions of tensors and of ``weights``, replayed with their gradients in both.

    There are graphs for every shape and precision, the last few of them, in the mode of the first call. What goes
    forwards must have gone back, if it ever does, before the next goes forwards. Then its gradients are written over,
    but for those that lie at weights.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.weights = tuple(weights)
        self._graphs: dict[object, Graphs] = {}

    def __call__(self, function: Callable[..., Some], *inputs: Tensor | None) -> tuple[Any, ...]:
        """What the function, always the same, says of tensors on a GPU, any of which may be None."""
        if not any(map(_learns, (*inputs, *self.weights))):
            return function(*inputs)
        half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        shapes = (None if a is None else (a.shape, a.dtype, a.requires_grad) for a in inputs)
        key = half, *shapes, *((w.data_ptr(), w.dtype, w.requires_grad) for w in self.weights)
        if key not in self._graphs:
            if len(self._graphs) == MOST:
                del self._graphs[next(iter(self._graphs))]  # the oldest
            self._graphs[key] = _record(function, inputs, self.weights)
        graphs = self._graphs[key]
        for weight, place in zip(self.weights, graphs.gradients[len(inputs) :], strict=True):
            if weight.grad is not None and place is not None and weight.grad.data_ptr() == place.data_ptr():
                weight.grad = weight.grad.clone()  # of the last pass, to which this one will be added
        said: Some = _Replay.apply(graphs, *inputs, *self.weights)  # type: ignore[no-untyped-call]
        return said

    def __getstate__(self) -> dict[str, object]:
        """A copy makes graphs of its own."""
        return vars(self) | {"_graphs": {}}


def _record(function: Callable[..., Some], given: Some, weights: tuple[Tensor, ...]) -> Graphs:
    inputs = tuple(None if a is None else a.detach().clone().requires_grad_(a.requires_grad) for a in given)
    learnt = [a for a in (*inputs, *weights) if _learns(a)]

    @torch.enable_grad()
    def there() -> Some:
        return function(*inputs)

    def back(outputs: Some, sent: Some) -> Some:
        ends, starts = [a for a in outputs if _learns(a)], [a for a in sent if a is not None]
        with torch.autocast("cuda", enabled=False):  # of the way forwards alone
            found = iter(torch.autograd.grad(ends, learnt, starts))
        return tuple(next(found) if _learns(a) else None for a in (*inputs, *weights))

    device = next(a.device for a in inputs if a is not None)
    torch.ones((), device=device, requires_grad=True).exp().backward()  # the way back may begin with a library's call
    gc.collect()  # graphs of a network that is gone, which must not go while another is recorded
    with aside(device) as stream:
        with torch.cuda.stream(stream), torch.random.fork_rng([device]):
            outputs = there()  # libraries make their plans in the first calls, which cannot be recorded
            sent = tuple(torch.zeros_like(a) if _learns(a) else None for a in outputs)
            back(outputs, sent)
        del outputs
        forwards, backwards, pool = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with torch.cuda.graph(forwards, pool, stream, "thread_local"):  # other threads may be fetching batches
            outputs = there()
        with torch.cuda.graph(backwards, pool, stream, "thread_local"):
            gradients = back(outputs, sent)
    outputs = tuple(None if a is None else a.detach() for a in outputs)
    gc.collect()  # what is left of its autograd graph, or passes to come would have to wait for that stream
    return Graphs(forwards, inputs, outputs, backwards, sent, gradients)


_LOCK = threading.Lock()


@contextmanager
def aside(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Where one thread at a time records, after all that has been asked of this GPU.

    It is one stream for all recordings, since libraries keep memory for each.
    """
    with _LOCK, torch.cuda.device(device):
        stream = _aside(device)
        stream.wait_stream(torch.cuda.current_stream())
        yield stream


@functools.cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _learns(a: Tensor | None) -> TypeGuard[Tensor]:
    return a is not None and a.requires_grad


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: Graphs, *given: Tensor | None) -> Some:
        _write(graphs.inputs, given)
        graphs.forwards.replay()
        graphs.replays += 1
        torch.autograd.graph.increment_version([a for a in graphs.outputs if a is not None])
        ctx.graphs, ctx.replays = graphs, graphs.replays
        said = tuple(None if a is None else a.detach() for a in graphs.outputs)
        pairs = zip(said, graphs.sent, strict=True)
        ctx.mark_non_differentiable(*(a for a, g in pairs if a is not None and g is None))
        return said

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Some:
        graphs: Graphs = ctx.graphs
        if graphs.replays != ctx.replays:
            raise RuntimeError("a recording goes back once, and before another batch goes forwards; do not record this")
        _write(graphs.sent, grads)
        graphs.backwards.replay()
        graphs.replays += 1
        return None, *(None if a is None else a.detach() for a in graphs.gradients)


def _write(places: Some, given: Some) -> None:
    with torch.no_grad():
        for place, a in zip(places, given, strict=False):
            if place is not None and a is not None:
                place.copy_(a)


def peak() -> int:
    """The most memory of a GPU since its peak was reset: what tensors held at once, and what graphs keep for their own.

    Nothing may have been recorded since then, when what graphs keep was held by tensors.
    """
    pools = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0)]
    kept: int = sum(part["total_size"] - part["allocated_size"] for part in pools)
    return torch.cuda.max_memory_allocated() + kept
