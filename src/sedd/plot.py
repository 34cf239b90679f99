"""Figures in one style, saved as PNG or embedded in a page as SVG. No window is opened."""

import html
import io
import itertools
import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, ContextDecorator
from pathlib import Path
from typing import Any, NamedTuple, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase, SubFigure
from matplotlib.text import Annotation
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


_RADII = (11, 18, 26, 35, 45, 56, 68, 81, 95, 110)
"""Distances in points at which labels are tried, from near to far."""
_ANGLES = [
    math.radians(degrees) for degrees in (45, 315, 135, 225, 0, 180, 90, 270, 22, 338, 158, 202, 68, 292, 112, 248)
]


class PointLabel(NamedTuple):
    """A label of a point of a plot."""

    x: float
    y: float
    text: str
    color: str


class Style(ContextDecorator, AbstractContextManager[None]):
    """Our Matplotlib style for the duration of a function: ``@Style()``. The user's own settings are left alone."""

    def __enter__(self) -> None:
        self._context = mpl.rc_context(_STYLE)
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def figure(width: float, height: float) -> Figure:
    """Return an empty figure, ``width`` by ``height`` inches."""
    return Figure(figsize=(width, height), layout="constrained")


def stacked(figure: Figure, heights: list[float]) -> list[SubFigure]:
    """Divide a figure into subfigures from top to bottom with these relative heights."""
    return cast("list[SubFigure]", list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flat))


def axes(figure: FigureBase, rows: int = 1, columns: int = 1, **options: Any) -> list[Axes]:
    """Add a grid of axes to a figure and return them row by row."""
    return cast("list[Axes]", list(figure.subplots(rows, columns, squeeze=False, **options).flat))


def label_points(axes: Axes, labels: Sequence[PointLabel], size: float = 8) -> list[Annotation]:
    """Write a label beside each point, where it covers neither a point nor another label.

    Each is put at the nearest free place around its point, with a line to it if that is not next to the point. To be
    called when everything else is drawn: limits and layout are settled here.
    """
    cast("Figure", axes.figure).draw_without_rendering()
    scale = axes.figure.dpi / 72
    points = [axes.transData.transform(label[:2]) for label in labels]
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    placed = []
    for (x, y), label in zip(points, labels, strict=True):
        width, height = (0.65 * size * len(label.text) + 2) * scale, 1.25 * size * scale
        for radius, angle in itertools.product(_RADII, _ANGLES):
            dx, dy = radius * scale * math.cos(angle), radius * scale * math.sin(angle)
            box = Bbox.from_bounds(x + dx - width / 2, y + dy - height / 2, width, height)
            if not any(box.overlaps(other) for other in taken) and axes.bbox.fully_containsx(box.x0):
                break
        taken.append(box)
        line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2}
        placed.append(
            axes.annotate(
                label.text,
                label[:2],
                (dx / scale, dy / scale),
                textcoords="offset points",
                fontsize=size,
                color=label.color,
                ha="center",
                va="center",
                arrowprops=line if radius > _RADII[0] else None,
                bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
                in_layout=False,
            )
        )
    return placed


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
def to_svg(figure: Figure, name: str, description: str) -> str:
    """Return a figure as an SVG element for a page, drawn in the page's text colour.

    Args:
        name: Prefix of all ids, so that several figures fit on one page.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    content = svg[svg.index(">") + 1 :]
    return f'<svg {view_box[0]} role="img" aria-label="{html.escape(description)}">{content}'
