"""How fast each sampler's error falls with the number of steps, on an exact score: nothing is learnt or drawn."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from sedd import exact, factory, plot, registry
from sedd import sampling as sampler
from sedd.diffusion import check

SAMPLERS: Mapping[str, Callable[..., sampler.Stepper]] = {
    "Euler": sampler.Euler,
    "Tweedie": sampler.Tweedie,
    "theta": sampler.Theta,
}
"""Each is made of a model, a process and a schedule."""
DEPENDENCE = 0.25
"""How much tokens say of each other: the deviation of the logarithms of the law. Conditionals change by less than a
factor of two, as theta needs for its order; a law at random (about 1) leaves it the first."""
MOST_SEQUENCES = 300
"""How many noisy sequences `errors` enumerates: a step is a matrix of that size squared."""
FITTED = 4
"""How many of the last points of a curve its slope is fitted to: the order is a promise about many steps."""
ROUNDING = 1e-11
"""An error below it is of float64 and not of the sampler: one token is drawn exactly."""


class Error(NamedTuple):
    """How far a sampler's law is from the data's after so many steps."""

    process: str
    sampler: str
    steps: int
    error: float
    """Total variation: the largest difference in the probability of any event."""


def step_counts(most: int) -> list[int]:
    """1, 2, 4, … up to ``most``."""
    if most < 2 ** (FITTED - 1):
        raise ValueError(f"most is {most}; a slope is fitted to {FITTED} points, so give {2 ** (FITTED - 1)} or more")
    return [2**k for k in range(most.bit_length())]


def errors(vocab_size: int, length: int, schedule_name: str, most: int, seed: int) -> Iterator[Error]:
    """Every sampler under every process, from the true law at t = 1 by equal steps down to no noise."""
    check.vocabulary(vocab_size)
    if length < 1 or length * math.log(vocab_size + 1) > math.log(MOST_SEQUENCES):
        raise ValueError(
            f"{vocab_size} tokens at length {length} were asked for; the length must be 1 or more, and sequences of "
            f"tokens and masks at most {MOST_SEQUENCES} in number: 3 tokens go up to length 4"
        )
    law = _law(vocab_size, length, seed)
    for process_name in registry.PROCESSES.built_in:
        for name in SAMPLERS:
            for steps in step_counts(most):
                yield Error(process_name, name, steps, _error(law, process_name, schedule_name, name, steps))


def _error(law: exact.Distribution, process_name: str, schedule_name: str, name: str, steps: int) -> float:
    process, schedule = factory.build_process(process_name, law.vocab_size), factory.build_schedule(schedule_name)
    score, x = exact.Score(law, process), exact.every(process.num_states, law.length)
    chosen, blank = SAMPLERS[name](score, process, schedule), torch.ones(law.length, dtype=torch.bool)
    times = sampler.uniform_grid(steps)
    p = law.at(process, schedule.sigma(times[0]))
    for t, s in list(pairwise(times.expand(len(x), -1).T))[:-1]:
        p = chosen.after(p, blank, t, s)
    p = exact.propagate(p, sampler.last_step(score, process, x, schedule.sigma(times[-2]).expand(len(x))))
    return (p - law.at(process, torch.zeros_like(times[0]))).abs().sum().item() / 2


def _law(vocab_size: int, length: int, seed: int) -> exact.Distribution:
    normal = torch.randn((vocab_size,) * length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return exact.Distribution(torch.softmax(DEPENDENCE * normal.flatten(), 0).view(normal.shape))


def slope(curve: Sequence[Error]) -> float | None:
    """By which power of the steps the error falls, over the last points; None where all that is left is rounding."""
    if min(row.error for row in curve[-FITTED:]) < ROUNDING:
        return None
    last = np.log([(row.steps, row.error) for row in curve[-FITTED:]])
    return float(-np.polyfit(last[:, 0], last[:, 1], 1)[0])


def curves(found: Sequence[Error]) -> dict[tuple[str, str], list[Error]]:
    """The rows of each process and sampler."""
    keys = dict.fromkeys((row.process, row.sampler) for row in found)
    return {key: [row for row in found if (row.process, row.sampler) == key] for key in keys}


def order(process_name: str, name: str) -> float:
    """The order that a sampler declares."""
    process = factory.build_process(process_name, 2)
    score = exact.Score(exact.Distribution(torch.full((2,), 0.5)), process)
    return SAMPLERS[name](score, process, factory.build_schedule("log-linear")).order


@plot.Style()
def picture(found: Sequence[Error]) -> Figure:
    """A panel for each process: error against steps, both in logarithms, and what a power looks like."""
    looks = dict(zip(SAMPLERS, [(plot.ORANGE, "o", "-"), (plot.BLUE, "x", "--"), (plot.GREEN, "s", ":")], strict=False))
    figure = plot.figure(9.5, 4.4)
    panels = dict(
        zip(
            registry.PROCESSES.built_in,
            plot.axes(figure, 1, len(registry.PROCESSES.built_in), sharey=True),
            strict=True,
        )
    )
    for (process, name), curve in curves(found).items():
        colour, marker, line = looks[name]
        fall = "exact" if (power := slope(curve)) is None else f"steps$^{{-{power:.2f}}}$"
        label = f"{name}: {fall} (order {order(process, name):g})"
        steps, error = [row.steps for row in curve], [row.error for row in curve]
        panels[process].plot(steps, error, marker=marker, linestyle=line, color=colour, label=label)
    for process, ax in panels.items():
        ax.set(title=f"{process} noise", xlabel="steps", yscale="log")
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        ax.legend(loc="lower left")
    panels[next(iter(panels))].set_ylabel("total variation from the data's law")
    return figure
