"""Distributed training: this process among those that torchrun started, and reductions over all of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sedd.runtime.device import resolve_device

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of processes, and its device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def local_slice(self, batch_size: int, micro_batches: int = 1) -> slice:
        """Return the rows of a batch that this process computes.

        Args:
            batch_size: Rows of the batch over all processes.
            micro_batches: Into how many equal parts each process will split its rows.
        """
        if batch_size % (self.world_size * micro_batches):
            parts = f", each in {micro_batches} equal parts" if micro_batches > 1 else ""
            raise ValueError(
                f"a batch of {batch_size} cannot be shared by {self.world_size} processes{parts}; make it a multiple"
            )
        size = batch_size // self.world_size
        return slice(self.rank * size, (self.rank + 1) * size)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over all processes; of values on the CPU without waiting for a GPU."""
        if self.world_size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def once_per_node(self, function: Callable[[], T]) -> T:
        """Call ``function`` in one process of each node and return its result in all of them."""
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        results = [function()] if local_rank == 0 else []
        if self.world_size == 1:
            return results[0]
        gathered: list[list[T]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(gathered, results)
        return gathered[self.rank - local_rank][0]

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            dist.barrier()


_GROUPS: list[object] = []
"""References to gloo groups: destroying the last reference while holding the GIL deadlocks with gloo's threads."""


@contextmanager
def process_group(device_name: str | None = None) -> Iterator[Ranks]:
    """Join the processes that torchrun started, or run alone without it; the device is as for `resolve_device`."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = resolve_device(device_name)
    if device.type == "mps":
        raise ValueError("device is mps, which has no float64, and this needs it; choose cpu")
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Ranks(0, 1, device)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    _GROUPS.append(dist.group.WORLD)
    try:
        yield Ranks(rank, world_size, device)
        dist.barrier()  # no process may leave while another still communicates
    finally:
        dist.destroy_process_group()
