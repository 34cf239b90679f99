"""Diagrams of the code: the network of both architectures, the way of a text through the code, and the modules.

The names in them are searched for, in the weights of a network, in the package or in pyproject.toml; a name that does
not exist any more is an error.
"""

import importlib
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.canvas import BLUE, GREEN, MASKED, ORANGE, PAPER, PURPLE, WIDTH, Picture, blank_axes, draw_arrow, draw_box
from sedd import plot
from sedd.training import setup

ROOT = Path(__file__).parents[2]

# The network -----------------------------------------------------------------------------------------------

ARCHITECTURES = {
    "reference": (
        ("token embedding", "vocab_embed"),
        ("LayerNorm, modulate", "norm1"),
        ("QKV, rotary", "attn_qkv"),
        ("attention", ""),
        ("linear, gate", "attn_out"),
        ("LayerNorm, modulate", "norm2"),
        ("linear, GELU", "mlp.0"),
        ("linear, gate", "mlp.2"),
        ("LayerNorm, modulate", "output_layer.norm_final"),
        ("head", "output_layer.linear"),
    ),
    "modern": (
        ("token + position embedding", "vocab_embed, position_embedding"),
        ("RMSNorm, modulate", ""),
        ("QKV, QK-norm, rotary", "qkv, q_norm, k_norm"),
        ("attention", ""),
        ("linear, gate", "out"),
        ("RMSNorm, modulate", ""),
        ("linear, squared ReLU", "up"),
        ("linear, gate", "down"),
        ("RMSNorm, modulate", ""),
        ("head", "output_layer.linear"),
    ),
}
"""What each box computes, and the names of its weights; those of a block are the second to the eighth."""


@cache
def network() -> dict[str, Any]:
    """The boxes of both architectures, and the shapes of their weights."""
    found: dict[str, Any] = {}
    for name, boxes in ARCHITECTURES.items():
        with torch.device("meta"):
            module = setup.ARCHITECTURES[name](states=28, width=64, depth=2, heads=4)
        shapes = {key: list(value.shape) for key, value in module.state_dict().items()}
        adaptive = "blocks.0.adaLN_modulation.weight" if name == "reference" else "blocks.0.modulation.weight"
        if shapes[adaptive][0] != 6 * 64:
            raise ValueError(f"{adaptive} has shape {shapes[adaptive]}; the diagram shows 6 vectors of the width")
        rows = []
        for position, (what, weights) in enumerate(boxes):
            prefix = "blocks.0." if 1 <= position <= 7 else ""
            sizes = []
            for weight in filter(None, weights.split(", ")):
                own = [shape for key, shape in shapes.items() if key.startswith(f"{prefix}{weight}.")]
                if not own:
                    raise ValueError(f"{name} has no weights {prefix}{weight}; change the diagram")
                sizes.append(own)
            rows.append([what, weights, sizes])
        found[name] = rows
    return found


@plot.Style()
def draw_network() -> Figure:
    """Two columns, from tokens to logits; between them the embedding of σ, which every modulation reads."""
    data = network()
    figure = plot.figure(WIDTH, 8.0)
    (axes,) = plot.axes(figure)
    blank_axes(axes, 14.8, 16.9)
    for x, (name, rows) in zip((0.3, 9.5), data.items(), strict=True):
        draw_column(axes, x, name, rows)
    draw_box(axes, (6.4, 0.7, 2.0, 0.8), "σ", ORANGE)
    draw_box(axes, (6.0, 2.2, 2.8, 1.3), "cos, sin, MLP", ORANGE, note="sigma_map")
    draw_arrow(axes, (7.4, 1.5), (7.4, 2.2))
    axes.plot((7.4, 7.4), (3.5, 14.05), color=plot.ORANGE, linewidth=1.4)
    about = "adaLN\nsolid: shift, scale\ndotted: gate"
    axes.text(7.4, 15.1, about, ha="center", va="center", fontsize=9, linespacing=1.4)
    return figure


