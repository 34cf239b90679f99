"""One step of uniform noise, and back in one step: how much of a sentence can be put right at once.

A reconstruction draws every position from p(x_0 at i | x_t), or takes the likeliest word there; positions know of each
other through x_t alone. How good it is needs no draws: every noisy sequence is enumerated.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from sedd import exact, factory, plot
from sedd.demos import sentences
from sedd.diffusion import categorical
from sedd.diffusion.parameterization import Denoiser, MeanModel
from sedd.diffusion.process import at_token

TOUCHED = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""Noise levels, as the share of words that are replaced by random ones: 1 − e^−σ."""
PROCESS = factory.build_process("uniform", len(sentences.WORDS))
WAYS = {  # of reconstructing: colour, line and marker
    "noisy input": (plot.GREY, "-", "."),
    "model, argmax": (plot.ORANGE, "-", "o"),
    "exact, argmax": (plot.ORANGE, ":", ""),
    "model, draw": (plot.BLUE, "-", "s"),
    "exact, draw": (plot.BLUE, ":", ""),
}
MEASURES = {
    "grammatical": "it is a sentence",
    "recovered": "it is the sentence that was noised",
    "distance": "distance of its law from the corpus",
}
"""What is asked of a reconstruction, and its name in words."""


class Share(NamedTuple):
    """How one way of reconstructing does at one noise level."""

    touched: float
    way: str
    grammatical: float
    """How often what is said is one of the six sentences."""
    recovered: float
    """How often it is the sentence that was noised."""
    distance: float
    """Total variation between the law of what is said and the corpus."""


class Example(NamedTuple):
    """A sentence, its noisy version, and what two ways make of it."""

    sentence: str
    noisy: str
    argmax: str
    draw: str


def network(seed: int) -> MeanModel:
    """A fresh denoiser."""
    return sentences.network(PROCESS, seed)


def learn(model: MeanModel, steps: int, seed: int) -> Iterator[float]:
    """Train it by score entropy; yields the loss of every step."""
    objective = factory.build_objective("score-entropy", PROCESS, factory.build_schedule("geometric"))
    return sentences.fit(model, objective, steps, torch.Generator().manual_seed(seed))


def exact_score() -> exact.Score:
    """The true posterior: of all one-step reconstructions by draws, the likeliest to be right word by word."""
    return exact.Score(sentences.law(), PROCESS)


@torch.no_grad()
def posterior(model: Denoiser, sigma: Float[Tensor, ""]) -> Float[Tensor, "x L n"]:
    """p(x_0 at i | x_t) for every sequence x_t."""
    x = exact.every(PROCESS.num_states, sentences.LENGTH)
    parts = [model.log_mean(part, sigma.expand(len(part))).exp().double() for part in x.split(256)]
    return torch.cat(parts)


def certain(table: Float[Tensor, "x L n"]) -> Float[Tensor, "x L n"]:
    """The likeliest word at every position, with probability 1."""
    return torch.nn.functional.one_hot(table.argmax(-1), table.shape[-1]).double()


def share(table: Float[Tensor, "x L n"], touched: float, way: str) -> Share:
    """What reconstructing by ``table`` leads to, summed over sentences and all that noise makes of them."""
    x, said, weight = exact.every(PROCESS.num_states, sentences.LENGTH), sentences.sentences(), sentences.shares()
    P = exact.transition_matrix(PROCESS, sigma_of(touched))
    joint = weight * P[x[:, None], said].prod(-1)  # p(x_t, x_0), x_0 a sentence
    tables = table[:, None].expand(-1, len(said), -1, -1)
    answer = at_token(tables, said.expand(len(x), -1, -1)).prod(-1)  # p(said | x_t)
    p = joint.sum(-1) @ answer
    return Share(
        touched=touched,
        way=way,
        grammatical=min(1.0, p.sum().item()),  # a sum of 4096 terms may round above it
        recovered=(joint * answer).sum().item(),
        distance=sentences.total_variation(p),
    )


def sigma_of(touched: float) -> Float[Tensor, ""]:
    """The noise that touches this share of words."""
    if not 0 < touched < 1:
        raise ValueError(f"noise is {touched}; it is the share of words touched, between 0 and 1")
    return -torch.log1p(torch.tensor(-touched, dtype=torch.float64))


def shares(model: Denoiser, levels: Sequence[float] = TOUCHED) -> Iterator[Share]:
    """Nothing done, the model, and the exact posterior, at every noise level: a row for each of `WAYS`."""
    nothing = torch.nn.functional.one_hot(exact.every(PROCESS.num_states, sentences.LENGTH)).double()
    for touched in levels:
        sigma = sigma_of(touched)
        yield share(nothing, touched, "noisy input")
        for name, denoiser in (("model", model), ("exact", exact_score())):
            table = posterior(denoiser, sigma)
            yield share(certain(table), touched, f"{name}, argmax")
            yield share(table, touched, f"{name}, draw")


@torch.no_grad()
def examples(model: Denoiser, touched: float, count: int, seed: int) -> list[Example]:
    """Some sentences of the corpus, noised and put right."""
    generator = torch.Generator().manual_seed(seed)
    x_0 = sentences.draw(count, generator)
    sigma = sigma_of(touched).expand(count)
    x_t = PROCESS.corrupt(x_0, sigma, generator)
    p = model.log_mean(x_t, sigma).exp()
    columns = (x_0, x_t, p.argmax(-1), categorical.draw(p, generator))
    return [Example(*map(sentences.say, row)) for row in zip(*columns, strict=True)]


@plot.Style()
def picture(found: Sequence[Share]) -> Figure:
    """Three panels against noise: grammatical, recovered, and how far the law is from the corpus."""
    figure = plot.figure(11.0, 4.2)
    panels = plot.axes(figure, 1, len(MEASURES), sharey=True)
    for ax, (what, title) in zip(panels, MEASURES.items(), strict=True):
        for way, (colour, line, marker) in WAYS.items():
            curve = [(row.touched, getattr(row, what)) for row in found if row.way == way]
            ax.plot(*zip(*curve, strict=True), color=colour, linestyle=line, marker=marker, label=way)
        ax.set(title=title, xlabel="share of words touched by noise", ylim=(-0.03, 1.03))
    panels[0].set_ylabel("probability")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(WAYS))
    return figure
