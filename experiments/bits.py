"""Bits per character of text8p beside published code: the table of the results page, its figure, and what differs."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from sedd import plot

Json = Mapping[str, Any]
HEADS = ("noise, seconds of training", "published code", "sedd", "characters", "network, blocks × width")


def table_rows(ours: Json, rivals: Json) -> list[list[str]]:
    """Return the rows of bits per character, with the rival's after as many seconds."""
    rows = []
    for name, run in ours["runs"].items():
        rival = rivals["text8p"]["runs"].get(name)
        beside = f"{rival['rival']}: ≤ {rival['bits_per_char']:.4f}" if rival else ""
        model, noise = run["config"]["model"], run["config"]["noise"]["process"]
        network = f"{model['depth']} × {model['width']}"
        characters = f"{run['training']['tokens'] / 1e6:,.0f}M"
        rows.append(
            [f"{noise}, {run['seconds']:,.0f} s", beside, describe_bits(run["evaluation"]), characters, network]
        )
    return rows


def describe_bits(evaluation: Json) -> str:
    """Return bits per character with their standard error, over the draws and the sequences of the test text."""
    error = evaluation["stderr_nats_per_token"] * evaluation["bits_per_char"] / evaluation["nats_per_token"]
    return f"{'' if evaluation['is_exact'] else '≤ '}{evaluation['bits_per_char']:.4f} ± {error:.4f}"


def note(ours: Json) -> str:
    """State how the bits were measured."""
    runs = ours["runs"].values()
    commits = " and ".join(dict.fromkeys(run["commit"] for run in runs))
    dates = " and ".join(dict.fromkeys(run["date"] for run in runs))
    return (
        f"Protocol `text8p`: trained on the first 64M characters of text8, strict bound on characters 69M to 74M in "
        f"sequences of 256. One {ours['machine']['name']}; `benchmarks/text8p.py` at {commits}, {dates}."
    )


def difference_lines(ours: Json, rivals: Json) -> list[str]:
    """State what differs besides the code, what the seconds contain, and what was not recorded."""
    runs, published = ours["runs"], rivals["text8p"]["runs"]
    recipes = {
        f"`{recipe_of(run)}`, {run['seconds']:,.0f} s": describe_training(run["config"]) for run in runs.values()
    }
    beside = [
        f"{name} {run['training']['eval_seconds'] + run['training']['save_seconds']:.0f} s"
        for name, run in runs.items()
    ]
    wall = [f"{run['wall_seconds']:,.0f}" for run in runs.values()]
    characters = [f"{run['characters'] / 1e6:.1f}M" for run in published.values()]
    seeds = ", ".join(sorted({str(run["config"]["seed"]) for run in runs.values()}))
    return [
        "Not only the code differs. The published runs are score entropy with AdamW; ours have another objective "
        "(absorbing) or other times and another schedule (uniform), another optimizer, and other networks:",
        "",
        *(f"- {name}: {text}." for name, text in recipes.items()),
        "",
        f"Seconds of sedd are those of training. Validation and saving are not counted ({', '.join(beside)}); the "
        f"commands took {', '.join(wall)} s from start to end. Each row of ours is one run, with seed {seeds}; ± is "
        "the error of the evaluation, without the spread over seeds.",
        "",
        f"A published number is that of one run, which saw {' or '.join(characters)} characters. Its seed, standard "
        "error and precision, and whether its seconds contain validation and saving, were not recorded.",
    ]


def command_lines(run: Json) -> list[str]:
    """Return the commands of a run, of training and of evaluation, as items of a list."""
    parts = len(run["parts"])
    resumed = f" (in {parts} parts, the others with `--resume`)" if parts > 1 else ""
    return [f"- `{run['command']}`{resumed}, then `{run['eval_command']}`"]


def recipe_of(run: Json) -> str:
    """Return the recipe that a command names."""
    words: list[str] = run["command"].split()
    return words[words.index("--recipe") + 1]


def describe_training(config: Json) -> str:
    """Return what decides the training of a run besides its network's size: objective, noise, optimizer, precision."""
    train, optim, noise = config["train"], config["optim"], config["noise"]
    parts = [f"objective `{config['objective']}`"]
    parts += [f"schedule `{noise['schedule']}`"] if noise["process"] == "uniform" else []
    parts += [f"`train.loss_weighting={train['loss_weighting']:g}`"] if train["loss_weighting"] else []
    parts += [f"`train.time_sampling={train['time_sampling']}`"] if train["time_sampling"] != "uniform" else []
    parts += [f"n-gram embeddings (`model.ngrams={config['model']['ngrams']}`)"] if config["model"]["ngrams"] else []
    parts += [f"optimizer `{optim['name']}` at {optim['lr']:g}"]
    parts += [f"`optim.weight_decay={optim['weight_decay']:g}`"] if optim["weight_decay"] else []
    parts += [f"`optim.decay_fraction={optim['decay_fraction']:g}`"] if optim.get("decay_fraction", 1.0) < 1 else []
    return ", ".join([*parts, f"precision `{train['precision']}`"])


@plot.Style()
def draw(ours: Json, rivals: Json) -> Figure:
    """Draw the test bounds against seconds of training, and the validation curves."""
    figure = plot.figure(7.4, 4.4)
    (axes,) = plot.axes(figure)
    colors = {"absorbing": plot.BLUE, "uniform": plot.ORANGE}
    for name, run in ours["runs"].items():
        noise = run["config"]["noise"]["process"]
        if curve := run.get("curve"):
            style = "-" if name in rivals["text8p"]["runs"] else "--"
            x, y = ([point[key] for point in curve] for key in ("seconds", "bits_per_char"))
            axes.plot(
                x,
                y,
                color=colors[noise],
                linewidth=1,
                linestyle=style,
                label=f"sedd, {noise}, {run['seconds']:,.0f} s, validation",
            )
        seconds, bits = run["seconds"], run["evaluation"]["bits_per_char"]
        axes.plot(seconds, bits, "o", color=colors[noise], label=f"sedd, {noise}, {seconds:,.0f} s: {bits:.4f}")
        if rival := rivals["text8p"]["runs"].get(name):
            label = f"published {rival['rival']}, {noise}, {rival['seconds']} s: {rival['bits_per_char']:.4f}"
            axes.plot(rival["seconds"], rival["bits_per_char"], "X", color=colors[noise], markersize=8, label=label)
    axes.set(
        xlabel="seconds of training on one H200", ylabel="bits per character of text8p, test bound", ylim=(1.5, 2.5)
    )
    axes.legend(fontsize=9)
    return figure
