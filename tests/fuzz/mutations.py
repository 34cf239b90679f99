"""Strategies that change valid documents and files a little, so that parsers come far before they refuse them."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 2**16, 2**31, 2**63, 2**64, 10**30, -(10**30)]),
    st.sampled_from([0.5, -0.0, 1e308, float("inf"), float("nan")]),
    st.sampled_from(["", "x", "../../etc/passwd", "\0", "\x1b[2J", "x" * 5000, "<u8", "O", "${oc.env:HOME}", "\ud800"]),
    st.text(max_size=8),
    st.sampled_from([[], {}, [[]], [0] * 5, {"a": 1}, {"": None}]),
    st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=2), max_leaves=3),
    st.just("DEEP"),
)
"""Values of JSON of every type, and of sizes that are traps."""
DEEP = "[" * 50_000 + "]" * 50_000


def paths(document: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values of a document."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [prefix, *(path for key, value in items for path in paths(value, (*prefix, key)))]


@st.composite
def changed_json(draw: st.DrawFn, document: Any) -> str:
    """Return a document as JSON in which some values were replaced, removed or renamed."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 2))):
        *place, last = draw(st.sampled_from(paths(document)[1:] or [()])) or (None,)
        if last is None:
            return json.dumps(draw(VALUES))
        inner = document
        for key in place:
            inner = inner[key]
        match draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"])):
            case "remove":
                del inner[last]
            case "add" if isinstance(inner, dict):
                inner[draw(st.text(max_size=5))] = copy.deepcopy(draw(VALUES))
            case _:
                inner[last] = copy.deepcopy(draw(VALUES))
    return json.dumps(document)


def deepen(text: str) -> str:
    """Replace the word DEEP, which stands for what is nested too deeply to be shown."""
    return text.replace('"DEEP"', DEEP)


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes, within: int | None = None) -> bytes:
    """Return a file in which some bytes were changed, cut out or put in, among the first ``within`` of them."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, min(len(changed), within or len(changed))))
        match draw(st.sampled_from(["change", "change", "cut", "insert", "truncate"])):
            case "change" if at < len(changed):
                changed[at] = draw(st.integers(0, 255))
            case "cut":
                del changed[at : at + draw(st.integers(1, 9))]
            case "insert":
                changed[at:at] = draw(st.binary(min_size=1, max_size=9))
            case _:
                del changed[at:]
    return bytes(changed)
