"""Bits per character of text8p beside published code: the table of the results page, its figure, and what differs."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from sedd import plot

Json = Mapping[str, Any]
HEADS = (
    "noise, schedule, training",
    "code",
    "bits per character",
    "objective",
    "optimizer",
    "precision",
    "network",
    "characters",
)


def table_rows(ours: Json, rivals: Json) -> list[list[str]]:
    """Return a row for each of our runs, after that of the rival with the same noise and as many seconds."""
    published, rows = rivals["text8p"], []
    for name, run in ours["runs"].items():
        noise, config = run["config"]["noise"], run["config"]
        if rival := published["runs"].get(name):
            rows.append(
                [
                    f"{noise['process']}, {rival['schedule']}, {rival['seconds']:,} s",
                    rival["rival"],
                    f"≤ {rival['bits_per_char']:.4f}",
                    *(published[fact] for fact in ("objective", "optimizer", "precision", "network")),
                    f"{rival['characters'] / 1e6:.1f}M",
                ]
            )
        rows.append(
            [
                f"{noise['process']}, {noise['schedule']}, {run['seconds']:,.0f} s",
                f"sedd {run['commit']}",
                describe_bits(run["evaluation"]),
                describe_objective(config),
                describe_optimizer(config),
                config["train"]["precision"],
                describe_network(config["model"]),
                f"{run['training']['tokens'] / 1e6:,.0f}M",
            ]
        )
    return rows


def describe_bits(evaluation: Json) -> str:
    """Return bits per character with their standard error, over the draws and the sequences of the test text."""
    error = evaluation["stderr_nats_per_token"] * evaluation["bits_per_char"] / evaluation["nats_per_token"]
    return f"{'' if evaluation['is_exact'] else '≤ '}{evaluation['bits_per_char']:.4f} ± {error:.4f}"


def note(ours: Json) -> str:
    """State how the bits were measured, and what the code of a run did not have yet."""
    runs = ours["runs"].values()
    dates = " and ".join(dict.fromkeys(run["date"] for run in runs))
    older = [
        f"{run['since']} The rows of {run['commit']} were not measured again with that."
        for run in runs
        if "since" in run
    ]
    return " ".join(
        [
            "Rows differ in more than the code. Late decay: the learning rate falls in the second half only. Protocol "
            "`text8p`: trained on the first 64M characters of text8, strict bound on characters 69M to 74M in "
            f"sequences of 256. One {ours['machine']['name']}; `benchmarks/text8p.py` at the commits in the table, "
            f"{dates}.",
            *dict.fromkeys(older),
        ]
    )


def difference_lines(ours: Json, rivals: Json) -> list[str]:
    """State what the seconds contain, and what was not recorded."""
    runs, published = ours["runs"], rivals["text8p"]["runs"]
    beside = [
        f"{name} {run['training']['eval_seconds'] + run['training']['save_seconds']:.0f} s"
        for name, run in runs.items()
    ]
    wall = [f"{run['wall_seconds']:,.0f}" for run in runs.values()]
    characters = [f"{run['characters'] / 1e6:.1f}M" for run in published.values()]
    seeds = ", ".join(sorted({str(run["config"]["seed"]) for run in runs.values()}))
    return [
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


def describe_objective(config: Json) -> str:
    """Return the objective, and the weights and the times of training where they are not the default."""
    train = config["train"]
    parts = [f"`{config['objective']}`"]
    parts += [f"loss weighting {train['loss_weighting']:g}"] if train["loss_weighting"] else []
    parts += [f"`{train['time_sampling']}` times"] if train["time_sampling"] != "uniform" else []
    return ", ".join(parts)


def describe_optimizer(config: Json) -> str:
    """Return the optimizer with its learning rate, weight decay, late decay of the rate, and the batch."""
    optim = config["optim"]
    parts = [f"{optim['name'].capitalize()} at {optim['lr']:g}"]
    parts += [f"weight decay {optim['weight_decay']:g}"] if optim["weight_decay"] else []
    parts += ["late decay"] if optim.get("decay_fraction", 1.0) < 1 else []
    return ", ".join([*parts, f"batch {config['train']['batch_size']}"])


def describe_network(model: Json) -> str:
    """Return blocks × width, and n-gram embeddings."""
    return f"{model['depth']} × {model['width']}" + (f", {model['ngrams']}-grams" if model["ngrams"] else "")


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
