"""The moving picture of the README, and infilling before and after: texts of the model stories, stored once sampled."""

import hashlib
import html
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.colors import to_hex

from figures.canvas import INK, MASKED, Picture, tint
from sedd import plot

ROOT = Path(__file__).parents[2]
STORED = ROOT / "experiments/results/texts.json"
WEIGHTS = ROOT / "src/sedd/models/stories/ema.safetensors"
SAMPLE = {"steps": 64, "temperature": 0.6, "seed": 3}
TEMPLATE = (
    "Once upon a time, there was a little girl named Lily. She loved to{4} in the park. One day, she saw a{2} under a "
    "tree. It was very{6}. Lily wanted to help, so she{10}. The{2} was happy again and thanked{6}. Lily smiled "
    "and went home. She gave her mom{6}. They lived happily ever after."
)
INFILL = {"steps": 64, "temperature": 0.6, "seed": 0}


def weights_digest() -> str:
    """Return the hash of the weights of the model in the box."""
    return hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()


def record() -> None:
    """Sample both texts with the model in the box, on a CPU, and store their tokens and when each appeared."""
    import sedd

    model = sedd.load("stories", device="cpu")
    (story,) = model.sample(1, **SAMPLE)
    (filled,) = model.infill(TEMPLATE, **INFILL)
    found: dict[str, Any] = {
        "what": "texts of the model stories, for docs/images: each token with the step at which it appeared, 0: given",
        "command": "python experiments/pictures.py --record texts",
        "weights_sha256": weights_digest(),
        "sample": {"settings": SAMPLE, "text": story.text, "tokens": without_padding(story)},
        "infilling": {
            "settings": INFILL,
            "template": TEMPLATE,
            "text": filled.text,
            "tokens": without_padding(filled),
        },
    }
    STORED.write_text(json.dumps(found, indent=None, ensure_ascii=False).replace('"sample"', '\n"sample"') + "\n")


def without_padding(text: Any) -> list[tuple[str, int]]:
    """Return the tokens of a text and their steps, up to the padding after its end."""
    return [pair for pair in zip(text.tokens, text.steps, strict=True) if pair[0] != "<pad>"]


@cache
def stored() -> Any:
    """Return the stored texts."""
    return json.loads(STORED.read_text(encoding="utf-8"))


class Placed(NamedTuple):
    """A token on the page: its visible part, the step at which it appeared, its column and line."""

    text: str
    step: int
    column: int
    line: int


def place(tokens: list[tuple[str, int]], columns: int) -> list[Placed]:
    """Break tokens into lines between words; a word may have several tokens."""
    words: list[list[tuple[str, int]]] = []
    for text, step in tokens:
        if not words or text.startswith(" ") or text.startswith("\\n") or words[-1][-1][0].endswith("\\n"):
            words.append([])
        words[-1].append((text, step))
    placed, column, line = [], 0, 0
    for word in words:
        length = sum(len(text.strip()) for text, _ in word)
        space = 1 if word[0][0].startswith(" ") and column else 0
        if column + space + length > columns:
            column, line, space = 0, line + 1, 0
        column += space
        for text, step in word:
            shown = text.strip().replace("\\n", "")
            placed.append(Placed(shown or "↵", step, column, line))
            column += max(1, len(shown))
            if text.endswith("\\n"):
                column, line = 0, line + 1
    return placed


# The moving picture ----------------------------------------------------------------------------------------

COLUMNS, CHAR, LINE, MARGIN, TOP = 68, 8.6, 25, 22, 74
SECONDS, BEGIN, END = 15, 6, 76
"""Length of the film, and the share of it, in percent, at which the first step begins and the last one ends."""
FONTS = (
    ".h,.c{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#4a545b}\n"
    f".t{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:{INK}}}"
)


def draw_denoising() -> str:
    """Return an SVG that moves by CSS alone; without motion, or to those who want none, it shows the text."""
    sample = stored()["sample"]
    steps, tokens = sample["settings"]["steps"], sample["tokens"]
    placed = place(tokens, COLUMNS)
    width = 2 * MARGIN + round(COLUMNS * CHAR)
    height = TOP + LINE * (max(token.line for token in placed) + 1) + 12
    groups: dict[int, list[Placed]] = defaultdict(list)
    for token in placed:
        groups[token.step].append(token)
    body = [part for step in sorted(groups) for part in draw_group(step, groups[step])]
    counter = "".join(f'<text y="{20 * k}">step {k} of {steps}</text>' for k in range(steps + 1))
    about = f"A story forms from masks in {steps} steps"
    title = f"a text of the model stories, temperature {sample['settings']['temperature']}"
    bar = width - 2 * MARGIN - 84
    return "\n".join(
        (
            svg_head(width, height, about, sample["text"]),
            f"<style>{style(sorted(groups), steps)}</style>",
            f'<rect width="{width}" height="{height}" rx="10" fill="#faf8f3"/>',
            f'<text x="{MARGIN}" y="30" class="h">{title}</text>',
            f'<svg x="{width - MARGIN - 130}" y="14" width="130" height="20"><g class="c" text-anchor="end" '
            f'transform="translate(130 16)"><g class="n">{counter}</g></g></svg>',
            f'<text x="{MARGIN}" y="54" class="h">t = 1</text><text x="{width - MARGIN}" y="54" class="h" '
            'text-anchor="end">t = 0</text>',
            f'<rect x="{MARGIN + 42}" y="47" width="{bar}" height="6" rx="3" fill="#ddd9cf"/>',
            f'<g transform="translate({MARGIN + 42} 47)"><rect class="b" width="{bar}" height="6" rx="3" '
            f'fill="{plot.BLUE}"/></g>',
            f'<g class="t">{"".join(body)}</g>',
            "</svg>\n",
        )
    )