def draw_column(axes: Axes, x: float, name: str, rows: list[Any]) -> None:
    """Draw one architecture; arrows of modulation come from the line in the middle."""
    width, height = 5.0, 1.05
    tops = [1.7, 3.4, 4.75, 6.1, 7.45, 8.8, 10.15, 11.5, 13.5, 14.85]
    colours = [PAPER, GREEN, BLUE, BLUE, BLUE, GREEN, PURPLE, PURPLE, GREEN, PAPER]
    axes.text(x + width / 2, 0.25, name, ha="center", va="center", fontsize=11, weight="bold")
    axes.text(x + width / 2, 1.05, "token ids $x_t$", ha="center", va="center", fontsize=9)
    frame = (x - 0.25, 3.1, width + 0.5, 9.75)
    draw_box(axes, frame, "", "#ffffff")
    axes.text(x - 0.1, 13.15, "× depth", ha="left", va="center", fontsize=9, color=MASKED)
    draw_arrow(axes, (x + width / 2, 1.3), (x + width / 2, tops[0]))
    for top, (what, weights, _), colour in zip(tops, rows, colours, strict=True):
        shown = weights.replace("output_layer.", "")
        draw_box(axes, (x, top, width, height), what, colour, note=shown)
    for above, below in pairwise(tops):
        draw_arrow(axes, (x + width / 2, above + height), (x + width / 2, below))
    inner = x + width if x < 5 else x
    for top in (tops[1], tops[5], tops[8]):
        draw_arrow(axes, (7.4, top + height / 2), (inner, top + height / 2), color=plot.ORANGE)
    for top in (tops[4], tops[7]):
        draw_arrow(axes, (7.4, top + height / 2), (inner, top + height / 2), color=plot.ORANGE, linestyle=":")
    outer, side = (x, -1) if x < 5 else (x + width, 1)
    for start, end in ((tops[1] - 0.17, tops[4] + height + 0.14), (tops[4] + height + 0.14, tops[7] + height + 0.14)):
        points = [
            (x + width / 2, start),
            (outer + side * 0.13, start),
            (outer + side * 0.13, end),
            (x + width / 2, end),
        ]
        axes.plot(*zip(*points, strict=True), color=MASKED, linewidth=1.0)
        style = {"boxstyle": "circle,pad=0.05", "facecolor": "white", "edgecolor": MASKED, "linewidth": 0.8}
        axes.text(x + width / 2, end, "+", ha="center", va="center", fontsize=9, bbox=style, zorder=5)
    draw_arrow(axes, (x + width / 2, tops[-1] + height), (x + width / 2, 16.4))
    axes.text(x + width / 2, 16.65, "logits", ha="center", va="center", fontsize=9)


# The way of a text -----------------------------------------------------------------------------------------

TRAINING = (
    ("text file", "data.readers.read_documents"),
    ("token ids", "tokenizer.base.Tokenizer.encode_batch"),
    ("shards on disk", "data.shards.prepare"),
    ("batch $x_0$", "training.batches.TrainingDataLoader"),
    ("times $t$", "schedule.stratified"),
    ("noisy $x_t$", "process.Process.corrupt"),
    ("logits", "nn.transformer.Transformer.forward"),
    ("log-scores", "parameterization.ScoreModel"),
    ("loss in nats", "training.trainer.Trainer.batch_loss"),
    ("weights, EMA", "training.trainer.train_step"),
    ("checkpoint", "training.checkpoint.save"),
)
SAMPLING = (
    ("checkpoint", "loading.load_model"),
    ("prompt, gaps", "samplers.template.template_prompt"),
    ("noise at $t = 1$", "samplers.loop.Rows"),
    ("ratios", "samplers.model.SamplingModel"),
    ("step $t \\to u$", "samplers.loop.GridSampler.step"),
    ("last step", "samplers.loop.draw_clean_tokens"),
    ("text", "tokenizer.base.Tokenizer.decode"),
)


@cache
def dataflow() -> dict[str, Any]:
    """The stations of training and sampling, each with the function or class where it happens."""
    return {"training": [resolve(*row) for row in TRAINING], "sampling": [resolve(*row) for row in SAMPLING]}


