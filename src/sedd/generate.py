"""Sequences from a model: all at once from noise, or with some positions given."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sedd import categorical
from sedd.process import Process
from sedd.sampler import analytic_step, last_step
from sedd.schedule import Schedule


@torch.no_grad()
def trajectory(
    model: Any,
    process: Process,
    schedule: Schedule,
    fixed: Int[Tensor, "b L"],
    steps: int,
    generator: torch.Generator,
) -> Iterator[Int[Tensor, "b L"]]:
    """States from noise to data by the analytic step; −1 in ``fixed`` is a position to fill, the rest stays as given.

    Given positions are set before and after every step: exact under absorbing noise, an approximation under uniform.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; sampling needs at least 1")
    given = fixed >= 0
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64, device=fixed.device)
    sigma = schedule.sigma(times)
    x = torch.where(given, fixed, process.draw_prior(tuple(fixed.shape), sigma[0], generator))
    yield x
    rows = fixed.shape[0]
    for i in range(steps):
        # the last step goes to no noise at all, whatever the schedule leaves at t = 0
        if i == steps - 1:
            table = last_step(model, process, x, sigma[i].expand(rows))
        else:
            table = analytic_step(model, process, x, sigma[i].expand(rows), sigma[i + 1].expand(rows))
        x = torch.where(given, fixed, categorical.draw(table, generator))
        yield x


def sample(
    model: Any, process: Process, schedule: Schedule, count: int, length: int, steps: int, generator: torch.Generator
) -> Int[Tensor, "b L"]:
    """``count`` sequences of ``length`` tokens."""
    *_, last = trajectory(model, process, schedule, blank(count, length, generator.device), steps, generator)
    return last


def blank(count: int, length: int, device: torch.device) -> Int[Tensor, "b L"]:
    """Nothing given."""
    return torch.full((count, length), -1, device=device)


@torch.no_grad()
def continue_left_to_right(model: Any, count: int, length: int, generator: torch.Generator) -> Int[Tensor, "b L"]:
    """``count`` sequences of an autoregressive model, a token at a time."""
    x = torch.zeros(count, length, dtype=torch.long, device=generator.device)
    for i in range(length):
        x[:, i] = categorical.draw(model.log_next(x)[:, i].exp(), generator)
    return x
