"""Three objectives learn a known matrix of ratios, from the same start with the same optimizer."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from sedd import exact, plot
from sedd.parameterization import ScoreModel
from sedd.training.config import OBJECTIVES, PROCESSES, SCHEDULES

COLOURS = {"score-entropy": plot.BLUE, "concrete-score": plot.GREEN, "softmax-linear": plot.ORANGE}
"""Score entropy, ℓ2 concrete score matching and softmax-linear, a formulation in circulation; with their colours."""
TIME = 0.05
"""The time at which ratios are learned: noise has changed a twentieth of the tokens, so they are nearly the data's."""


class RatioEstimate(NamedTuple):
    """The ratios that an objective has learned after a number of steps."""

    objective: str
    step: int
    loss: float
    error: float
    """Root mean square of log s − log ratio over all pairs of different states."""
    log_score: Float[Tensor, "n n"]


def true_log_ratios(states: int, seed: int) -> Float[Tensor, "n n"]:
    """Return log p(y)/p(x), row x and column y, of a random distribution of one token at noise σ(`TIME`)."""
    p_data, process = _distribution(states, seed), PROCESSES.build("uniform", states)
    sigma = SCHEDULES.build("log-linear").sigma(torch.tensor(TIME, dtype=torch.float64))
    log_ratio: Tensor = exact.Score(p_data, process)(p_data.sequences, sigma.expand(states))
    return log_ratio[:, 0]


def _distribution(states: int, seed: int) -> exact.Distribution:
    return exact.Distribution.random(states, 1, torch.Generator().manual_seed(seed))


def learn_ratios(states: int, steps: int, seed: int) -> Iterator[RatioEstimate]:
    """Learn a table of ratios, all 1 at first, with Adam; yields an estimate per objective and step.

    The loss is the objective's own in exact expectation over clean and noisy tokens. Nothing is sampled, so that the
    three differ by their objective alone.
    """
    p_data, process = _distribution(states, seed), PROCESSES.build("uniform", states)
    schedule = SCHEDULES.build("log-linear")
    truth, others = true_log_ratios(states, seed), ~torch.eye(states, dtype=torch.bool)
    t = torch.tensor(TIME, dtype=torch.float64)
    sigma = schedule.sigma(t)
    for name in COLOURS:
        objective = OBJECTIVES.build(name)
        model = ScoreModel(exact.Table(states, length=1), process, schedule)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(steps + 1):
            loss = exact.expected_loss(objective, model, p_data, t)
            log_score = _log_score_of(name, model(p_data.sequences, sigma.expand(states)).detach()[:, 0])
            error = (log_score - truth)[others].square().mean().sqrt()
            yield RatioEstimate(name, step, loss.item(), error.item(), log_score)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def _log_score_of(name: str, log_score: Tensor) -> Tensor:
    """Return the log-scores that an objective estimates; `softmax-linear` applies a softmax first."""
    return log_score.log_softmax(-1) if name == "softmax-linear" else log_score


def shown_steps(steps: int) -> list[int]:
    """Return the steps to show: the first, the last, and four between."""
    return sorted({round(steps * i / 5) for i in range(6)})


@plot.Style()
def plot_ratios(found: Sequence[RatioEstimate], truth: Float[Tensor, "n n"]) -> Figure:
    """Draw a row of matrices per objective, with the true one at its end; below, the error by step."""
    columns = shown_steps(max(row.step for row in found))
    figure = plot.figure(11.0, 7.2)
    above, below = figure.subfigures(2, 1, height_ratios=[1.9, 1.0])
    panels = plot.axes(above, len(COLOURS), len(columns) + 1)
    limit = float(truth.abs().max())
    for row, name in enumerate(COLOURS):
        shown = {estimate.step: estimate.log_score for estimate in found if estimate.objective == name}
        matrices = [*((f"step {step}", shown[step]) for step in columns), ("true ratios", truth)]
        for ax, (title, matrix) in zip(panels[row * len(matrices) :], matrices, strict=False):
            image = ax.imshow(matrix.numpy(), cmap="PuOr", vmin=-limit, vmax=limit)
            ax.set(xticks=[], yticks=[], title=title if row == 0 else None)
            ax.grid(False)
            ax.spines[:].set_visible(False)
        panels[row * len(matrices)].set_ylabel(name, color=COLOURS[name], fontweight="bold")
    bar = above.colorbar(image, ax=panels, shrink=0.7, extend="both", label="log s(x → y):  row x, column y")
    bar.outline.set_visible(False)
    (ax,) = plot.axes(below)
    for name, colour in COLOURS.items():
        curve = [(estimate.step, estimate.error) for estimate in found if estimate.objective == name]
        ax.plot(*zip(*curve, strict=True), color=colour)
        ax.annotate(name, curve[-1], (6, 0), textcoords="offset points", color=colour, va="center")
    ax.set(xlabel="step", ylabel="error of log s\n(root mean square)", yscale="log")
    ax.margins(x=0.01)
    return figure
