"""Figures in one style, saved as PNG or embedded in a page as SVG. No window is opened."""

import io
import itertools
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.transforms import Bbox

from sedd import files

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#aa4499", "#808080"
"""Distinguishable with all common kinds of colour blindness, on white and on black."""
_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "sedd",  # the same figure gives the same file
}
Style = partial(mpl.rc_context, _STYLE)
"""Our Matplotlib style for the duration of a function: ``@Style()``. The user's own settings are left alone."""
_RADII = (11, 18, 26, 35, 45, 56, 68, 81, 95, 110)
"""Distances in points at which labels are tried, from near to far."""
_ANGLES = [
    math.radians(degrees) for degrees in (45, 315, 135, 225, 0, 180, 90, 270, 22, 338, 158, 202, 68, 292, 112, 248)
]


def figure(width: float, height: float) -> Figure:
    """Return an empty figure, ``width`` by ``height`` inches."""
    return Figure(figsize=(width, height), layout="constrained")


def axes(figure: FigureBase, rows: int = 1, columns: int = 1, **options: Any) -> list[Axes]:
    """Add a grid of axes to a figure and return them row by row."""
    return cast("list[Axes]", list(figure.subplots(rows, columns, squeeze=False, **options).flat))


def label_points(axes: Axes, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each label (x, y, text, colour) beside its point, where it covers neither a point nor another label.

    Each is put at the nearest free place around its point, with a line to it if that is not next to the point. To be
    called when everything else is drawn: limits and layout are settled here.
    """
    cast("Figure", axes.figure).draw_without_rendering()
    scale, size = axes.figure.dpi / 72, 8.0
    points = [axes.transData.transform((x, y)) for x, y, *_ in labels]
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    for (x, y), (data_x, data_y, text, color) in zip(points, labels, strict=True):
        width, height = (0.65 * size * len(text) + 2) * scale, 1.25 * size * scale
        for radius, angle in itertools.product(_RADII, _ANGLES):
            dx, dy = radius * scale * math.cos(angle), radius * scale * math.sin(angle)
            box = Bbox.from_bounds(x + dx - width / 2, y + dy - height / 2, width, height)
            if not any(box.overlaps(other) for other in taken) and axes.bbox.fully_containsx(box.x0):
                break
        taken.append(box)
        line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(
            text,
            (data_x, data_y),
            (dx / scale, dy / scale),
            textcoords="offset points",
            fontsize=size,
            color=color,
            ha="center",
            va="center",
            arrowprops=line if radius > _RADII[0] else None,
            bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            in_layout=False,
        )


@Style()
def save_png(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG, creating its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_write(path) as temporary:
            figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
    except OSError as error:
        raise ValueError(f"{path} cannot be written to ({error.strerror}); choose another --out") from None
    return path


@Style()
def to_svg(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element in the page's text colour; ``name`` is the prefix of all its ids."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return re.sub(r'^<svg [^>]*(viewBox="[^"]*")[^>]*>', r"<svg \1>", svg)
