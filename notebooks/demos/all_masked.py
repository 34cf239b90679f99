"""Sentences generated from masks alone, compared with the distribution of the corpus.

Sampled in many steps, they follow the corpus. Sampled in one step, the words are independent of each other. Taking the
argmax, as some demonstrations in circulation do, gives the same sentence every time.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from matplotlib.figure import Figure
from torch import Tensor

from demos import sentences
from sedd import plot
from sedd.parameterization import MeanModel
from sedd.samplers import SamplingSettings
from sedd.training.config import OBJECTIVES, PROCESSES, SCHEDULES

PROCESS = PROCESSES.build("absorbing", len(sentences.WORDS))
SCHEDULE = SCHEDULES.build("log-linear", eps=1e-6)
OBJECTIVE = OBJECTIVES.build("score-entropy")
METHODS = {  # colour and hatch
    "many steps": (plot.BLUE, ""),
    "one step": (plot.GREEN, "//"),
    "argmax": (plot.ORANGE, ".."),
}


class SentenceFrequencies(NamedTuple):
    """How often one method generated each sentence."""

    method: str
    draws: int
    frequencies: dict[str, float]
    """Relative frequency of each sentence of the corpus."""
    other: float
    """Relative frequency of all other sequences together."""
    total_variation: float
    """Total variation to the corpus."""
    chi_square: float
    """Pearson's statistic of the sentences against the corpus; its degrees of freedom are one fewer than sentences."""
    p_value: float
    """Probability of a statistic at least as large for draws from the corpus itself."""


def sample_sentences(model: MeanModel, steps: int, draws: int, seed: int) -> Iterator[SentenceFrequencies]:
    """Sample from all masks by each of `METHODS`."""
    methods = (
        SamplingSettings(steps=steps, seed=seed),
        SamplingSettings(steps=1, seed=seed),
        SamplingSettings(steps=steps, seed=seed, top_k=1),  # argmax
    )
    for method, settings in zip(METHODS, methods, strict=True):
        yield count_sentences(method, sentences.generate_sentences(model, draws, settings))


def count_sentences(method: str, x: Int[Tensor, "draws L"]) -> SentenceFrequencies:
    """Count the sentences among samples and test them against the corpus."""
    counts = (x[:, None] == sentences.corpus_ids()).all(-1).sum(0).double()
    expected = sentences.corpus_frequencies() * counts.sum()
    chi_square = ((counts - expected) ** 2 / expected.clamp_min(1e-300)).sum()  # no sentences: 0, not 0/0
    degrees = torch.tensor(len(counts) - 1, dtype=torch.float64)
    p = counts / len(x)
    return SentenceFrequencies(
        method=method,
        draws=len(x),
        frequencies=dict(zip(sentences.CORPUS, p.tolist(), strict=True)),
        other=1 - p.sum().item(),
        total_variation=sentences.total_variation(p),
        chi_square=chi_square.item(),
        p_value=torch.special.gammaincc(degrees / 2, chi_square / 2).item(),
    )


@plot.Style()
def plot_all_masked(found: Sequence[SentenceFrequencies]) -> Figure:
    """Draw a group of bars per sentence: the corpus and each of `METHODS`."""
    figure = plot.figure(10.0, 4.4)
    (ax,) = plot.axes(figure)
    names = [*sentences.CORPUS, "other sequences"]
    bars = {"corpus": [*sentences.corpus_frequencies().tolist(), 0.0]}
    bars |= {row.method: [*row.frequencies.values(), row.other] for row in found}
    width = 0.8 / len(bars)
    for i, (method, values) in enumerate(bars.items()):
        colour, hatch = METHODS.get(method, (plot.GREY, ""))
        positions = [k + (i - (len(bars) - 1) / 2) * width for k in range(len(names))]
        ax.bar(positions, values, width, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=method)
    ax.set_xticks(range(len(names)), names)
    top = 1.3 * max(bars["corpus"])
    for bar in (bar for group in ax.containers for bar in group if bar.get_height() > top):
        end = (bar.get_x() + width, top)
        ax.annotate(f"↑ {bar.get_height():.2f}", end, (4, -12), textcoords="offset points")
    ax.set(ylabel="relative frequency", ylim=(0, top))
    ax.grid(False, axis="x")
    figure.legend(loc="outside upper center", ncols=len(bars))
    return figure
