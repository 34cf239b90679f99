"""Bound how much longer a tokenizer.json can make a text, before anything is encoded with it."""

import base64
from collections.abc import Iterator
from typing import Any

from sedd.tokenizer.base import DEFINITION

MAX_GROWTH = 64  # how many times as long a tokenizer may make a text; published ones reach 40 at worst
# the most characters that a step of the Unicode standard, or of bytes, makes of one
UNICODE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "BertNormalizer": 12, "ByteLevel": 4}
INSERTED = {"Replace": "content", "Prepend": "prepend", "Metaspace": "replacement"}  # the text put in


def check_growth(definition: dict[str, Any]) -> None:
    """Reject steps that may multiply a text; the JSON is as the `tokenizers` library writes it."""
    for part in ("normalizer", "pre_tokenizer"), ("decoder",):
        growth = _growth([step for name in part for step in _steps(definition.get(name))])
        if growth > MAX_GROWTH:
            shown = f"{growth:,.0f}" if growth < 1e12 else "over 10^12"
            what = f"the {' and the '.join(part)} in {DEFINITION} may make a text {shown} times as long"
            raise ValueError(f"{what}; {MAX_GROWTH} times is the most")


def _growth(steps: list[dict[str, Any]]) -> float:
    """Return the most characters that these steps may make of one.

    The length afterwards is at most factor · length + constant. A step of the standard counts after the author of the
    file has put in other characters than ASCII: in a text of your own it seldom finds anything that grows.
    """
    factor, constant, is_foreign = 1.0, 0.0, False
    for step in steps:
        kind, ratio, added = str(step.get("type")), 1.0, float(bool(step.get("add_prefix_space")))
        inserted = str(step.get(INSERTED.get(kind, ""), ""))
        match kind:
            case "Replace":
                pattern = step["pattern"].get("String", "")
                # a regular expression may match the empty text between any two characters
                ratio = max(1.0, len(inserted) / len(pattern)) if pattern else 1.0 + len(inserted)
            case "Precompiled":
                inserted = _longest_entry(step["precompiled_charsmap"])
                ratio = max(1.0, len(inserted))
            case "Prepend":
                added = len(inserted)
            case "Metaspace" | "WordPiece":
                added = 1.0
            case "BPEDecoder" | "CTC":
                ratio = 2.0  # what they replace by a space may be empty
            case _:
                ratio = UNICODE.get(kind, 1) if is_foreign else 1.0
        factor, constant = factor * ratio, constant * ratio + added
        is_foreign = is_foreign or not inserted.isascii() or kind == "ByteLevel"
    return factor + constant


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a component, which may be a sequence of sequences."""
    match component:
        case {"type": "Sequence"}:
            for name in ("normalizers", "pretokenizers", "decoders"):
                for step in component.get(name, []):
                    yield from _steps(step)
        case dict():
            yield component


def _longest_entry(charsmap: str) -> str:
    """Return the longest replacement in a map of SentencePiece: a trie after its size, then texts that end in zero."""
    content = base64.b64decode(charsmap)
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max((text.decode(errors="replace") for text in texts.split(b"\0")), key=len, default="")
