"""The options of commands that sample, derived from the fields of `SamplingSettings`."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from sedd.generate.settings import SETTINGS, SamplingSettings, parse_options, parse_steps

F = TypeVar("F", bound=Callable[..., Any])

PANEL = "Sampling options"
OPTION_HELP = "Option of the sampler, as in theta=0.5, eta=0.02, strategy=loop, direction=forward, sites=2. Repeatable."


def sampling_options(command: F) -> F:
    """Replace the ``**settings`` of a command by one option per field; `sampling_settings` reads them."""
    signature = inspect.signature(command)
    *own, _ = signature.parameters.values()
    made = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(name), annotation=_annotation(name))
        for name in SETTINGS
    ]
    annotation = Annotated[list[str] | None, typer.Option("--option", help=OPTION_HELP, rich_help_panel=PANEL)]
    made.append(inspect.Parameter("options", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    command.__signature__ = signature.replace(parameters=[*own, *made])  # type: ignore[attr-defined]
    hints = {name: hint for name, hint in command.__annotations__.items() if name != "settings"}
    command.__annotations__ = hints | {parameter.name: parameter.annotation for parameter in made}
    return command


def _default(name: str) -> Any:
    default = SETTINGS[name].default
    return str(default) if name == "steps" else default


def _annotation(name: str) -> Any:
    """Return the type and help text of an option; steps are text, since they may be ``inf``."""
    kind: Any = str if name == "steps" else SETTINGS[name].type
    return Annotated[kind, typer.Option(help=SETTINGS[name].metadata["help"], rich_help_panel=PANEL)]


def sampling_settings(settings: dict[str, Any]) -> SamplingSettings:
    """Make settings from the options that `sampling_options` added to a command."""
    given = {**settings, "steps": parse_steps(settings["steps"]), "options": parse_options(settings["options"])}
    return SamplingSettings(**given)
