"""How fast the error of samplers falls with the number of steps, computed by enumeration with an exact score."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from sedd import exact, plot, samplers
from sedd.reverse import denoising_table
from sedd.training.config import PROCESSES, SCHEDULES

NOISES = ("absorbing", "uniform")
SAMPLERS: Mapping[str, type[samplers.GridSampler]] = {
    "Euler": samplers.Euler,
    "Tweedie": samplers.Tweedie,
    "theta": samplers.Theta,
}
"""Sampler classes by the name shown."""
DEPENDENCE = 0.25
"""How strongly tokens depend on each other: the standard deviation of the log-probabilities. At this value conditionals
change by less than a factor of two, as theta needs for its second order; at about 1 it has the first."""
FITTED_POINTS = 4
"""How many of the last points of a curve its slope is fitted to; the order is asymptotic in the number of steps."""
ROUNDING = 1e-11
"""An error below it is float64 rounding: for one token some samplers are exact."""


class SamplerError(NamedTuple):
    """The error of a sampler's distribution after a number of steps."""

    process: str
    sampler: str
    steps: int
    error: float
    """Total variation to the data distribution."""


def step_counts(max_steps: int) -> list[int]:
    """Return 1, 2, 4, … up to ``max_steps``."""
    return [2**k for k in range(max_steps.bit_length())]


def sampler_errors(
    vocab_size: int, length: int, schedule_name: str, max_steps: int, seed: int
) -> Iterator[SamplerError]:
    """Compute the error of every sampler under every process, from the true marginal at t = 1 on a uniform grid.

    A step is a matrix of all noisy sequences squared: three tokens go up to length 4.
    """
    p_data = _distribution(vocab_size, length, seed)
    for process_name in NOISES:
        for name in SAMPLERS:
            for steps in step_counts(max_steps):
                yield SamplerError(process_name, name, steps, _error(p_data, process_name, schedule_name, name, steps))


def _error(p_data: exact.Distribution, process_name: str, schedule_name: str, name: str, steps: int) -> float:
    process, schedule = (
        PROCESSES.build(process_name, p_data.vocab_size),
        SCHEDULES.build(schedule_name),
    )
    score, x = exact.Score(p_data, process, schedule), exact.all_sequences(process.num_states, p_data.length)
    sampler, blank = SAMPLERS[name](), torch.ones(p_data.length, dtype=torch.bool)
    times = samplers.uniform_grid(steps)
    p = p_data.at(process, schedule.sigma(times[0]))
    for t, s in list(pairwise(times.expand(len(x), -1).T))[:-1]:
        p = exact.step_distribution(sampler, score, p, blank, t, s)
    p = exact.propagate(p, denoising_table(score, process, x, schedule.sigma(times[-2]).expand(len(x))))
    return (p - p_data.at(process, torch.zeros_like(times[0]))).abs().sum().item() / 2


def _distribution(vocab_size: int, length: int, seed: int) -> exact.Distribution:
    normal = torch.randn((vocab_size,) * length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return exact.Distribution(torch.softmax(DEPENDENCE * normal.flatten(), 0).view(normal.shape))


def fitted_slope(curve: Sequence[SamplerError]) -> float | None:
    """Fit the power of the steps by which the error falls; None if only rounding error is left."""
    if min(row.error for row in curve[-FITTED_POINTS:]) < ROUNDING:
        return None
    last = np.log([(row.steps, row.error) for row in curve[-FITTED_POINTS:]])
    return float(-np.polyfit(last[:, 0], last[:, 1], 1)[0])


def group_curves(found: Sequence[SamplerError]) -> dict[tuple[str, str], list[SamplerError]]:
    """Group errors by process and sampler."""
    keys = dict.fromkeys((row.process, row.sampler) for row in found)
    return {key: [row for row in found if (row.process, row.sampler) == key] for key in keys}


def declared_order(process_name: str, name: str) -> float:
    """Return the order of convergence that a sampler declares; theta's holds under absorbing noise."""
    return 1.0 if name == "theta" and process_name != "absorbing" else SAMPLERS[name].order


@plot.Style()
def plot_samplers(found: Sequence[SamplerError]) -> Figure:
    """Draw a panel per process: error against steps on logarithmic axes."""
    styles = dict(
        zip(SAMPLERS, [(plot.ORANGE, "o", "-"), (plot.BLUE, "x", "--"), (plot.GREEN, "s", ":")], strict=False)
    )
    figure = plot.figure(9.5, 4.4)
    panels = dict(zip(NOISES, plot.axes(figure, 1, len(NOISES), sharey=True), strict=True))
    for (process, name), curve in group_curves(found).items():
        colour, marker, line = styles[name]
        rate = "exact" if (power := fitted_slope(curve)) is None else f"steps$^{{-{power:.2f}}}$"
        label = f"{name}: {rate} (order {declared_order(process, name):g})"
        steps, error = [row.steps for row in curve], [row.error for row in curve]
        panels[process].plot(steps, error, marker=marker, linestyle=line, color=colour, label=label)
    for process, ax in panels.items():
        ax.set(title=f"{process} noise", xlabel="steps", yscale="log")
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        ax.legend(loc="lower left")
    panels[next(iter(panels))].set_ylabel("total variation to the data distribution")
    return figure
