"""One-step denoising of sentences under uniform noise.

A reconstruction draws every position independently from p(x_0 at i | x_t), or takes its argmax. It is evaluated
exactly, by enumerating every noisy sequence.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from demos import sentences
from sedd import draws, exact, plot
from sedd.parameterization import MeanModel
from sedd.process import at_token
from sedd.training.config import OBJECTIVES, PROCESSES, SCHEDULES

NOISE_LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""Noise levels: the fraction of words that are replaced by random ones, 1 − e^−σ."""
PROCESS = PROCESSES.build("uniform", len(sentences.WORDS))
SCHEDULE = SCHEDULES.build("geometric")
OBJECTIVE = OBJECTIVES.build("score-entropy")
METHODS = {  # colour, line and marker
    "noisy input": (plot.GREY, "-", "."),
    "model, argmax": (plot.ORANGE, "-", "o"),
    "exact, argmax": (plot.ORANGE, ":", ""),
    "model, draw": (plot.BLUE, "-", "s"),
    "exact, draw": (plot.BLUE, ":", ""),
}
MEASURES = {
    "grammatical": "result is a sentence of the corpus",
    "recovered": "result is the original sentence",
    "total_variation": "total variation to the corpus",
}
"""Fields of a `Reconstruction`, and their titles in tables and figures."""


class Reconstruction(NamedTuple):
    """How well one method reconstructs sentences at one noise level."""

    noise_level: float
    method: str
    grammatical: float
    """Probability that the reconstruction is a sentence of the corpus."""
    recovered: float
    """Probability that it is the original sentence."""
    total_variation: float
    """Between the distribution of reconstructions and the corpus."""


class ReconstructionExample(NamedTuple):
    """A sentence, its noisy version, and two reconstructions."""

    sentence: str
    noisy: str
    argmax: str
    draw: str


def exact_score() -> exact.Score:
    """Return the exact score of the corpus, whose posterior p(x_0 at i | x_t) is exact too."""
    return exact.Score(sentences.corpus_distribution(), PROCESS)


@torch.no_grad()
def posterior(model: MeanModel, sigma: Float[Tensor, ""]) -> Float[Tensor, "x L n"]:
    """Return p(x_0 at i | x_t) for every sequence x_t."""
    x = exact.all_sequences(PROCESS.num_states, sentences.LENGTH)
    parts = [model.log_mean(part, sigma.expand(len(part))).exp().double() for part in x.split(256)]
    return torch.cat(parts)


def argmax_table(table: Float[Tensor, "x L n"]) -> Float[Tensor, "x L n"]:
    """Put probability 1 on the most probable word at every position."""
    return torch.nn.functional.one_hot(table.argmax(-1), table.shape[-1]).double()


def evaluate_reconstruction(table: Float[Tensor, "x L n"], noise_level: float, method: str) -> Reconstruction:
    """Evaluate reconstruction by ``table``, summed over all sentences and noisy sequences."""
    x, targets = exact.all_sequences(PROCESS.num_states, sentences.LENGTH), sentences.corpus_ids()
    P = exact.transition_matrix(PROCESS, sigma_at(noise_level))
    joint = sentences.corpus_frequencies() * P[x[:, None], targets].prod(-1)  # p(x_t, x_0), x_0 a sentence
    tables = table[:, None].expand(-1, len(targets), -1, -1)
    answer = at_token(tables, targets.expand(len(x), -1, -1)).prod(-1)  # p(reconstruction = target | x_t)
    p = joint.sum(-1) @ answer
    return Reconstruction(
        noise_level=noise_level,
        method=method,
        grammatical=min(1.0, p.sum().item()),  # a sum of 4096 terms may round above 1
        recovered=(joint * answer).sum().item(),
        total_variation=sentences.total_variation(p),
    )


def sigma_at(noise_level: float) -> Float[Tensor, ""]:
    """Return the total noise σ at which this fraction of words is replaced."""
    return -torch.log1p(torch.tensor(-noise_level, dtype=torch.float64))


def evaluate_reconstructions(model: MeanModel, levels: Sequence[float] = NOISE_LEVELS) -> Iterator[Reconstruction]:
    """Evaluate the noisy input, the model and the exact posterior: one row per noise level and method."""
    identity = torch.nn.functional.one_hot(exact.all_sequences(PROCESS.num_states, sentences.LENGTH)).double()
    for noise_level in levels:
        sigma = sigma_at(noise_level)
        yield evaluate_reconstruction(identity, noise_level, "noisy input")
        for name, denoiser in (("model", model), ("exact", exact_score())):
            table = posterior(denoiser, sigma)
            yield evaluate_reconstruction(argmax_table(table), noise_level, f"{name}, argmax")
            yield evaluate_reconstruction(table, noise_level, f"{name}, draw")


@torch.no_grad()
def reconstruct_examples(model: MeanModel, noise_level: float, count: int, seed: int) -> list[ReconstructionExample]:
    """Draw sentences of the corpus, add noise, and reconstruct them."""
    generator = torch.Generator().manual_seed(seed)
    x_0 = sentences.draw_sentences(count, generator)
    sigma = sigma_at(noise_level).expand(count)
    x_t = PROCESS.corrupt(x_0, sigma, generator)
    p = model.log_mean(x_t, sigma).exp()
    columns = (x_0, x_t, p.argmax(-1), draws.sample(p, generator))
    return [ReconstructionExample(*map(sentences.sentence_text, row)) for row in zip(*columns, strict=True)]


@plot.Style()
def plot_one_step(found: Sequence[Reconstruction]) -> Figure:
    """Draw three panels against the noise level, one for each of `MEASURES`."""
    figure = plot.figure(11.0, 4.2)
    panels = plot.axes(figure, 1, len(MEASURES), sharey=True)
    for ax, (field, title) in zip(panels, MEASURES.items(), strict=True):
        for method, (colour, line, marker) in METHODS.items():
            curve = [(row.noise_level, getattr(row, field)) for row in found if row.method == method]
            ax.plot(*zip(*curve, strict=True), color=colour, linestyle=line, marker=marker, label=method)
        ax.set(title=title, xlabel="fraction of words replaced by noise", ylim=(-0.03, 1.03))
    panels[0].set_ylabel("probability")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(METHODS))
    return figure
