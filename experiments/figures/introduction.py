"""Figures of docs/pictures.md: a language of nine words, computed exactly."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from figures.canvas import (
    LETTERS,
    MASKED,
    PAPER,
    WIDTH,
    WORDS,
    Picture,
    blank_axes,
    draw_arrow,
    draw_cells,
    encode,
    language,
    spell,
)
from sedd import exact, plot, process, samplers, schedule

SENTENCE = "the cat sat on the mat"
ALPHABET = "abcdefghijklmnopqrstuvwxyz "
HITS = 40
"""The log-linear schedule hits a position 6.9 times on average; more than 40 times with a probability below 1e-17."""
LINES: list[dict[str, Any]] = [
    {"color": plot.BLUE},
    {"color": plot.ORANGE},
    {"color": plot.GREEN},
    {"color": plot.PURPLE},
    {"color": "#56b4e9", "linestyle": "--"},
    {"color": "#b8860b", "linestyle": "--"},
]
"""Styles of lines; the last two are dashed, since they lie on others in one figure."""
NOISY_TIME = 0.2
BRIDGES = ("cag", "aat")
"""Two texts that are not words, and are neighbours of words that have no others."""
PLACES = {
    "act": (0, 2),
    "aat": (1.5, 2),
    "oat": (3, 2),
    "cat": (3, 1),
    "cot": (4.5, 1),
    "dot": (6, 1),
    "dog": (7.5, 1),
    "tag": (0, 0),
    "cag": (1.5, 0),
    "cod": (4.5, 0),
    "god": (6, 0),
}
"""Where a word is drawn."""


@cache
def neighbours() -> dict[str, Any]:
    """A word, and the probability of every word that differs from it in one letter."""
    p, word = language(), "cot"
    ids = encode(word)
    rows = []
    for position in range(3):
        for letter in range(len(LETTERS)):
            other = ids.clone()
            other[position] = letter
            rows.append((position, LETTERS[letter], float(p.log_prob(other).exp() / p.log_prob(ids).exp())))
    return {"word": word, "ratios": rows}


@plot.Style()
def draw_neighbours() -> Figure:
    """One panel per position: how much likelier each replacement makes the word."""
    data = neighbours()
    figure = plot.figure(WIDTH, 2.5)
    for position, axes in enumerate(plot.axes(figure, columns=3, sharey=True)):
        rows = [(letter, ratio) for place, letter, ratio in data["ratios"] if place == position]
        word = data["word"]
        own = [letter == word[position] for letter, _ in rows]
        axes.bar(
            [letter for letter, _ in rows], [r for _, r in rows], color=[plot.GREY if o else plot.BLUE for o in own]
        )
        shown = word[:position] + "·" + word[position + 1 :]
        axes.set_title(shown, family="monospace")
        for x, (letter, ratio) in enumerate(rows):
            if ratio and letter != word[position]:
                axes.text(
                    x, ratio, shown.replace("·", letter), ha="center", va="bottom", family="monospace", fontsize=9
                )
        axes.grid(axis="x", visible=False)
    figure.axes[0].set(ylabel="p(neighbour) / p(cot)", ylim=(0, 2.6))
    return figure


@cache
def graph() -> dict[str, Any]:
    """The words that are neighbours of each other, and the ratios between them, without noise and with some."""
    p, noise = language(), process.Uniform(len(LETTERS))
    clean = {word: WORDS[word] / sum(WORDS.values()) for word in WORDS}
    sigma = schedule.LogLinear().sigma(torch.tensor(NOISY_TIME, dtype=torch.float64))
    noisy = p.at(noise, sigma).view((len(LETTERS),) * 3)
    nodes = {word: [clean.get(word, 0.0), round(float(noisy[tuple(encode(word))]), 5)] for word in (*WORDS, *BRIDGES)}
    pairs = [(a, b) for a in nodes for b in nodes if a < b and sum(x != y for x, y in zip(a, b, strict=True)) == 1]
    return {"nodes": nodes, "edges": pairs, "t": NOISY_TIME}


@plot.Style()
def draw_graph() -> Figure:
    """Words as nodes, neighbours joined; beside each edge how much likelier its one end is than its other."""
    data = graph()
    figure = plot.figure(WIDTH, 5.0)
    for column, axes in enumerate(plot.axes(figure, rows=2)):
        axes.set(xlim=(-0.4, 7.9), ylim=(-0.3, 2.3), aspect="equal")
        axes.axis("off")
        axes.set_title(f"uniform noise, t = {data['t']:g}" if column else "no noise")
        nodes = {word: pair[column] for word, pair in data["nodes"].items() if pair[column]}
        for one, other in (pair for pair in data["edges"] if set(pair) <= set(nodes)):
            low, high = sorted((one, other), key=lambda word: nodes[word])
            bridge = low in BRIDGES or high in BRIDGES
            colour, line = (plot.ORANGE, "--") if bridge else (plot.BLUE, "-")
            draw_arrow(axes, PLACES[low], PLACES[high], color=colour, linestyle=line, shrinkA=17, shrinkB=17)
            middle = np.mean([PLACES[low], PLACES[high]], 0)
            ratio = f"×{nodes[high] / nodes[low]:.3g}"
            style = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
            axes.text(*middle, ratio, fontsize=9, ha="center", va="center", color=colour, bbox=style)
        for word in nodes:
            face = "white" if word in BRIDGES else PAPER
            style = {"boxstyle": "round,pad=0.35", "facecolor": face, "edgecolor": MASKED, "linewidth": 0.8}
            axes.text(*PLACES[word], word, ha="center", va="center", family="monospace", bbox=style)
    return figure


def noise_paths(x_0: torch.Tensor, times: Sequence[float], seed: int) -> dict[str, list[torch.Tensor]]:
    """Return one path of each process at growing times; both have the same first hits.

    In units of total noise a position is hit at rate 1. Absorbing noise masks it at the first hit; uniform noise draws
    its letter anew at every hit.  [§2]
    """
    random, length, states = np.random.default_rng(seed), len(x_0), len(ALPHABET)
    first = -np.log1p(-random.random(length))
    later = random.exponential(size=(length, HITS - 1))
    hits = torch.from_numpy(np.cumsum(np.column_stack([first, later]), 1))
    letters = torch.cat([x_0[:, None], torch.from_numpy(random.integers(0, states, (length, HITS)))], 1)
    found: dict[str, list[torch.Tensor]] = {"absorbing": [], "uniform": []}
    for sigma in schedule.LogLinear().sigma(torch.tensor(times, dtype=torch.float64)):
        count = (hits < sigma).sum(1)
        found["absorbing"].append(torch.where(count > 0, states, x_0))
        found["uniform"].append(letters.gather(1, count[:, None]).squeeze(1))
    return found


@cache
def forward() -> dict[str, list[str]]:
    """A sentence at growing noise: one path of each process."""
    x_0 = torch.tensor([ALPHABET.index(letter) for letter in SENTENCE])
    paths = noise_paths(x_0, (0, 0.25, 0.5, 0.75, 1), seed=4)
    return {name: [spell(x_t, ALPHABET) for x_t in path] for name, path in paths.items()}


@plot.Style()
def draw_forward() -> Figure:
    """Rows of letters from data to noise, absorbing above and uniform below."""
    figure = plot.figure(WIDTH, 4.4)
    for axes, (name, rows) in zip(plot.axes(figure, rows=2), forward().items(), strict=True):
        blank_axes(axes, len(SENTENCE), len(rows))
        for y, text in enumerate(rows):
            draw_cells(axes, text, y, SENTENCE, 9)
            axes.text(-0.4, y + 0.5, f"t = {y / 4:g}", ha="right", va="center", fontsize=9)
        axes.set_title(f"{name} noise")
    return figure


@cache
def marginals() -> dict[str, Any]:
    """The distribution of the first letter at every time, under both processes."""
    t = torch.linspace(0, 1, 21, dtype=torch.float64)
    sigma = schedule.LogLinear().sigma(t)
    first = language().probabilities.view(6, 6, 6).sum((1, 2))
    found: dict[str, Any] = {"t": [round(time, 6) for time in t.tolist()]}
    for name, noise in (("absorbing", process.Absorbing(6)), ("uniform", process.Uniform(6))):
        p_t = noise.transition_matrix(sigma)[:, :, :6] @ first
        found[name] = [[round(float(v), 8) for v in row] for row in p_t.T]
    return found


@plot.Style()
def draw_marginals() -> Figure:
    """One line per state against time."""
    data = marginals()
    figure = plot.figure(WIDTH, 3.0)
    for axes, name in zip(plot.axes(figure, columns=2, sharey=True), ("absorbing", "uniform"), strict=True):
        for state, values in enumerate(data[name]):
            label = "mask" if state == len(LETTERS) else LETTERS[state]
            style = {"color": "black", "linewidth": 2.6} if label == "mask" else LINES[state]
            axes.plot(data["t"], values, label=label, **style)
        axes.set(xlabel="time t", title=f"{name} noise")
    figure.axes[0].set_ylabel("probability of the first letter")
    figure.axes[0].legend(fontsize=9, ncols=2)
    return figure


@cache
def schedules() -> dict[str, list[float]]:
    """The share of clean tokens at every time."""
    t = torch.linspace(0, 1, 41, dtype=torch.float64)
    kinds: Mapping[str, Callable[[], schedule.Schedule]] = {
        "log-linear": schedule.LogLinear,
        "cosine": schedule.Cosine,
        "polynomial, power 2": lambda: schedule.Polynomial(2),
        "geometric": schedule.Geometric,
    }
    return {name: [round(float(v), 6) for v in torch.exp(-kind().sigma(t))] for name, kind in kinds.items()}


@plot.Style()
def draw_schedules() -> Figure:
    """Survival against time."""
    figure = plot.figure(5.5, 3.0)
    (axes,) = plot.axes(figure)
    for (name, values), style in zip(schedules().items(), LINES, strict=False):
        axes.plot(np.linspace(0, 1, len(values)), values, label=name, **style)
    axes.set(xlabel="time t", ylabel="share of tokens left alone, exp(−σ)")
    axes.legend(fontsize=9)
    return figure


@cache
def losses() -> dict[str, Any]:
    """Score entropy and squared error of an estimate s of the ratio a = 0.2, and their slopes."""
    a = 0.2
    s = np.sort(np.concatenate([np.linspace(-0.6, 1.6, 221), np.geomspace(1e-3, 0.05, 20)]))
    positive = s > 9e-4
    entropy = np.where(positive, s - a * np.log(np.where(positive, s, 1)) + a * (np.log(a) - 1), np.nan)
    return {
        "a": a,
        "s": np.round(s, 4).tolist(),
        "score entropy": [None if np.isnan(v) else round(float(v), 6) for v in entropy],
        "squared error": np.round(0.5 * (s - a) ** 2, 6).tolist(),
        "slopes": {
            "score entropy": [round(float(1 - a / v), 6) if v > 9e-4 else None for v in s],
            "squared error": np.round(s - a, 6).tolist(),
        },
    }


@plot.Style()
def draw_losses() -> Figure:
    """Losses and slopes against s; the shaded part, s ≤ 0, holds no ratio of probabilities."""
    data = losses()
    figure = plot.figure(WIDTH, 3.0)
    loss, slope = plot.axes(figure, columns=2)
    for name, colour in (("score entropy", plot.BLUE), ("squared error", plot.ORANGE)):
        loss.plot(data["s"], [np.nan if v is None else v for v in data[name]], color=colour, label=name)
        values = data["slopes"][name]
        slope.plot(data["s"], [np.nan if v is None else v for v in values], color=colour, label=name)
    for axes in (loss, slope):
        axes.axvspan(-0.6, 0, color=plot.GREY, alpha=0.25, linewidth=0)
        axes.axvline(data["a"], color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel="estimate s of the ratio a = 0.2", xlim=(-0.6, 1.6))
    loss.set(ylabel="loss", ylim=(-0.04, 0.8))
    slope.set(ylabel="slope of the loss", ylim=(-3, 1.6))
    slope.axhline(0, color="black", linewidth=0.8)
    loss.text(-0.55, 0.74, "s ≤ 0 is\nnot a ratio", va="top", fontsize=9)
    loss.text(0.24, 0.68, "→ ∞ as s → 0", fontsize=9, color=plot.BLUE, va="center")
    slope.legend(fontsize=9, loc="lower right")
    return figure


@cache
def sampling_steps() -> dict[str, Any]:
    """The states of four words as they are generated from masks by the exact score."""
    score = exact.Score(language(), process.Absorbing(len(LETTERS)))
    states = samplers.Tweedie().trajectory(score, 4, 3, seed=1, steps=8)
    return {"states": [[spell(row) for row in state.x] for state in states]}


@plot.Style()
def draw_sampling_steps() -> Figure:
    """Panels are steps; letters that are new are coloured."""
    states = sampling_steps()["states"]
    figure = plot.figure(WIDTH, 3.4)
    panels = plot.axes(figure, rows=2, columns=5)
    for step, axes in enumerate(panels[: len(states)]):
        blank_axes(axes, 3, len(states[0]))
        for y, word in enumerate(states[step]):
            draw_cells(axes, word, y, states[step - 1][y] if step else None, 10)
        axes.set_title("masks, t = 1" if not step else f"t = {1 - step / 8:g}", fontsize=9)
    for axes in panels[len(states) :]:
        axes.axis("off")
    return figure


@cache
def infilling() -> dict[str, Any]:
    """All words that fit c_t, d_g and _o_: the conditional, and how often the sampler draws each."""
    score = exact.Score(language(), process.Absorbing(len(LETTERS)))
    found: dict[str, Any] = {}
    for number, pattern in enumerate(("c_t", "_o_")):
        fixed = torch.tensor([-1 if c == "_" else LETTERS.index(c) for c in pattern])
        conditional = language().given(fixed).probabilities.view(6, 6, 6)
        x = samplers.FirstHitting().sample(score, fixed.expand(4000, 3), seed=number, steps=None)
        words = [spell(row) for row in x]
        found[pattern] = {
            word: [round(float(conditional[tuple(LETTERS.index(c) for c in word)]), 6), words.count(word) / len(words)]
            for word in WORDS
            if all(p in ("_", c) for p, c in zip(pattern, word, strict=True))
        }
    return found


@plot.Style()
def draw_infilling() -> Figure:
    """Exact conditionals beside drawn frequencies."""
    figure = plot.figure(WIDTH, 2.8)
    for axes, (pattern, words) in zip(
        plot.axes(figure, columns=2, sharey=True, width_ratios=(2, 5)), infilling().items(), strict=True
    ):
        x = np.arange(len(words))
        axes.bar(x - 0.2, [p for p, _ in words.values()], 0.4, color=plot.GREY, label="exact conditional")
        axes.bar(x + 0.2, [f for _, f in words.values()], 0.4, color=plot.BLUE, label="4,000 infillings")
        axes.set_xticks(x, list(words), family="monospace")
        axes.set_title(pattern, family="monospace")
        axes.grid(axis="x", visible=False)
    figure.axes[0].set_ylabel("probability")
    figure.axes[1].legend(fontsize=9)
    return figure


class Flattened(torch.nn.Module):
    """A score that is wrong on purpose: the exact log-scores, times a number below 1."""

    def __init__(self, score: exact.Score, power: float) -> None:
        super().__init__()
        self.score, self.power = score, power

    def forward(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Return the log-scores of a denoiser whose probabilities are raised to a power and normalised."""
        log_p = (self.power * self.score.log_mean(x_t, sigma).clamp_min(-60)).log_softmax(-1)
        masked = log_p - torch.log(torch.expm1(sigma))[:, None, None]
        return torch.nn.functional.pad(masked, (0, 1))


