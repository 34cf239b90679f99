"""The options of commands that sample, derived from the fields of `SamplingSettings`."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from sedd.cli.root import count_of
from sedd.sampling_settings import SETTINGS, SamplingSettings, parse_options, parse_steps
from sedd.training.config import RunConfig

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


def describe_sampling(sampling: SamplingSettings, config: RunConfig | None) -> str:
    """Return the settings in a line: 64 steps, seed 3, temperature 0.6.

    Args:
        sampling: The settings; of those that need not be given, the ones that differ from their defaults are named.
        config: The configuration of the model, if it is known; an autoregressive one has no steps.
    """
    others = [name for name in SETTINGS if name not in ("sampler", "steps", "seed")]
    return ", ".join(
        [
            *([f"sampler {sampling.sampler}"] if sampling.sampler else []),
            *([] if config and config.objective == "autoregressive" else [_describe_steps(sampling.steps)]),
            f"seed {sampling.seed}",
            *(
                f"{name.replace('_', '-')} {value}"
                for name in others
                if (value := getattr(sampling, name)) != SETTINGS[name].default
            ),
            *(f"{name} {value}" for name, value in sampling.options.items()),
        ]
    )


def _describe_steps(steps: int | None) -> str:
    return "steps inf" if steps is None else count_of(steps, "step")
