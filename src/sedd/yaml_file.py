"""Read settings from YAML or JSON as plain data."""

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from sedd.files import parse_json, read_text

MAX_NESTING = 64  # levels of lists and mappings in settings; ours have two
MAX_SETTINGS = 2**18  # bytes of a file of settings; ours have some thousands


def read_settings(path: Path) -> dict[Any, Any]:
    """Read a mapping from a YAML or JSON file; an empty file is an empty mapping."""
    found = parse_yaml(str(path), read_text(path, MAX_SETTINGS))
    if not isinstance(found, dict | None):
        raise ValueError(f"{path} holds a {type(found).__name__}; write keys and values, as in optim: {{lr: 0.001}}")
    return found or {}


def parse_yaml(where: str, text: str) -> Any:
    """Parse YAML without tags and aliases.

    Args:
        where: The file or option, for the message.
        text: YAML, which JSON is too, except for escaped pairs of surrogates, as in the JSON of an emoji.
    """
    try:
        return parse_json(text)
    except ValueError:
        pass
    try:
        _check_events(text)
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{where} cannot be read as YAML: {error.problem or error.context}{line}") from None
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: of a date with the month 13
        raise ValueError(f"{where} cannot be read as YAML: {str(error).splitlines()[0]}") from None


def _check_events(text: str) -> None:
    """Reject what settings never need: deep nesting, and aliases, by which a short text can stand for a long one.

    The text is read as a sequence of events: a parser of whole documents calls itself at each level.
    """
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise ValueError(f"it is nested more than {MAX_NESTING} levels deep; settings have two or three")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has the alias *{event.anchor}; write the value itself")
        if isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None) is not None:
            raise ValueError(f"it has the tag {event.tag}; leave it out")