@cache
def bounds() -> dict[str, float]:
    """The bound of the exact score, of two flattened ones and of a uniform guess; and the entropy."""
    p, noise, times = language(), process.Absorbing(len(LETTERS)), schedule.LogLinear(1e-5)
    score = exact.Score(p, noise)
    found = {"entropy": float(p.entropy())}
    for name, power in (
        ("exact score", 1.0),
        ("half as sharp", 0.5),
        ("a fifth as sharp", 0.2),
        ("uniform guess", 0.0),
    ):
        found[name] = float(exact.bound(Flattened(score, power), p, noise, times).total)
    return {name: round(value, 4) for name, value in found.items()}


@plot.Style()
def draw_bounds() -> Figure:
    """Bars: the entropy, and what is above it."""
    data = dict(bounds())
    entropy = data.pop("entropy")
    figure = plot.figure(6.5, 2.6)
    (axes,) = plot.axes(figure)
    names = list(data)[::-1]
    axes.barh(names, [entropy] * len(names), color=plot.GREY, label="entropy of the data")
    axes.barh(names, [data[n] - entropy for n in names], left=entropy, color=plot.ORANGE, label="what the model loses")
    for y, name in enumerate(names):
        axes.text(data[name] + 0.05, y, f"{data[name]:.2f}", va="center", fontsize=9)
    axes.set(xlabel="expected bound on −log p, nats per word", xlim=(0, 6.4))
    axes.grid(axis="y", visible=False)
    axes.legend(fontsize=9, loc="upper right")
    return figure


PICTURES = {
    "pictures-neighbours": Picture(neighbours, draw_neighbours),
    "pictures-graph": Picture(graph, draw_graph),
    "pictures-forward": Picture(forward, draw_forward),
    "pictures-marginals": Picture(marginals, draw_marginals),
    "pictures-schedules": Picture(schedules, draw_schedules),
    "pictures-losses": Picture(losses, draw_losses),
    "pictures-sampling": Picture(sampling_steps, draw_sampling_steps),
    "pictures-infilling": Picture(infilling, draw_infilling),
    "pictures-bounds": Picture(bounds, draw_bounds),
}
