"""Which process this is among those that were started together, by torchrun or in a process group."""

import os
import sys
from typing import NamedTuple


class Launch(NamedTuple):
    """The rank of this process among ``world_size``."""

    rank: int
    world_size: int


def find_launch() -> Launch:
    """Return the rank in a process group that exists, else torchrun's, else rank 0 of 1."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return Launch(dist.get_rank(), dist.get_world_size())
    return Launch(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def is_restart() -> bool:
    """Return whether torchrun has restarted this process after one of its processes failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
