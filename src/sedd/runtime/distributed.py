"""One process or many: who we are, and averages over all of us. torchrun sets the rest."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def share(self, count: int, parts: int = 1) -> slice:
        """This process's part of ``count`` rows, which it will cut into ``parts``."""
        if count % (self.world * parts):
            cut = f", each in {parts} equal parts" if parts > 1 else ""
            raise ValueError(f"a batch of {count} cannot be shared by {self.world} processes{cut}; make it a multiple")
        part = count // self.world
        return slice(self.rank * part, (self.rank + 1) * part)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether it is true of any process."""
        return bool(self.total(torch.tensor(float(flag), device=self.device)) > 0)

    def once_a_machine(self, make: Callable[[], T]) -> T:
        """What ``make`` gives; one process of each machine calls it, and the others wait for it."""
        local = int(os.environ.get("LOCAL_RANK", "0"))
        every = [make()] if local == 0 else []
        if self.world == 1:
            return every[0]
        gathered: list[list[T]] = [[] for _ in range(self.world)]
        dist.all_gather_object(gathered, every)
        return gathered[self.rank - local][0]

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            dist.barrier()


_KEPT: list[object] = []
"""Groups of gloo: whoever drops the last of one waits for its threads, and they for the interpreter's lock he holds."""


@contextmanager
def group() -> Iterator[Ranks]:
    """The processes that torchrun started, or this one alone."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world == 1:
        yield Ranks(0, 1, device)
        return
    dist.init_process_group("nccl" if cuda else "gloo")
    _KEPT.append(dist.group.WORLD)
    try:
        yield Ranks(rank, world, device)
        dist.barrier()  # nobody leaves while another still talks
    finally:
        dist.destroy_process_group()