def resolve(what: str, path: str) -> list[str]:
    """Return the station, once its function is known to exist."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(("sedd", *parts[:cut])))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return [what, path, ".".join(parts[:cut])]
    raise ValueError(f"sedd.{path} does not exist; change the diagram")


@plot.Style()
def draw_dataflow() -> Figure:
    """Boxes in reading order; the loop of sampling goes back."""
    data = dataflow()
    figure = plot.figure(WIDTH, 6.7)
    (axes,) = plot.axes(figure)
    blank_axes(axes, 14.7, 13.3)
    axes.text(0, 0.3, "training", fontsize=11, weight="bold", va="center")
    colours = [PAPER, PAPER, PAPER, PAPER, GREEN, GREEN, BLUE, BLUE, ORANGE, ORANGE, PAPER]
    draw_stations(axes, 0.8, data["training"], colours, 4)
    axes.text(0, 7.9, "sampling", fontsize=11, weight="bold", va="center")
    places = draw_stations(axes, 8.4, data["sampling"], [PAPER, PAPER, GREEN, BLUE, ORANGE, ORANGE, PAPER], 3)
    (x, y), (x_2, _) = places[3], places[4]
    points = [(x_2 + 1.7, y + 1.75), (x_2 + 1.7, y + 2.2), (x + 1.7, y + 2.2)]
    axes.plot(*zip(*points, strict=True), color=plot.ORANGE, linewidth=1.1)
    draw_arrow(axes, points[-1], (x + 1.7, y + 1.75), color=plot.ORANGE)
    axes.text(x_2 + 1.9, y + 2.2, "until the last step", ha="left", va="center", fontsize=9, color=plot.ORANGE)
    return figure


def draw_stations(
    axes: Axes, top: float, rows: list[list[str]], colours: list[str], first: int
) -> list[tuple[float, float]]:
    """Draw boxes from left to right, ``first`` in the first row and then four; return their left upper corners."""
    places = []
    for number, ((what, path, module), colour) in enumerate(zip(rows, colours, strict=True)):
        line, column = (0, number) if number < first else (1 + (number - first) // 4, (number - first) % 4)
        x, y = 0.05 + 3.75 * column, top + 2.25 * line
        shown = module.replace(".", "/")
        shown = shown if len(shown) < 24 else "…/" + shown.rpartition("/")[2]
        rest = path[len(module) + 1 :]
        draw_box(axes, (x, y, 3.35, 1.75), "", colour)
        axes.text(x + 1.68, y + 0.42, what, ha="center", va="center", fontsize=10)
        axes.text(x + 1.68, y + 0.92, shown, ha="center", va="center", fontsize=9)
        last = rest.split(".")[-1] if len(rest) > 20 else rest
        axes.text(x + 1.68, y + 1.35, last, ha="center", va="center", fontsize=9, color="#005b8f")
        if column:
            draw_arrow(axes, (x - 0.4, y + 0.87), (x, y + 0.87))
        elif number:
            points = [(places[-1][0] + 1.7, y - 0.5), (places[-1][0] + 1.7, y - 0.22), (1.72, y - 0.22)]
            axes.plot(*zip(*points, strict=True), color=MASKED, linewidth=1.1)
            draw_arrow(axes, points[-1], (1.72, y))
        places.append((x, y))
    return places


# Modules ---------------------------------------------------------------------------------------------------

ROLES = (
    "the command line",
    "the interfaces: Python, HTTP",
    "measuring and sharing models",
    "training, models on disk",
    "a network as a diffusion model; enumeration",
    "data, bounds, samplers, figures",
    "networks, kernels, devices",
    "mathematics, settings, tokens",
    "names and files",
    "checks of outside input",
)
"""What the modules of each layer are for, from the top."""


@cache
def modules() -> dict[str, Any]:
    """The layers of the import contract, from the top."""
    record = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = record["tool"]["importlinter"]["contracts"]
    layers = [layer.replace(":", "|").split("|") for layer in contract["layers"]]
    return {"layers": [[name.strip() for name in layer] for layer in layers], "roles": ROLES}


@plot.Style()
def draw_modules() -> Figure:
    """One row per layer: a module may import those below its own."""
    data = modules()
    pitch = 1.3  # a line of text above each row of boxes
    height = pitch * len(data["layers"])
    figure = plot.figure(WIDTH, 0.46 * height + 0.3)
    (axes,) = plot.axes(figure)
    blank_axes(axes, 17.6, height)
    for row, (names, role) in enumerate(zip(data["layers"], data["roles"], strict=True)):
        y = pitch * row
        x = 0.5
        for name in names:
            width = 0.42 + 0.17 * len(name)
            colour = ORANGE if row < 2 else GREEN if row < 5 else BLUE if row < 8 else PURPLE
            draw_box(axes, (x, y + 0.45, width, 0.7), name, colour)
            x += width + 0.12
        axes.text(0.5, y + 0.2, role, ha="left", va="center", fontsize=9, color=MASKED)
    draw_arrow(axes, (0.15, 0.1), (0.15, height - 0.1))
    axes.text(-0.12, height / 2, "imports", rotation=90, ha="center", va="center", fontsize=9, color=MASKED)
    return figure


PICTURES = {
    "network": Picture(network, draw_network),
    "dataflow": Picture(dataflow, draw_dataflow),
    "modules": Picture(modules, draw_modules),
}
