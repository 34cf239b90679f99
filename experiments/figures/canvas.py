"""What the figures share: the language of nine words, cells, boxes and arrows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from sedd import exact, plot

LETTERS = "acdgot"
WORDS = {"cat": 4, "dog": 4, "cot": 2, "dot": 2, "cod": 2, "tag": 2, "god": 2, "act": 1, "oat": 1}
"""A language of nine words, and how often each is used."""
PAPER, MASKED, CHANGED, INK = "#f3f1ec", "#5b6770", "#f2c9a8", "#222222"
WIDTH = 7.4
"""Width of a figure in inches: the column of a page, so that a font keeps its size."""


class Picture(NamedTuple):
    """A figure of the documentation: its data, which decide whether it is up to date, and how it is drawn."""

    data: Callable[[], Any]
    draw: Callable[[], Figure | str | bytes]
    """A figure, the text of an SVG, or the bytes of a PNG."""


def encode(word: str) -> torch.Tensor:
    """Return the ids of the letters of a word."""
    return torch.tensor([LETTERS.index(letter) for letter in word])


def language() -> exact.Distribution:
    """Return the distribution of the nine words over all words of three of the six letters."""
    table = torch.zeros((len(LETTERS),) * 3, dtype=torch.float64)
    for word, weight in WORDS.items():
        table[tuple(encode(word))] = weight
    return exact.Distribution(table / table.sum())


def spell(ids: torch.Tensor, letters: str = LETTERS) -> str:
    """Return the letters of a sequence, a mask as an underscore."""
    return "".join((letters + "_")[i] for i in ids.tolist())


def blank_axes(axes: Axes, width: float, height: float) -> None:
    """Show nothing but what is drawn, in units of equal length; y points down."""
    axes.set(xlim=(-0.1, width + 0.1), ylim=(height + 0.1, -0.1), aspect="equal")
    axes.axis("off")


def draw_cells(axes: Axes, text: str, y: float, before: str | None = None, size: float = 11) -> None:
    """Draw one cell per letter; masks are dark, letters that differ from ``before`` are coloured."""
    for x, letter in enumerate(text):
        changed = before is not None and letter != before[x]
        colour = MASKED if letter == "_" else CHANGED if changed else PAPER
        box = FancyBboxPatch((x + 0.06, y + 0.08), 0.88, 0.84, boxstyle="round,pad=0,rounding_size=0.12")
        box.set(facecolor=colour, edgecolor="none")
        axes.add_patch(box)
        if letter != "_":
            axes.text(x + 0.5, y + 0.47, letter, ha="center", va="center", fontsize=size, family="monospace")


def draw_box(
    axes: Axes,
    box: tuple[float, float, float, float],
    text: str,
    colour: str = PAPER,
    size: float = 9,
    note: str = "",
) -> None:
    """Draw a rounded box (left, top, width, height) with a text, and a note in small grey letters below it."""
    x, y, width, height = box
    patch = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12")
    patch.set(facecolor=colour, edgecolor="#b9b4a8", linewidth=0.8)
    axes.add_patch(patch)
    middle = y + height / 2 - (0.2 if note else 0)
    axes.text(x + width / 2, middle, text, ha="center", va="center", fontsize=size, color=INK)
    if note:
        axes.text(x + width / 2, y + height / 2 + 0.26, note, ha="center", va="center", fontsize=size, color=MASKED)


def draw_arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], curvature: float = 0, **style: Any
) -> None:
    """Draw an arrow from one point to another."""
    options = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 1.1, "color": MASKED, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={curvature}", **(options | style)))


def tint(colour: str, share: float = 0.25) -> str:
    """Mix a colour with white: ``share`` of it is left."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - part)):02x}" for part in (red, green, blue))


BLUE, ORANGE, GREEN, PURPLE = (tint(colour) for colour in (plot.BLUE, plot.ORANGE, plot.GREEN, plot.PURPLE))
"""Light backgrounds on which dark text is legible."""
