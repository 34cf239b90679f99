"""Texts as they are shown: separated from each other, and without characters that would control a terminal.

No torch here.
"""

import re
import unicodedata

_SEPARATOR = re.compile(r"^── sample \d+ ─+\n", re.MULTILINE)


def visible(text: str, line_ends: bool = True) -> str:
    """Replace control characters by their escapes; tabs are kept, and line ends if ``line_ends``."""
    kept = "\n\t" if line_ends else "\t"
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in ("Cc", "Cs") and character not in kept
        else character
        for character in text
    )


def separator(number: int) -> str:
    """Return the line before text ``number``, counted from 1."""
    return f"── sample {number} ".ljust(60, "─")


def split_texts(content: str) -> list[str] | None:
    """Return the texts of a file in which each follows its `separator`; None for any other file."""
    if _SEPARATOR.match(content) is None:
        return None
    return [text.removesuffix("\n") for text in _SEPARATOR.split(content)[1:]]
