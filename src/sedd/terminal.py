"""Escape untrusted text for terminals, and print messages on stderr."""

import sys
import unicodedata

BIDIRECTIONAL = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder the text around them on a terminal."""


def visible(text: str, line_ends: bool = True) -> str:
    """Replace control characters by their escapes; tabs are kept, and line ends if ``line_ends``."""
    kept = "\n\t" if line_ends else "\t"
    return "".join(
        character.encode("unicode_escape").decode() if _controls(character) and character not in kept else character
        for character in text
    )


def _controls(character: str) -> bool:
    """Whether a character would control a terminal, or has no encoding."""
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in BIDIRECTIONAL


def warn(text: str) -> None:
    """Print a message on stderr, in one line and without control characters."""
    print(f"sedd: {visible(text, line_ends=False)}", file=sys.stderr)
