"""Figures of the concept pages: objectives, samplers and verification, all by enumeration."""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from scipy.stats import chi2

from figures.canvas import LETTERS, WIDTH, WORDS, Picture, encode, language
from sedd import exact, objectives, plot, process, samplers, sampling_settings, schedule
from sedd.exact.objectives import ExplicitScoreEntropy

# Objectives ------------------------------------------------------------------------------------------------

SCALES = [round(0.2 * k, 1) for k in range(-6, 7)]
POWERS = [round(0.2 * k, 1) for k in range(16)]
D3PM_STEPS = 8


class Perturbed(torch.nn.Module):
    """A model that is wrong on purpose: p(x_0 | x_t) raised to a power and normalised, and ratios times e^shift."""

    def __init__(self, score: exact.Score, power: float = 1.0, shift: float = 0.0) -> None:
        super().__init__()
        self.score, self.power, self.shift = score, power, shift
        self.process, self.schedule = score.process, score.schedule

    def log_mean(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Return log p(x_0 | x_t), raised to the power; tokens that are there stay."""
        log_p = self.score.log_mean(x_t, sigma)
        return torch.where(log_p.isneginf(), log_p, self.power * log_p).log_softmax(-1)

    def forward(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Return the log-scores of that denoiser under absorbing noise, plus the shift."""
        masked = self.log_mean(x_t, sigma) - torch.log(torch.expm1(sigma))[..., None, None] + self.shift
        return torch.nn.functional.pad(masked, (0, 1))


def toy() -> tuple[exact.Distribution, process.Process, schedule.Schedule]:
    """Return a random distribution of three tokens at two positions, absorbing noise and a schedule."""
    p = exact.Distribution.random(3, 2, torch.Generator().manual_seed(0))
    return p, process.Absorbing(3), schedule.LogLinear(1e-5)


def integral(model: Perturbed, objective: objectives.Objective) -> float:
    """Return the expected value of an objective, integrated over time, in nats per sequence."""
    p, _, _ = toy()
    return round(float(exact.integrate(lambda t: exact.expected_loss(objective, model, p, t), nodes=6)), 5)


def any_order(model: Perturbed) -> float:
    """Return the mean over the number of masks and the positions that they may have."""
    (p, noise, _), losses = toy(), []
    for k in range(1, p.length + 1):
        t, sets = torch.full((len(p.sequences),), (k - 0.5) / p.length), list(combinations(range(p.length), k))
        for hidden in sets:
            x_t = p.sequences.index_fill(1, torch.tensor(hidden), noise.mask)
            loss = objectives.AnyOrder().loss(model, x_t, p.sequences, t.double()).sum(-1)
            losses.append(float((p.probabilities * loss).sum()) / len(sets))
    return round(sum(losses) / p.length, 5)


def score_losses(model: Perturbed) -> dict[str, float]:
    """Return the objectives that learn ratios."""
    return {
        "explicit-score-entropy": integral(model, ExplicitScoreEntropy(toy()[0])),
        "score-entropy": integral(model, objectives.DenoisingScoreEntropy()),
        "implicit-score-entropy": integral(model, objectives.ImplicitScoreEntropy()),
        "softmax-linear": integral(model, objectives.SoftmaxLinear()),
    }


def denoiser_losses(model: Perturbed) -> dict[str, float]:
    """Return the objectives that learn the clean token."""
    p, _, _ = toy()
    chain, ends = objectives.D3PM(steps=D3PM_STEPS), torch.arange(1, D3PM_STEPS + 1).double() / D3PM_STEPS
    return {
        "t-dce": integral(model, objectives.TimeDCE()),
        "lambda-dce": integral(model, objectives.LambdaDCE()),
        "any-order": any_order(model),
        "d3pm": round(sum(float(exact.expected_loss(chain, model, p, t)) for t in ends), 5),
        "mean": integral(model, objectives.MeanCrossEntropy()),
    }


@cache
def minima() -> dict[str, Any]:
    """Expected losses of models that are wrong: all ratios too large by a factor, and probabilities too sharp."""
    p, noise, times = toy()
    score = exact.Score(p, noise, times)
    powers = [Perturbed(score, power=power) for power in POWERS]
    return {
        "scales": [score_losses(Perturbed(score, shift=shift)) for shift in SCALES],
        "powers": [score_losses(model) | denoiser_losses(model) for model in powers],
        "entropy": round(float(p.entropy()), 5),
    }


@plot.Style()
def draw_minima() -> Figure:
    """Draw the three forms of score entropy, which differ by constants, and the minimum of every objective."""
    data = minima()
    figure = plot.figure(WIDTH, 3.9)
    scales, powers = plot.axes(figure, columns=2)
    styles = {
        "implicit-score-entropy": (plot.PURPLE, "-."),
        "score-entropy": (plot.GREEN, "--"),
        "explicit-score-entropy": (plot.BLUE, "-"),
    }
    for name, (colour, line) in styles.items():
        values = [row[name] for row in data["scales"]]
        scales.plot(np.exp(SCALES), values, color=colour, linestyle=line, label=name)
        scales.plot(1, values[SCALES.index(0)], "o", color=colour)
    scales.axhline(data["entropy"], color="black", linewidth=0.8, linestyle=":")
    scales.text(0.28, data["entropy"] - 0.08, "entropy of the data", fontsize=9, ha="left", va="top")
    scales.set(xscale="log", xlabel="all ratios wrong by the factor", ylabel="expected loss, nats per sequence")
    scales.set_xticks([0.3, 0.5, 1, 2, 3], ["0.3", "0.5", "1", "2", "3"])
    scales.set_xticks([], minor=True)
    scales.set_ylim(-0.3, 8.4)
    scales.legend(fontsize=9, loc="upper left")
    styles = {
        "t-dce": (plot.GREEN, "-", "score-entropy, t-dce,\nlambda-dce, any-order"),
        "mean": (plot.PURPLE, "--", "mean"),
        "d3pm": (plot.BLUE, "-.", f"d3pm, {D3PM_STEPS} steps"),
        "softmax-linear": (plot.ORANGE, ":", "softmax-linear"),
    }
    for name, (colour, line, label) in styles.items():
        values = np.array([row[name] for row in data["powers"]])
        powers.plot(POWERS, values - values[POWERS.index(1.0)], color=colour, linestyle=line, label=label)
    powers.axvline(1, color="black", linewidth=0.8, linestyle=":")
    powers.set(xlabel="clean-token probabilities to the power", ylabel="loss above that of the true model, nats")
    powers.legend(fontsize=9, loc="upper center")
    return figure


# Samplers --------------------------------------------------------------------------------------------------

STEPS = (1, 2, 3, 4, 8, 16, 32, 64)
SETTINGS: Mapping[str, tuple[Callable[[int], process.Process], schedule.Schedule]] = {
    "absorbing noise, log-linear schedule": (process.Absorbing, schedule.LogLinear()),
    "absorbing noise, geometric schedule": (process.Absorbing, schedule.Geometric()),
    "uniform noise, log-linear schedule": (process.Uniform, schedule.LogLinear()),
    "uniform noise, geometric schedule": (process.Uniform, schedule.Geometric()),
}
UNIFORM = ("tweedie", "euler", "ancestral", "theta", "gibbs")
ABSORBING = tuple(name for name in sampling_settings.SAMPLERS.built_in if name != "gibbs")  # which is for uniform noise
ZERO = 1e-9
"""An error below it is rounding."""


def weakly_dependent() -> exact.Distribution:
    """Return three tokens at three positions that depend on each other so weakly that theta has its second order."""
    logits = 0.25 * torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return exact.Distribution(logits.flatten().softmax(0).view(3, 3, 3))


@cache
def sampler_errors() -> dict[str, dict[str, list[float]]]:
    """Total variation between the samples of every sampler and the data, against steps, with the exact score."""
    p_data, free = weakly_dependent(), torch.full((3,), -1)
    found: dict[str, dict[str, list[float]]] = {}
    for title, (kind, times) in SETTINGS.items():
        noise = kind(3)
        score, target = exact.Score(p_data, noise, times), p_data.at(noise, torch.zeros((), dtype=torch.float64))
        for name in UNIFORM if isinstance(noise, process.Uniform) else ABSORBING:
            sampler = samplers.build_sampler(name, score)
            errors = []
            for steps in STEPS:
                q = exact.sample_distribution(sampler, score, free, steps)
                errors.append(float((q - target).abs().sum() / 2))
            found.setdefault(title, {})[name] = [0.0 if e < ZERO else float(f"{e:.4g}") for e in errors]
    return found


SAMPLER_STYLES = {
    "euler": (plot.ORANGE, "o", "-"),
    "tweedie": (plot.BLUE, "x", "-"),
    "ancestral": ("black", "+", ":"),
    "first-hitting": ("black", "1", ":"),
    "gibbs": (plot.PURPLE, "D", "-"),
    "theta": (plot.GREEN, "s", "-"),
    "remask": (plot.PURPLE, "v", "--"),
    "ordered": ("#56b4e9", "^", "--"),
    "confidence": ("#b8860b", "P", "-."),
    "entropy": (plot.GREY, "*", "-."),
}


@plot.Style()
def draw_sampler_errors() -> Figure:
    """One panel per process and schedule; on the lowest line the error is 0."""
    data, bottom = sampler_errors(), 1e-9
    figure = plot.figure(WIDTH, 6.4)
    panels = plot.axes(figure, rows=2, columns=2, sharey=True, sharex=True)
    for axes, (title, curves) in zip(panels, data.items(), strict=True):
        for name, errors in curves.items():
            colour, marker, line = SAMPLER_STYLES[name]
            shown = [max(error, bottom) for error in errors]
            axes.plot(STEPS, shown, color=colour, marker=marker, linestyle=line, label=name, linewidth=1.4)
        axes.set(yscale="log", ylim=(bottom / 2, 0.3))
        axes.set_title(title, fontsize=10)
        set_steps(axes)
    for axes in panels[2:]:
        axes.set_xlabel("steps")
    for axes in panels[::2]:
        axes.set_ylabel("total variation to the data")
        axes.set_yticks([bottom, *(10.0**k for k in range(-7, 0, 2))])
        axes.set_yticklabels(["exact", *(f"$10^{{{k}}}$" for k in range(-7, 0, 2))])
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=9)
    return figure


