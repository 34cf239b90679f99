"""Texts as they are shown, separated from each other."""

import re
from collections.abc import Sequence

_SEPARATOR = re.compile(r"^── sample \d+ ─+\n", re.MULTILINE)


def separator(number: int) -> str:
    """Return the line before text ``number``, counted from 1."""
    return f"── sample {number} ".ljust(60, "─")


def without_stop(text: str, stops: Sequence[str], start: int = 0, may_go_on: bool = False) -> str:
    """Return the text before the first of the stop strings that begins at ``start`` or later.

    Args:
        text: The text.
        stops: Strings that end it; they are not part of it.
        start: Where the search begins.
        may_go_on: Leave out, too, an end that could be the beginning of a stop string.
    """
    ends = [at for stop in stops if (at := text.find(stop, start)) >= 0]
    if may_go_on:
        beginnings = [stop[:count] for stop in stops for count in range(1, len(stop))]
        ends += [len(text) - len(part) for part in beginnings if text.endswith(part, start)]
    return text[: min(ends, default=len(text))]


def split_texts(content: str) -> list[str] | None:
    """Return the texts of a file in which each follows its `separator`; None for any other file."""
    if _SEPARATOR.match(content) is None:
        return None
    return [text.removesuffix("\n") for text in _SEPARATOR.split(content)[1:]]
