"""Show texts as they form: live on a console, and as pages and pictures that colour each token by its step."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sedd.loading import LoadedModel
from sedd.samplers import Prompt, State
from sedd.templates import render
from sedd.terminal import visible
from sedd.tokenizer.base import PAD_TEXT

WIDTH, MIN_WIDTH = 140, 50
"""Most characters per line of the PNG, and the least width of the picture in characters."""
INCHES_PER_COLUMN = 0.084
_SEPARATOR = re.compile(r"^── sample \d+ ─+\n", re.MULTILINE)


def separator(number: int) -> str:
    """Return the line before text ``number``, counted from 1."""
    return f"── sample {number} ".ljust(60, "─")


def split_texts(content: str) -> list[str] | None:
    """Return the texts of a file in which each follows its `separator`; None for any other file."""
    texts = [text.removesuffix("\n") for text in _SEPARATOR.split(content)[1:]]
    return texts if _SEPARATOR.match(content) else None


class TracedToken(NamedTuple):
    """A generated token as it is displayed."""

    text: str
    step: int  # at which it appeared; 0 for a given token


def trace_tokens(texts: Sequence[str], steps: Sequence[int]) -> list[TracedToken]:
    """Return tokens in printable form with their steps, up to the padding at the end."""
    length = next((i for i in range(len(texts), 0, -1) if texts[i - 1] != PAD_TEXT), 0)
    return [TracedToken(*pair) for pair in zip(texts[:length], steps[:length], strict=True)]


def _last_step(rows: list[list[TracedToken]]) -> int:
    return max((token.step for row in rows for token in row), default=1)


def _colors(step: int, last: int) -> tuple[str, str]:
    """Return the background of a step, dark first and bright last, and an ink that is legible on it."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    r, g, b, _ = colormaps["viridis"]((step - 1) / max(1, last - 1))
    bright = 0.299 * r + 0.587 * g + 0.114 * b > 0.5
    return to_hex((r, g, b)), "#000000" if bright else "#ffffff"


def trace_page(rows: list[list[TracedToken]], title: str, about: str) -> str:
    """Return a self-contained HTML page of the texts, with a slider over the steps."""
    last = _last_step(rows)
    page = {"title": title, "about": about, "last_step": last}
    return render("trace.html.j2", rows=rows, colors=partial(_colors, last=last), **page)


def trace_fragment(rows: list[list[TracedToken]]) -> str:
    """Return the texts as an HTML fragment, for a page that exists already such as a notebook."""
    return render("trace_texts.html.j2", rows=rows, colors=partial(_colors, last=_last_step(rows)))


def save_trace_png(rows: list[list[TracedToken]], title: str, path: Path) -> None:
    """Write the texts and the colour scale as a PNG."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    from sedd import plot

    last = _last_step(rows)
    placed, height = _lines(rows)
    columns = max(MIN_WIDTH, max((x + len(text) for _, text, x, _ in placed), default=0))
    heading = textwrap.wrap(title, columns)
    inches, width = 0.26 * height + 1.1 + 0.2 * len(heading), INCHES_PER_COLUMN * columns + 0.24
    figure = Figure(figsize=(width, inches))
    axes = figure.add_axes((0.12 / width, 0.8 / inches, 1 - 0.24 / width, 0.26 * height / inches))
    axes.set(xlim=(0, columns), ylim=(height - 0.5, -0.5))
    axes.axis("off")
    axes.set_title("\n".join(heading), loc="left", fontsize=10)
    for token, text, x, y in placed:
        background, ink = _colors(token.step, last) if token.step else ("none", "#000000")
        edge = "none" if token.step else "#888888"
        axes.add_patch(Rectangle((x, y - 0.45), len(text), 0.9, facecolor=background, edgecolor=edge, linewidth=0.5))
        axes.text(x, y, text.replace("$", r"\$"), family="monospace", fontsize=9.8, color=ink, va="center")
    scale = ScalarMappable(Normalize(1, last), "viridis")
    below = figure.add_axes((0.12 / width, 0.5 / inches, min(3.6, width - 0.3) / width, 0.14 / inches))
    figure.colorbar(scale, cax=below, orientation="horizontal", label="step; framed: given")
    plot.save_png(figure, path)


def _lines(rows: list[list[TracedToken]]) -> tuple[list[tuple[TracedToken, str, int, int]], int]:
    """Break the tokens into lines of `WIDTH` characters: pieces with column and line, and the number of lines."""
    placed, y = [], 0
    for row in rows:
        x = 0
        for token in row:
            rest = token.text
            while rest:
                if x == WIDTH:
                    x, y = 0, y + 1
                piece, rest = rest[: WIDTH - x], rest[WIDTH - x :]
                placed.append((token, piece, x, y))
                x += len(piece)
            if token.text.endswith("\\n"):  # a line break in printable form
                x, y = 0, y + 1
        y += 2
    return placed, max(1, y - 1)


def watch_states(
    states: Iterator[State], prompt: Prompt, loaded: LoadedModel, console: Console, first: int = 0
) -> State:
    """Show the texts of a batch as they form, masks as dots; return the last state.

    On a terminal live, replaced at the end; else a line for each text at steps 1, 2, 4, 8, … ``first`` is the index of
    the first text.
    """
    last, lengths = next(states), prompt.text_lengths.tolist()
    mask = loaded.process.mask if loaded.process.has_mask else None

    def texts(state: State) -> Iterator[tuple[int, Text]]:
        for number, (row, length) in enumerate(zip(state.x.tolist(), lengths, strict=True), first + 1):
            text = Text()
            for masked, run in groupby(row[:length], lambda token: token == mask):
                ids = list(run)
                shown = "·" * len(ids) if masked else visible(loaded.tokenizer.decode(ids))
                text.append(shown, style="dim" if masked else "")
            yield number, text

    if console.is_terminal:
        with Live(console=console, refresh_per_second=20, transient=True) as live:
            for last in states:
                heads = ((Text(separator(number), style="dim"), text) for number, text in texts(last))
                live.update(Group(*[*chain(*heads)][len(lengths) == 1 :]))  # a single text has no line before it
        return last
    for last in states:
        if last.step & (last.step - 1) == 0:
            for number, text in texts(last):
                line = f"step {last.step}, sample {number}: {visible(text.plain, line_ends=False)}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    return last