def set_steps(axes: Axes) -> None:
    """Show numbers of steps on a logarithmic axis."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(STEPS))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.set_xticks([], minor=True)


# Verification ----------------------------------------------------------------------------------------------

DRAWS, CHECKED_STEPS = 20_000, 4


@cache
def verification() -> dict[str, Any]:
    """Words drawn by a sampler and by a wrong one, beside the enumerated distribution, with the chi-square test."""
    p = exact.Distribution(0.999 * language().probabilities.view(6, 6, 6) + 0.001 / 216)
    noise, times = process.Absorbing(len(LETTERS)), schedule.LogLinear()
    score = exact.Score(p, noise)
    sampler, grid = samplers.Tweedie(), samplers.uniform_grid(CHECKED_STEPS)
    q = exact.sample_distribution(sampler, score, torch.full((3,), -1), grid)
    words = list(WORDS)
    index = [int(exact.index_of(encode(word), noise.num_states)) for word in words]
    probability = [*q[index].tolist(), float(1 - q[index].sum())]
    states = list(sampler.trajectory(score, DRAWS, 3, steps=grid))
    before = states[-2].x
    sigma = times.sigma(grid[-2]).expand(DRAWS)
    likeliest = torch.where(noise.is_noisy(before), score.log_mean(before, sigma).argmax(-1), before)
    found: dict[str, Any] = {"words": [*words, "other"], "probability": [round(v, 5) for v in probability]}
    for name, drawn in (("as written", states[-1].x), ("argmax in the last step", likeliest)):
        ids = exact.index_of(drawn, noise.num_states)
        counts = [int((ids == i).sum()) for i in index]
        counts.append(DRAWS - sum(counts))
        statistic = sum((n - DRAWS * v) ** 2 / (DRAWS * v) for n, v in zip(counts, probability, strict=True))
        found[name] = {"counts": counts, "chi_square": float(f"{statistic:.3g}")}
    return found


@plot.Style()
def draw_verification() -> Figure:
    """Bars: what enumeration gives, and what was drawn."""
    data = verification()
    figure = plot.figure(WIDTH, 4.4)
    x = np.arange(len(data["words"]))
    names = ("as written", "argmax in the last step")
    for axes, name in zip(plot.axes(figure, rows=2, sharex=True), names, strict=True):
        row = data[name]
        axes.bar(x - 0.2, data["probability"], 0.4, color=plot.GREY, label="enumerated distribution")
        share = np.array(row["counts"]) / DRAWS
        axes.bar(x + 0.2, share, 0.4, color=plot.BLUE if name == "as written" else plot.ORANGE, label="20,000 draws")
        p_value = chi2.sf(row["chi_square"], len(x) - 1)
        shown = f"p = {p_value:.2f}" if p_value > 1e-3 else "p < 0.001"
        axes.set_title(f"{name}: χ² = {row['chi_square']:,g} with {len(x) - 1} degrees of freedom, {shown}")
        axes.set_ylabel("probability")
        axes.grid(axis="x", visible=False)
        axes.legend(fontsize=9)
    axes.set_xticks(x, data["words"], family="monospace")
    return figure


PICTURES = {
    "objectives-minima": Picture(minima, draw_minima),
    "samplers-error": Picture(sampler_errors, draw_sampler_errors),
    "verification-draws": Picture(verification, draw_verification),
}
