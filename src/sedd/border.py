"""Check counts and JSON from outside, read files as text, and escape text for terminals. No torch here."""

import builtins
import json
import sys
import types
import typing
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, get_args, get_origin

LIMITS: Mapping[str, int] = {
    "count": 2**24,
    "samples": 2**24,
    "examples": 2**24,
    "steps": 2**20,
    "sampling_steps": 2**20,
    "max_steps": 2**20,
    "batch": 2**20,
    "judge_batch": 2**20,
    "draws": 2**20,
    "orders": 2**20,
    "length": 2**24,
    "gap": 2**24,
    "rows": 2**24,
    "width": 2**16,
    "states": 2**16,
    "repeats": 2**20,
    "clients": 2**10,
    "slots": 2**16,
    "queue": 2**20,
    "max_texts": 2**16,
    "max_connections": 2**16,
    "top_k": 2**31 - 1,
    "workers": 2**10,
    "model.width": 2**16,
    "model.depth": 2**10,
    "model.heads": 2**10,
    "model.cond_dim": 2**16,
    "model.seq_len": 2**20,
    "train.batch_size": 2**20,
    "train.grad_accumulation": 2**20,
    "train.eval_sequences": 2**24,
    "train.keep_checkpoints": 2**20,
    "budget.steps": 10**8 - 1,  # the names of checkpoints have eight digits
    "budget.tokens": 2**60,
    "vocab_size": 2**31 - 1,
    "vocab": 2**31 - 1,
    "bpe": 2**20,
    "labels": 2**16 - 1,
}
"""The largest value of each count; a larger one is a mistake, or asks for more memory than machines have."""
MAX_TEXT = 2**30
"""Bytes of a file that is read as a whole: templates, samples, results, tokenizers."""
MAX_RECORD = 2**24
"""Bytes of a JSON file that describes a model, a run or data; ours have some thousands."""
BIDIRECTIONAL = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder the text around them on a terminal."""


def check_count(name: str, value: int | float, least: int = 1, limit: str | None = None) -> None:
    """Refuse a count below ``least``, or above the largest of ``LIMITS``.

    Args:
        name: The option, for the message.
        value: Its value.
        least: The smallest that is allowed.
        limit: The key in `LIMITS`, if it is not the name.
    """
    if not value >= least:
        raise ValueError(f"{name} is {value}; it must be {least} or more")
    check_limit(name, value, limit)


def check_limit(name: str, value: int | float, limit: str | None = None) -> None:
    """Refuse a count above the largest of ``LIMITS``; the arguments are those of `check_count`."""
    if value > (most := LIMITS[limit or name]):
        raise ValueError(f"{name} is {value}; it must be {most:,} or less")


def check_fields(
    where: str,
    record: Any,
    kinds: Mapping[str, Any],
    *,
    required: Collection[str] = (),
    closed: bool = False,
    section: str = "",
) -> None:
    """Refuse a record from outside whose fields are not of these types.

    Args:
        where: What it is or where it is from, for the message.
        record: The record.
        kinds: The types of its fields, as in annotations.
        required: The fields that it must have.
        closed: Whether it may have no others.
        section: Precedes the names of fields in the message.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a {type(record).__name__}; it must be an object with fields")
    if closed and (unknown := sorted(set(record) - set(kinds))):
        raise ValueError(f"{where} has {section}{f', {section}'.join(unknown)}; it may have {', '.join(sorted(kinds))}")
    if missing := [name for name in required if name not in record]:
        raise ValueError(f"{where} has no {section}{missing[0]}")
    for name, value in record.items():
        if name in kinds and not is_of_type(value, kind := kinds[name]):
            is_plain = isinstance(kind, type) and not get_args(kind)
            shown = "mapping" if is_dataclass(kind) else kind.__name__ if is_plain else kind
            raise ValueError(f"{where} has {section}{name} {repr(value)[:80]}; it must be of type {shown}")


def is_of_type(value: Any, kind: Any) -> bool:
    """Return whether a value from JSON is of an annotated type; an integer is a float too, a mapping a dataclass."""
    inner = get_args(kind)
    match get_origin(kind) or kind:
        case types.UnionType:
            return any(is_of_type(value, option) for option in inner)
        case builtins.list:
            return isinstance(value, list) and all(is_of_type(item, inner[0]) for item in value)
        case builtins.dict:
            return isinstance(value, dict) and all(is_of_type(item, inner[1]) for item in value.values())
        case builtins.float:
            return isinstance(value, int | float) and not isinstance(value, bool)
        case builtins.int:
            return isinstance(value, int) and not isinstance(value, bool)
        case typing.Any:
            return True
    return isinstance(value, dict if is_dataclass(kind) else kind)


# Text that is shown ----------------------------------------------------------------------------------------


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


# Files -----------------------------------------------------------------------------------------------------


def read_text(path: Path, most: int | None = None) -> str:
    """Read a UTF-8 file as a whole; raise ValueError if that fails, or if it has more than ``most`` bytes."""
    most = MAX_TEXT if most is None else most
    try:
        content = read_bytes(path, most)
        return TextIOWrapper(BytesIO(content), encoding="utf-8").read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} could not be read as text: {error}") from None


def read_bytes(path: Path, most: int) -> bytes:
    """Read a file as a whole; raise ValueError if it has more than ``most`` bytes, as devices have that do not end."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes, too many to be read as a whole; split it")
    return content


def read_json(path: Path) -> Any:
    """Read a JSON file that describes a model, a run or data.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is not JSON, too large, or a device or pipe, whose content need not end.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    return parse_json(read_bytes(path, MAX_RECORD).decode())


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise a ValueError for everything that is not, or that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply to be read") from None