def svg_head(width: int, height: int, about: str, text: str) -> str:
    """Return the beginning of an SVG, with what it shows for those who do not see it and the digest of its data."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{about}">\n<title>{about}</title>\n<desc>{html.escape(text)}</desc>\n'
        '<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:identifier>DIGEST</dc:identifier></metadata>'
    )


def draw_group(step: int, tokens: list[Placed]) -> list[str]:
    """Return the masks of the tokens that appear in one step, and their text."""
    masks, texts = [], []
    for token in tokens:
        x, y = MARGIN + token.column * CHAR, TOP + token.line * LINE
        length = len(token.text) * CHAR
        masks.append(f'<rect x="{x + 0.8:.1f}" y="{y}" width="{length - 1.6:.1f}" height="18" rx="3"/>')
        if token.text != "↵":
            text = html.escape(token.text, quote=False)
            texts.append(f'<text x="{x:.1f}" y="{y + 14}" textLength="{length:.1f}">{text}</text>')
    return [f'<g class="m m{step}">{"".join(masks)}</g>', f'<g class="r{step}">{"".join(texts)}</g>']


def style(used: list[int], steps: int) -> str:
    """Return the style sheet: without animation everything is as it is at the end."""
    lines = [
        FONTS,
        f".m{{fill:{MASKED};opacity:0}}",
        f".n{{transform:translateY(-{20 * steps}px)}}",
        "@media (prefers-reduced-motion:no-preference){",
        f".n{{animation:n {SECONDS}s infinite}}.b{{animation:b {SECONDS}s infinite}}",
        f"@keyframes n{{0%,{BEGIN}%{{transform:translateY(0);animation-timing-function:steps({steps},end)}}"
        f"{END}%,100%{{transform:translateY(-{20 * steps}px)}}}}",
        f"@keyframes b{{0%,{BEGIN}%{{transform:scaleX(0);animation-timing-function:linear}}"
        f"{END}%,100%{{transform:scaleX(1)}}}}",
    ]
    for step in used:
        at = round(BEGIN + (END - BEGIN) * step / steps, 2)
        lines.append(
            f".r{step}{{animation:r{step} {SECONDS}s infinite}}.m{step}{{animation:m{step} {SECONDS}s infinite}}"
            f"@keyframes r{step}{{0%,{at:.2f}%{{opacity:0;fill:{plot.ORANGE}}}{at + 0.01:.2f}%{{opacity:1;"
            f"fill:{plot.ORANGE}}}{min(99.0, at + 7):.2f}%{{fill:{INK}}}}}"
            f"@keyframes m{step}{{0%,{at:.2f}%{{opacity:1}}{at + 0.01:.2f}%,100%{{opacity:0}}}}"
        )
    return "\n".join([*lines, "}"])


# Infilling -------------------------------------------------------------------------------------------------


def draw_infilling() -> str:
    """The same text twice: with gaps, and filled; colour is the step at which a token appeared."""
    found = stored()["infilling"]
    placed, steps = place(found["tokens"], COLUMNS), found["settings"]["steps"]
    width, lines = 2 * MARGIN + round(COLUMNS * CHAR), max(token.line for token in placed) + 1
    second = 50 + lines * LINE + 34
    height = second + lines * LINE + 56
    parts = [
        svg_head(width, height, "A story with gaps, and the same story with the gaps filled", found["text"]),
        f"<style>{FONTS}</style>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#faf8f3"/>',
        f'<text x="{MARGIN}" y="30" class="h">given</text>',
        f'<text x="{MARGIN}" y="{second - 14}" class="h">filled by the model stories in {steps} steps, temperature '
        f"{found['settings']['temperature']}; colour is the step</text>",
        '<g class="t">',
        *(draw_token(token, 44, None if token.step == 0 else MASKED, token.step == 0) for token in placed),
        *(draw_token(token, second, None if token.step == 0 else colour_of(token.step, steps)) for token in placed),
        "</g>",
        *(
            f'<rect x="{MARGIN + 90 + 4 * k}" y="{height - 30}" width="4.5" height="10" fill="{colour_of(k, steps)}"/>'
            for k in range(1, steps + 1)
        ),
        f'<text x="{MARGIN}" y="{height - 20}" class="h">first step</text>',
        f'<text x="{MARGIN + 104 + 4 * steps}" y="{height - 20}" class="h">last step</text>',
        "</svg>\n",
    ]
    return "\n".join(parts)


def draw_token(token: Placed, top: float, background: str | None, shown: bool = True) -> str:
    """Return a token with its background."""
    x, y, length = MARGIN + token.column * CHAR, top + token.line * LINE, len(token.text) * CHAR
    size = f'width="{length - 1.6:.1f}" height="19" rx="3"'
    box = "" if background is None else f'<rect x="{x + 0.8:.1f}" y="{y}" {size} fill="{background}"/>'
    text = f'<text x="{x:.1f}" y="{y + 14}" textLength="{length:.1f}">{html.escape(token.text, quote=False)}</text>'
    return box + (text if shown else "")


def colour_of(step: int, steps: int) -> str:
    """Return the light colour of a step, on which dark text is legible."""
    return tint(to_hex(colormaps["viridis"](step / steps)), 0.45)


PICTURES = {
    "denoising": Picture(lambda: stored()["sample"], draw_denoising),
    "infilling-stories": Picture(lambda: stored()["infilling"], draw_infilling),
}
