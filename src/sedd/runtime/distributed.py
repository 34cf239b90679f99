"""Distributed training: this process among those that were started together, and reductions over all of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sedd.runtime.device import resolve_device
from sedd.runtime.launch import find_launch

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of processes, and its device."""

    rank: int
    world_size: int
    device: torch.device
    cpu_group: dist.ProcessGroup | None = None  # the group that reduces tensors on the CPU; None: the default group

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.rank == 0

    def local_slice(self, batch_size: int, micro_batches: int = 1) -> slice:
        """Return the rows of a batch that this process computes, in ``micro_batches`` equal parts."""
        if batch_size % (self.world_size * micro_batches):
            shares = f"{self.world_size} processes" + f", each in {micro_batches} equal parts" * (micro_batches > 1)
            raise ValueError(f"a batch of {batch_size} cannot be shared by {shares}; make it a multiple")
        size = batch_size // self.world_size
        return slice(self.rank * size, (self.rank + 1) * size)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over all processes; of values on the CPU without waiting for a GPU."""
        if self.world_size > 1:
            values = values.clone()
            dist.all_reduce(values, group=self.cpu_group if values.device.type == "cpu" else None)
        return values

    def once_per_node(self, function: Callable[[], T]) -> T:
        """Call ``function`` in one process of each node and return its result in all of them."""
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        results = [function()] if local_rank == 0 else []
        if self.world_size == 1:
            return results[0]
        gathered: list[list[T]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(gathered, results, group=self.cpu_group)
        return gathered[self.rank - local_rank][0]

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            dist.barrier(group=self.cpu_group)


_GROUPS: list[object] = []
"""References to gloo groups: destroying the last reference while holding the GIL deadlocks with gloo's threads."""


@contextmanager
def process_group(device_name: str | None = None) -> Iterator[Ranks]:
    """Join the processes that were started together, or run alone; the device is as for `resolve_device`.

    A process group that exists, as in Ray Train, is used and left as it is; else one is made of the processes that
    torchrun started, and destroyed at the end.
    """
    rank, world_size = find_launch()
    exists = dist.is_available() and dist.is_initialized()
    device = resolve_device(device_name)
    if exists and "LOCAL_RANK" not in os.environ and device_name in (None, "cuda") and device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())  # the host program has chosen it
    if device.type == "mps":
        raise ValueError("device is mps, which has no float64, and this needs it; choose cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Ranks(0, 1, device)
        return
    try:
        if not exists:
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
            _GROUPS.append(dist.group.WORLD)
        try:
            ranks = Ranks(rank, world_size, device, _cpu_group(device))
            yield ranks
            ranks.barrier()  # no process may leave while another still communicates
        finally:
            if not exists:
                dist.destroy_process_group()
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in ("gloo", "NCCL")):
            raise
        reason = "another process of the run has ended, see its output"
        raise ValueError(f"process {rank} stops because {reason}; start the run again with --resume") from None


def _cpu_group(device: torch.device) -> dist.ProcessGroup | None:
    """Return a group for tensors on the CPU; None: the default group has a backend for them."""
    if "cpu:" in dist.get_backend_config():
        return None
    if device.type == "cpu":
        found = f"device is cpu, and the backend of the existing process group, {dist.get_backend()}, is for GPUs alone"
        raise ValueError(f"{found}; initialise it with gloo, or train on the GPUs")
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    _GROUPS.append(group)
    return group
