"""A picture of how a text came to be: every token in the colour of the step at which it appeared."""

import html as escaping
from pathlib import Path
from typing import NamedTuple

from sedd.generate.run import GeneratedSequence
from sedd.tokenizer import Tokenizer

WIDTH = 140
"""Characters on a line of the PNG."""


class Token(NamedTuple):
    """A token as it is shown."""

    text: str
    step: int
    """0: it was given."""

    @property
    def ends_line(self) -> bool:
        """Whether a line ends with it."""
        return self.text.endswith("\\n")


def tokens(tokenizer: Tokenizer, row: GeneratedSequence) -> list[Token]:
    """The tokens of a finished row."""
    return [Token(text, step) for text, step in zip(tokenizer.tokens(row.ids), row.when, strict=True)]


def _colour(step: int, last: int) -> tuple[str, str]:
    """Background and ink of a step: dark first, bright last, and an ink that can be read on it."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    r, g, b, _ = colormaps["viridis"]((step - 1) / max(1, last - 1))
    bright = 0.299 * r + 0.587 * g + 0.114 * b > 0.5
    return to_hex((r, g, b)), "#000000" if bright else "#ffffff"


def html(rows: list[list[Token]], title: str, about: str) -> str:
    """One page that needs nothing else; its slider goes back in time."""
    last = max((token.step for row in rows for token in row), default=1)
    body = inline(rows)
    stops = ", ".join(_colour(1 + round(i / 8 * (last - 1)), last)[0] for i in range(9))
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escaping.escape(title)}</title>
<style>
  body {{ font: 16px/1.7 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
         color-scheme: light dark; }}
  .text {{ font: 15px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
          border: 1px solid #8888; border-radius: .4rem; padding: .8rem; }}
  .text span {{ border-radius: .2rem; }}
  .text .given {{ outline: 1px dashed #888; outline-offset: -1px; }}
  .text .later {{ color: transparent !important; background: #8883 !important; }}
  .scale {{ height: .8rem; border-radius: .4rem; background: linear-gradient(to right, {stops}); }}
  .ends {{ display: flex; justify-content: space-between; }}
  input {{ width: 100%; }}
</style>
<h1>{escaping.escape(title)}</h1>
<p>{escaping.escape(about)} Given tokens have a dashed outline.</p>
<div class="scale" role="img" aria-label="colours from step 1 to step {last}"></div>
<div class="ends"><span>step 1</span><span>step {last}</span></div>
<label>Shown up to step <output id="now">{last}</output>
<input id="step" type="range" min="0" max="{last}" value="{last}"></label>
{body}
<script>
  const step = document.getElementById("step"), now = document.getElementById("now");
  step.addEventListener("input", () => {{
    now.textContent = step.value;
    for (const token of document.querySelectorAll("[data-step]"))
      token.classList.toggle("later", Number(token.dataset.step) > Number(step.value));
  }});
</script>
</html>
"""


def inline(rows: list[list[Token]]) -> str:
    """The texts alone, for a page that is there already."""
    last = max((token.step for row in rows for token in row), default=1)
    return "\n".join(f'<pre class="text">{"".join(_span(token, last) for token in row)}</pre>' for row in rows)


def _span(token: Token, last: int) -> str:
    text = escaping.escape(token.text) + ("\n" if token.ends_line else "")
    if not token.step:
        return f'<span class="given" title="given">{text}</span>'
    back, ink = _colour(token.step, last)
    style = f"background:{back};color:{ink}"
    return f'<span data-step="{token.step}" title="step {token.step}" style="{style}">{text}</span>'


def png(rows: list[list[Token]], title: str, path: Path) -> None:
    """The same as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    last = max((token.step for row in rows for token in row), default=1)
    placed, height = _lines(rows)
    inches = 0.26 * height + 1.3
    figure = plt.figure(figsize=(12, inches))
    axes = figure.add_axes((0.01, 0.8 / inches, 0.98, 0.26 * height / inches))
    axes.set(xlim=(0, WIDTH), ylim=(height - 0.5, -0.5))
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=11)
    for token, text, x, y in placed:
        back, ink = _colour(token.step, last) if token.step else ("none", "#000000")
        edge = "none" if token.step else "#888888"
        axes.add_patch(Rectangle((x, y - 0.45), len(text), 0.9, facecolor=back, edgecolor=edge, linewidth=0.5))
        axes.text(x, y, text.replace("$", r"\$"), family="monospace", fontsize=9.8, color=ink, va="center")
    scale = ScalarMappable(Normalize(1, last), "viridis")
    below = figure.add_axes((0.01, 0.5 / inches, 0.3, 0.14 / inches))
    figure.colorbar(scale, cax=below, orientation="horizontal", label="step; framed: given")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _lines(rows: list[list[Token]]) -> tuple[list[tuple[Token, str, int, int]], int]:
    """Where every token goes, broken to the width of the picture, and how many lines there are."""
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
            if token.ends_line:
                x, y = 0, y + 1
        y += 2
    return placed, max(1, y - 1)
