"""Check counts and the types of plain data, and build dataclasses from JSON, YAML or command-line options."""

import builtins
import os
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
MAX_COUNT = 2**20  # where there is no other limit; a larger count is a mistake
MAX_SAMPLES = 2**24  # also of tokens in a sequence
MAX_VOCABULARY = 2**31 - 1
NAMES: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text, in quotes if it looks like a number",
    list: "a list, as in [a, b]",
    dict: "a mapping, as in {name: 0.5}",
    Any: "a number, text, true or false, a list or a mapping",
}
"""What a value of each type is called in messages."""
TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_shown = Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 80


def check_count(name: str, value: int | float, least: int | float = 1, most: int = MAX_COUNT) -> None:
    """Reject a count below ``least`` or above ``most``; ``name`` is the option, for the message."""
    if not value >= least:
        raise ValueError(f"{name} is {value}; it must be {least} or more")
    if value > most:
        raise ValueError(f"{name} is {value}; it must be {most:,} or less")


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    """Reject a value that is not one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")


def check_seed(seed: int) -> int:
    """Reject a seed that no generator takes, and return it."""
    if not hasattr(seed, "__index__") or not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed!r}; it must be a whole number in 0..2^63 − 1")
    return seed


def check_memory(least: int, what: str, advice: str) -> None:
    """Reject what takes more bytes than this machine has memory, before any are allocated."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if least > memory:
        raise ValueError(f"{what} at least {least:,} bytes, and this machine has a memory of {memory:,}; {advice}")


def check_fields(
    where: str, record: Any, kinds: Mapping[str, Any], *, required: Collection[str] = (), closed: bool = False
) -> None:
    """Reject a record from outside whose fields are not of these types; ``where`` is its name or source."""
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a {type(record).__name__}; it must be an object with fields")
    if closed and (unknown := sorted(set(record) - set(kinds))):
        raise ValueError(f"{where} has {', '.join(unknown)}; it may have {', '.join(sorted(kinds))}")
    if missing := [name for name in required if name not in record]:
        raise ValueError(f"{where} has no {missing[0]}")
    for name, kind in kinds.items():
        if name in record and not is_of_type(value := record[name], kind):
            shown = kind.__name__ if isinstance(kind, type) and not get_args(kind) else kind
            raise ValueError(f"{where} has {name} {repr(value)[:80]}; it must be of type {shown}")


def is_of_type(value: Any, kind: Any) -> bool:
    """Return whether a value from JSON is of an annotated type; an integer is a float too."""
    inner = get_args(kind)
    match get_origin(kind) or kind:
        case types.UnionType:
            return any(is_of_type(value, option) for option in inner)
        case builtins.list:
            return isinstance(value, list) and all(is_of_type(item, inner[0]) for item in value)
        case builtins.dict:
            return isinstance(value, dict) and all(is_of_type(item, inner[1]) for item in value.values())
        case builtins.float | builtins.int as number:
            return isinstance(value, int | number) and not isinstance(value, bool)
        case typing.Any:
            return True
    return isinstance(value, kind)


def from_dict(kind: type[T], data: Any, section: str = "", root: type | None = None) -> T:
    """Build a dataclass whose fields are scalars, lists, mappings or dataclasses; text is converted to numbers.

    An error names the closest key to one that is unknown. ``section`` is the key of ``data`` within ``root``.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{section or 'the configuration'} is {_shown.repr(data)}; it must be a mapping of keys")
    prefix, hints, root = section and f"{section}.", get_type_hints(kind), root or kind
    for name in data:
        if name not in hints:
            known = {key.rpartition(".")[2]: key for key in (*_list_keys(root), *(f"{prefix}{own}" for own in hints))}
            close = get_close_matches(str(name), known, 1)
            meant = f"; did you mean {known[close[0]]}?" if close else ";"
            own = f"{section or 'the configuration'} has {', '.join(hints)}"
            raise ValueError(f"unknown option {_shown.repr(f'{prefix}{name}')}{meant} {own}")
    return kind(**{name: _convert(f"{prefix}{name}", value, hints[name], root) for name, value in data.items()})


def _list_keys(kind: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a dataclass: its fields, and those of the dataclasses in it."""
    for name, hint in get_type_hints(kind).items():
        yield f"{prefix}{name}"
        if is_dataclass(hint):
            yield from _list_keys(hint, f"{prefix}{name}.")  # type: ignore[arg-type]


def _convert(key: str, value: Any, kind: Any, root: type) -> Any:
    """Return a value as its type: numbers and truth values may be text, an integer may stand for a float."""
    inner = get_args(kind)
    match get_origin(kind) or kind:
        case types.UnionType:  # X | None
            return None if value is None else _convert(key, value, inner[0], root)
        case builtins.list if isinstance(value, list | tuple):
            return [_convert(f"{key}[{i}]", item, inner[0], root) for i, item in enumerate(value)]
        case builtins.dict if isinstance(value, Mapping):
            return {str(name): _convert(f"{key}.{name}", item, inner[1], root) for name, item in value.items()}
        case builtins.bool if str(value).lower() in TRUTH:
            return TRUTH[str(value).lower()]
        case (builtins.int | builtins.float) as number if not isinstance(value, bool):
            if isinstance(value, str | int | number):
                with suppress(ValueError, OverflowError):
                    return number(value)
        case builtins.str if isinstance(value, str):
            return value
        case typing.Any if _is_plain(value):
            return value
        case section if is_dataclass(section):
            return from_dict(section, value, key, root)  # type: ignore[arg-type]
    raise ValueError(f"{key} is {_shown.repr(value)}; it must be {NAMES[get_origin(kind) or kind]}")


def _is_plain(value: Any) -> bool:
    """Return whether a value can be stored as JSON."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    return value is None or isinstance(value, str | int | float)
