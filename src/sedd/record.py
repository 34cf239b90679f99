"""A part of a network on a GPU without the host, there and back: launches are recorded once and replayed ever after.

The blocks of a transformer are some hundreds of launches each way. Where a batch is small or a host slow, to say them
one by one takes longer than to run them; a recording is one launch there and one back. It has memory of its own, where
every tensor keeps its place: what goes in is copied there, and what comes out lies there until the next replay.
"""

import functools
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard, final

import torch
from torch import Tensor

Some = tuple[Tensor | None, ...]


@dataclass
class Recording:
    """A graph each way, where they read and where they write."""

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
    """``function(*tensors)``, whose gradients in them and in ``weights`` are recorded as well; any tensor may be None.

    There is a recording for every shape and precision, in the mode of its first call. What goes forwards must have gone
    back, if it ever does, before the next goes forwards.
    """

    def __init__(self, function: Callable[..., Some], weights: Iterable[Tensor]) -> None:
        self.function, self.weights = function, tuple(weights)
        self._recordings: dict[object, Recording] = {}

    def __call__(self, *inputs: Tensor | None) -> tuple[Any, ...]:
        """What the function says."""
        shapes = (None if a is None else (a.shape, a.dtype, a.requires_grad) for a in inputs)
        half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        key = half, *shapes, *(w.data_ptr() for w in self.weights)  # whose weights have moved elsewhere is another
        if key not in self._recordings:
            self._recordings[key] = _record(self.function, inputs, self.weights)
        recording = self._recordings[key]
        for weight, place in zip(self.weights, recording.gradients[len(inputs) :], strict=True):
            if weight.grad is not None and place is not None and weight.grad.data_ptr() == place.data_ptr():
                weight.grad = weight.grad.clone()  # of the last pass, to which this one will be added
        said: Some = _Replay.apply(recording, *inputs, *self.weights)  # type: ignore[no-untyped-call]
        return said

    def __getstate__(self) -> dict[str, object]:
        """A copy makes recordings of its own."""
        return vars(self) | {"_recordings": {}}


def _record(function: Callable[..., Some], given: Some, weights: tuple[Tensor, ...]) -> Recording:
    inputs = tuple(None if a is None else a.detach().clone().requires_grad_(a.requires_grad) for a in given)
    learnt = [a for a in (*inputs, *weights) if _learns(a)]

    @torch.enable_grad()
    def there() -> Some:
        return function(*inputs)

    def back(outputs: Some, sent: Some) -> Some:
        ends, given = [a for a in outputs if _learns(a)], [a for a in sent if a is not None]
        with torch.autocast("cuda", enabled=False):  # of the way forwards alone
            found = iter(torch.autograd.grad(ends, learnt, given))
        return tuple(next(found) if _learns(a) else None for a in (*inputs, *weights))

    torch.ones((), device="cuda", requires_grad=True).exp().backward()  # the way back may begin with a library's call
    stream, pool = aside(), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.random.fork_rng([torch.cuda.current_device()]):
        outputs = there()  # libraries make their plans in the first calls, which cannot be recorded
        sent = tuple(torch.zeros_like(a) if _learns(a) else None for a in outputs)
        back(outputs, sent)
    del outputs
    forwards, backwards = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forwards, pool, stream, "thread_local"):  # other threads may be fetching batches
        outputs = there()
    with torch.cuda.graph(backwards, pool, stream, "thread_local"):
        gradients = back(outputs, sent)
    outputs = tuple(None if a is None else a.detach() for a in outputs)
    gc.collect()  # or what is left of its autograd graph would have later ones wait for a stream that is gone
    return Recording(forwards, inputs, outputs, backwards, sent, gradients)


def aside() -> torch.cuda.Stream:
    """Where recordings are made: one stream of a GPU for all of them, since libraries keep memory for each."""
    return _aside(torch.cuda.current_device())


@functools.cache
def _aside(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _learns(a: Tensor | None) -> TypeGuard[Tensor]:
    return a is not None and a.requires_grad


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, *given: Tensor | None) -> Some:
        _write(recording.inputs, given)
        recording.forwards.replay()
        recording.replays += 1
        torch.autograd.graph.increment_version([a for a in recording.outputs if a is not None])
        ctx.recording, ctx.replays = recording, recording.replays
        said = tuple(None if a is None else a.detach() for a in recording.outputs)
        pairs = zip(said, recording.sent, strict=True)
        ctx.mark_non_differentiable(*(a for a, g in pairs if a is not None and g is None))
        return said

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Some:
        recording: Recording = ctx.recording
        if recording.replays != ctx.replays:
            raise RuntimeError("a recording goes back once, and before another batch goes forwards; do not record this")
        _write(recording.sent, grads)
        recording.backwards.replay()
        recording.replays += 1
        return None, *(None if a is None else a.detach() for a in recording.gradients)


def _write(places: Some, given: Some) -> None:
    with torch.no_grad():
        for place, a in zip(places, given, strict=False):
            if place is not None and a is not None:
                place.copy_(a)


def peak() -> int:
    """The most memory on the GPU that tensors have held at once, and with it all that recordings keep for their own."""
    pools = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0)]
    kept: int = sum(part["total_size"] - part["allocated_size"] for part in pools)
    return torch.cuda.max_memory_allocated() + kept
