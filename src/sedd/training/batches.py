"""What each step shows the model: rows in a known order, times, noise."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sedd import data
from sedd.config import RunConfig
from sedd.diffusion.objective import Objective
from sedd.diffusion.process import Process
from sedd.diffusion.schedule import stratified
from sedd.runtime.distributed import Ranks


class Batch(NamedTuple):
    """What one step shows the model; rows of this process only, losses count among all ``tokens`` of the step."""

    x_0: Tensor
    x_t: Tensor
    t: Tensor
    weight: Tensor
    valid: Tensor
    label: Tensor
    """A number for each row; the one after the last label is no label."""
    unknown: Tensor
    """How many positions of each row noise may have changed; on the CPU, or a device would have to be asked."""
    tokens: Tensor
    """How many, of all processes; on the CPU."""

    def parts(self, count: int) -> list["Batch"]:
        """The rows in ``count`` equal parts."""
        columns = zip(*(column.chunk(count) for column in self[:-1]), strict=True)
        return [Batch._make((*part, self.tokens)) for part in columns]


def seeded(*key: int) -> torch.Generator:
    """A generator that is a function of the key."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) & (2**63 - 1))


@dataclass(frozen=True)
class Batches:
    """The batches of a run: batch ``step`` is a function of the seed and its number."""

    blocks: data.TokenBlocks
    objective: Objective[Any]
    process: Process
    size: int
    """Rows, over all processes."""
    seed: int
    ranks: Ranks
    label_dropout: float = 0.0
    """The share of rows whose label is hidden."""

    def __getitem__(self, step: int) -> Batch:
        """Every process makes all of it, which is cheap, and keeps its rows."""
        ids = data.block_order(self.seed, step * self.size, self.size, len(self.blocks))
        x_0, valid = (torch.from_numpy(a) for a in self.blocks.read(ids))
        generator = seeded(self.seed, step, 1)
        times = self.objective.times(stratified(self.size, generator))
        x_t = torch.where(valid, self.objective.corrupt(x_0, times.t, generator), x_0)
        rows, unknown = self.ranks.local_slice(self.size), (self.process.unknown(x_t) & valid).sum(-1)
        columns = (x_0, x_t, *times, valid, self._labels(ids, step))
        mine = (_sent(a[rows], self.ranks.device) for a in columns)
        return Batch._make((*mine, unknown[rows], valid.sum()))

    def _labels(self, ids: np.ndarray, step: int) -> Tensor:
        """Some are hidden, drawn apart from all else: a run without labels is what it was."""
        label = torch.from_numpy(self.blocks.label_ids(ids))
        hidden = torch.rand(len(label), generator=seeded(self.seed, step, 4)) < self.label_dropout
        return torch.where(hidden, len(self.blocks.labels), label)

    def since(self, step: int) -> Iterator[Batch]:
        """From batch ``step`` on, without end; the next one is made while this one is used."""
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self.__getitem__, step)
            while True:
                batch, step = ahead.result(), step + 1
                ahead = pool.submit(self.__getitem__, step)
                yield batch


def _sent(a: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting until it is there."""
    return a.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else a.to(device)


def open_data(
    config: RunConfig, prepare: Callable[[], Path], ranks: Ranks
) -> tuple[data.TokenBlocks, data.TokenBlocks]:
    """Training and held-out rows; one process of each machine prepares and checks them, the others wait."""

    def blocks(folder: Path, split: str, check: bool = False) -> data.TokenBlocks:
        return data.TokenBlocks.open(folder, config.model.seq_len, split, config.data.val_fraction, check)

    folder = ranks.once_per_node(lambda: blocks(prepare(), "train", check=True).folder)
    return blocks(folder, "train"), blocks(folder, "validation")
