"""Sentences out of nothing but masks: the law of what is said against the law of the corpus.

Drawn a little at a time they follow the corpus. Drawn all at once, each word is right and they do not go together.
Always taking the likeliest word, as demonstrations in circulation do, there is one sentence, said for ever.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from matplotlib.figure import Figure
from torch import Tensor

from sedd import factory, plot
from sedd.demos import sentences
from sedd.diffusion.parameterization import MeanModel
from sedd.generate import SamplingSettings

PROCESS = factory.build_process("absorbing", len(sentences.WORDS))
SCHEDULE = factory.build_schedule("log-linear", eps=1e-6)
WAYS = {  # of sampling: colour and hatch
    "many steps": (plot.BLUE, ""),
    "one step": (plot.GREEN, "//"),
    "argmax": (plot.ORANGE, ".."),
}


class Said(NamedTuple):
    """What one way of sampling said."""

    way: str
    draws: int
    shares: dict[str, float]
    """How often each sentence of the corpus."""
    astray: float
    """How often something else."""
    distance: float
    """Total variation between these shares and the corpus."""
    chi_square: float
    """Of the sentences said against the corpus, with one degree of freedom less than there are sentences."""
    p_value: float
    """How often draws from the corpus itself would be as far off, or farther."""


def network(seed: int) -> MeanModel:
    """A fresh denoiser."""
    return sentences.network(PROCESS, seed)


def learn(model: MeanModel, steps: int, seed: int) -> Iterator[float]:
    """Train it by score entropy; yields the loss of every step."""
    objective = factory.build_objective("score-entropy", PROCESS, SCHEDULE)
    return sentences.fit(model, objective, steps, torch.Generator().manual_seed(seed))


def refuse(steps: int, draws: int) -> None:
    """Refuse settings that show nothing."""
    if steps < 2:
        raise ValueError(f"sampling steps are {steps}; one step is shown anyway, so give 2 or more")
    if draws < 100:
        raise ValueError(f"draws is {draws}; the law of six sentences shows in 100 or more")


def said(model: MeanModel, steps: int, draws: int, seed: int) -> Iterator[Said]:
    """What each way of sampling says, from all masks."""
    refuse(steps, draws)
    ways = (
        SamplingSettings(steps=steps, seed=seed),
        SamplingSettings(steps=1, seed=seed),
        SamplingSettings(steps=steps, seed=seed, top_k=1),  # the likeliest word alone: the way that collapses
    )
    for way, settings in zip(WAYS, ways, strict=True):
        yield tally(way, sentences.sample(model, PROCESS, SCHEDULE, draws, settings))


def tally(way: str, x: Int[Tensor, "draws L"]) -> Said:
    """Count what was said, and weigh it against the corpus."""
    counts = (x[:, None] == sentences.sentences()).all(-1).sum(0).double()
    expected = sentences.shares() * counts.sum()
    chi_square = ((counts - expected) ** 2 / expected.clamp_min(1e-300)).sum()  # nothing said: 0 against 0
    freedom = torch.tensor(len(counts) - 1, dtype=torch.float64)
    p = counts / len(x)
    return Said(
        way=way,
        draws=len(x),
        shares=dict(zip(sentences.CORPUS, p.tolist(), strict=True)),
        astray=1 - p.sum().item(),
        distance=sentences.total_variation(p),
        chi_square=chi_square.item(),
        p_value=torch.special.gammaincc(freedom / 2, chi_square / 2).item(),
    )


@plot.Style()
def picture(found: Sequence[Said]) -> Figure:
    """A group of bars for every sentence: the corpus, and each way of sampling it."""
    figure = plot.figure(10.0, 4.4)
    (ax,) = plot.axes(figure)
    names = [*sentences.CORPUS, "anything else"]
    bars = {"corpus": [*sentences.shares().tolist(), 0.0]}
    bars |= {row.way: [*row.shares.values(), row.astray] for row in found}
    width = 0.8 / len(bars)
    for i, (way, values) in enumerate(bars.items()):
        colour, hatch = WAYS.get(way, (plot.GREY, ""))
        where = [k + (i - (len(bars) - 1) / 2) * width for k in range(len(names))]
        ax.bar(where, values, width, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=way)
    ax.set_xticks(range(len(names)), names)
    top = 1.3 * max(bars["corpus"])
    for bar in (bar for group in ax.containers for bar in group if bar.get_height() > top):
        end = (bar.get_x() + width, top)
        ax.annotate(f"↑ {bar.get_height():.2f}", end, (4, -12), textcoords="offset points")
    ax.set(ylabel="share of what is said", ylim=(0, top))
    ax.grid(False, axis="x")
    figure.legend(loc="outside upper center", ncols=len(bars))
    return figure
