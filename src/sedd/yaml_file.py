"""Read settings from YAML or JSON as plain data."""

from contextlib import suppress
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
    """Parse YAML without tags and aliases, or JSON; ``where`` is the file or option, for the message."""
    with suppress(ValueError):
        return parse_json(text)  # YAML too, except for escaped pairs of surrogates, as in the JSON of an emoji
    try:
        depth = 0  # the parser of whole documents calls itself at each level, and that of events does not
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_NESTING:
                raise ValueError(f"it is nested more than {MAX_NESTING} levels deep; settings have two or three")
            if isinstance(event, yaml.AliasEvent):  # by which a short text can stand for a long one
                raise ValueError(f"it has the alias *{event.anchor}; write the value itself")
            if isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None) is not None:
                raise ValueError(f"it has the tag {event.tag}; leave it out")
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: of a date with the month 13
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise ValueError(f"{where} cannot be read as YAML: {problem or str(error).splitlines()[0]}{line}") from None
