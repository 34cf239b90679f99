"""The options of commands that sample, derived from the fields of `SamplingSettings`."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from sedd.generate.settings import SETTINGS, SamplingSettings, parse_options, parse_steps

F = TypeVar("F", bound=Callable[..., Any])

PANEL = "Sampling options"
OPTION_HELP = (
    "Option of one sampler: theta=0.5 for theta; sites=2 for gibbs; strategy=loop or eta=0.02 for remask; "
    "direction=forward for ordered; bound=0.1 for entropy; pad=-1 for confidence or entropy, to reveal padding as any "
    "other token. Repeatable."
)


def sampling_options(command: F) -> F:
    """Replace the ``**settings`` of a command by one option per field; `sampling_settings` reads them."""
    signature = inspect.signature(command)
    *unchanged, _ = signature.parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(name), annotation=_annotation(name))
        for name in SETTINGS
    ]
    annotation = Annotated[list[str] | None, typer.Option("--option", help=OPTION_HELP, rich_help_panel=PANEL)]
    added.append(inspect.Parameter("options", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    command.__signature__ = signature.replace(parameters=[*unchanged, *added])  # type: ignore[attr-defined]
    hints = {name: hint for name, hint in command.__annotations__.items() if name != "settings"}
    command.__annotations__ = hints | {parameter.name: parameter.annotation for parameter in added}
    return command


def _default(name: str) -> Any:
    default = SETTINGS[name].default
    return str(default) if name == "steps" else default


def _annotation(name: str) -> Any:
    """Return the type and help text of an option; steps are text, since they may be ``inf``."""
    kind: Any = str if name == "steps" else SETTINGS[name].type
    return Annotated[kind, typer.Option(help=SETTINGS[name].metadata["help"], rich_help_panel=PANEL)]


def sampling_settings(settings: dict[str, Any]) -> SamplingSettings:
    """Build settings from the options that `sampling_options` added to a command."""
    values = {**settings, "steps": parse_steps(settings["steps"]), "options": parse_options(settings["options"])}
    return SamplingSettings(**values)
