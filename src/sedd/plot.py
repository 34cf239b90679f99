"""Pictures: one style, one way to a file, one way into a page. No window is ever opened."""

import html
import io
import re
from contextlib import AbstractContextManager, ContextDecorator
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase, SubFigure

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#aa4499", "#808080"
"""Told apart in all common kinds of colour blindness, on white and on black."""
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
    "svg.hashsalt": "sedd",  # the same picture is the same file
}


class Style(ContextDecorator, AbstractContextManager[None]):
    """The house's style, for as long as a figure is made: ``@Style()`` above what draws. The user's own stays."""

    def __enter__(self) -> None:
        self._context = mpl.rc_context(_STYLE)
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def figure(width: float, height: float) -> Figure:
    """An empty figure, ``width`` by ``height`` inches."""
    return Figure(figsize=(width, height), layout="constrained")


def stacked(figure: Figure, heights: list[float]) -> list[SubFigure]:
    """Parts of a figure below each other, of these relative heights."""
    return cast("list[SubFigure]", list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flat))


def axes(figure: FigureBase, rows: int = 1, columns: int = 1, **options: Any) -> list[Axes]:
    """The axes of a figure, row by row."""
    return cast("list[Axes]", list(figure.subplots(rows, columns, squeeze=False, **options).flat))


@Style()
def save(figure: Figure, path: Path) -> Path:
    """A PNG at ``path``, whose folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Software": None})
    except OSError as error:
        raise ValueError(f"{path} cannot be written to ({error.strerror}); choose another --out") from None
    return path


@Style()
def svg(figure: Figure, name: str, says: str) -> str:
    """An SVG element for a page: in the page's text colour, its ids led by ``name``, read aloud as ``says``."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace("#000000", "currentColor")
    drawn = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", drawn)
    box = re.search(r'viewBox="[^"]*"', drawn)
    assert box is not None
    body = drawn[drawn.index(">") + 1 :]
    return f'<svg {box[0]} role="img" aria-label="{html.escape(says)}">{body}'
