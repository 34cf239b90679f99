"""Distributions and models that are small enough to enumerate, and every kind of noise."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from sedd import exact
from sedd.objectives import Objective
from sedd.parameterization import ConditionalModel, MeanModel, ScoreModel
from sedd.process import Absorbing, Frequency, Hybrid, Process, Uniform
from sedd.schedule import LogLinear, Schedule


def tensor(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def hybrid(vocab_size: int) -> Process:
    """Masks and random tokens."""
    return Hybrid(vocab_size, 0.6)


def frequency(vocab_size: int) -> Process:
    """Random tokens of different frequencies."""
    return Frequency(vocab_size, range(1, vocab_size + 1))


def masks_and_frequency(vocab_size: int) -> Process:
    """Masks, and random tokens of different frequencies."""
    return Process(vocab_size, mask_share=0.3, frequencies=range(vocab_size, 0, -1))


Kind = Callable[[int], Process]
KINDS: list[Kind] = [Uniform, Absorbing, hybrid, frequency, masks_and_frequency]
"""Every kind of noise, by the number of tokens."""


def random_distribution(vocab_size: int, length: int, seed: int) -> exact.Distribution:
    return exact.Distribution.random(vocab_size, length, torch.Generator().manual_seed(seed))


def random_model(
    wrapper: type, process: Process, length: int, seed: int = 1, schedule: Schedule = LogLinear()
) -> ScoreModel | MeanModel | ConditionalModel:
    """Return a wrong model: a table of random outputs."""
    table = exact.Table(process.num_states, length)
    with torch.no_grad():
        table.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return wrapper(Blind(table) if wrapper is ConditionalModel else table, process, schedule)


class Blind(torch.nn.Module):
    """A table whose output at position i is the same for every x_i: that of state 0 there."""

    def __init__(self, table: exact.Table) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        i = torch.arange(x.shape[-1])
        without = x[..., None, :].expand(*x.shape, -1).masked_fill(torch.eye(len(i), dtype=torch.bool), 0)  # *b, i, L
        return self.table(without, sigma)[..., i, i, :]


def expected_loss(
    objective: Objective, model: Any, distribution: exact.Distribution, schedule: Schedule, t: torch.Tensor
) -> torch.Tensor:
    """Return the expected loss of a model with this schedule at time t."""
    return exact.expected_loss(objective, with_schedule(model, schedule), distribution, t)


def with_schedule(model: Any, schedule: Schedule) -> Any:
    """Return the model with a different schedule."""
    model = copy.copy(model)
    model.schedule = schedule
    return model
