"""The training dataloader: sequences in a seeded order, with their times and noise.

A batch is a function of the seed and the step's number alone, so a resumed run trains on the same batches, and several
processes together train on those of a single one.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sedd import data
from sedd.runtime.distributed import Ranks
from sedd.schedule import stratified
from sedd.training.setup import DiffusionSetup

NOISE_STREAM, VALIDATION_STREAM, DROPOUT_STREAM, LABEL_STREAM = 1, 2, 3, 4
"""Numbers that make the random numbers of different uses independent; see `seeded_generator`."""


class Batch(NamedTuple):
    """Training sequences of one step and process, with their times and noise."""

    x_0: Tensor
    x_t: Tensor
    t: Tensor
    weight: Tensor  # importance weight of each sequence's time
    valid: Tensor  # false at padding
    label: Tensor  # label id of each sequence; the id after the last label means no label
    loss_count: Tensor  # positions of each sequence that count in the loss; on the CPU, so that nothing waits for a GPU
    tokens: Tensor  # tokens of the step over all processes, among which losses are averaged; on the CPU

    def micro_batches(self, count: int) -> list["Batch"]:
        """Split the sequences into ``count`` equal parts, for gradient accumulation."""
        columns = zip(*(column.chunk(count) for column in self[:-1]), strict=True)
        return [Batch._make((*part, self.tokens)) for part in columns]


def seeded_generator(*key: int) -> torch.Generator:
    """Return a CPU generator seeded by ``key``: the seed of the run, a step, one of the streams above."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) & (2**63 - 1))


@dataclass(frozen=True)
class TrainingDataLoader:
    """Dataloader of a run: ``loader[step]`` is a function of the seed and ``step``."""

    blocks: data.TokenBlocks
    setup: DiffusionSetup
    batch_size: int  # sequences per step, over all processes
    seed: int
    ranks: Ranks
    label_dropout: float = 0.0  # fraction of the sequences whose label is hidden

    def __getitem__(self, step: int) -> Batch:
        """Build the batch of all processes, which is cheap, and return this process's sequences."""
        ids = data.block_order(self.seed, step * self.batch_size, self.batch_size, len(self.blocks))
        tokens, mask = self.blocks.read(ids)
        x_0, valid = torch.from_numpy(tokens), torch.from_numpy(mask)
        generator = seeded_generator(self.seed, step, NOISE_STREAM)
        objective = self.setup.objective
        times = objective.times(stratified(self.batch_size, generator))
        x_t = torch.where(valid, objective.corrupt(self.setup, x_0, times.t, generator), x_0)
        counts = objective.counts(self.setup, x_t)
        loss_count = (valid if counts is None else counts & valid).sum(-1)
        label = torch.from_numpy(self.blocks.label_ids(ids))
        hidden = torch.rand(len(label), generator=seeded_generator(self.seed, step, LABEL_STREAM)) < self.label_dropout
        label = torch.where(hidden, len(self.blocks.labels), label)
        local, device = self.ranks.local_slice(self.batch_size), self.ranks.device
        columns = [column[local] for column in (x_0, x_t, *times, valid, label)]
        if device.type == "cuda":  # do not wait for the copies
            columns = [column.pin_memory().to(device, non_blocking=True) for column in columns]
        else:
            columns = [column.to(device) for column in columns]
        return Batch._make((*columns, loss_count[local], valid.sum()))

    def iterate(self, first_step: int) -> Iterator[Batch]:
        """Yield batches from ``first_step`` on without end; a thread builds the next one while this one is used."""
        with ThreadPoolExecutor(1) as pool:
            if self.ranks.device.type == "cuda":
                use_one_core(pool)
            prefetched = pool.submit(self.__getitem__, first_step)
            while True:
                batch, first_step = prefetched.result(), first_step + 1
                prefetched = pool.submit(self.__getitem__, first_step)
                yield batch


def use_one_core(pool: ThreadPoolExecutor) -> None:
    """Let the thread of a pool use one core: threads that wait for its next operation would take the main thread's."""
    threads = torch.get_num_threads()
    pool.submit(torch.set_num_threads, 1).result()
    pool.submit(torch.get_num_threads).result()  # makes it keep that
    torch.set_num_threads(threads)
