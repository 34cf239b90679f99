"""Texts as they are shown, separated from each other. No torch here."""

import re

_SEPARATOR = re.compile(r"^── sample \d+ ─+\n", re.MULTILINE)


def separator(number: int) -> str:
    """Return the line before text ``number``, counted from 1."""
    return f"── sample {number} ".ljust(60, "─")


def split_texts(content: str) -> list[str] | None:
    """Return the texts of a file in which each follows its `separator`; None for any other file."""
    if _SEPARATOR.match(content) is None:
        return None
    return [text.removesuffix("\n") for text in _SEPARATOR.split(content)[1:]]
