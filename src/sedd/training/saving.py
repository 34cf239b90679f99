"""Saving in the background: a checkpoint is copied to the host at once, and written while training goes on."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

import torch
from torch import Tensor

from sedd.training.batches import use_one_core


@final
class BackgroundWriter:
    """Runs one write at a time, in a thread or at once; the error of a write is raised by the next call."""

    def __init__(self, in_background: bool) -> None:
        self._threads = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        if self._threads is not None:
            use_one_core(self._threads)
        self._pending: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Begin a write once the one before it has ended."""
        self.wait()
        if self._threads is None:
            write()
        else:
            self._pending = self._threads.submit(write)

    def check(self) -> None:
        """Raise the error of a write that has failed; do not wait for one that is not done."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until everything is written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def copy_to_host(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Copy tensors to the host, from a GPU through pinned memory, so that training may change them."""
    copies = {stem: {name: _start_copy(value) for name, value in values.items()} for stem, values in groups.items()}
    if any(value.is_cuda for values in groups.values() for value in values.values()):
        torch.cuda.current_stream().synchronize()
    return copies


def _start_copy(value: Tensor) -> Tensor:
    """Begin to copy a tensor; one on a GPU is there once its stream is synchronized."""
    value = value.detach()
    if not value.is_cuda:
        return value.clone(memory_format=torch.contiguous_format)
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
