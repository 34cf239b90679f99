"""The Typer application, and what its commands share: common options, output and progress bars."""

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from sedd import __version__, registry
from sedd.config import PRECISIONS, check_choice

ORDER = (
    *("train", "sample", "infill", "trace", "eval", "score", "quality", "compare", "report", "info", "plan", "runs"),
    *("data", "cache", "import", "export", "push", "lm-eval", "bench", "demo"),
)
"""The order of the commands in ``sedd --help``: as a newcomer needs them."""


def _without_flag_types(params: list[Any]) -> list[Any]:
    """Show no type beside options that take no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help fits a reader."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, also for the help."""
        return _without_flag_types(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose help fits a reader."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, also for the help."""
        return _without_flag_types(super().get_params(ctx))


class _OrderedCommands(Group):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)


class App(typer.Typer):
    """A Typer application of such commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": Group, **options})

    def command(self, *args: Any, **options: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Register a command."""
        return super().command(*args, **{"cls": Command, **options})


app = App(
    cls=_OrderedCommands,
    help="Score entropy discrete diffusion: train, sample and evaluate diffusion models of text and other sequences.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
)


def list_names(names: registry.Registry, default: str | None = None, hidden: Collection[str] = ()) -> str:
    """List the names of a registry for a help text, but not ``hidden``; other packages may have added some."""
    shown = (name for name in names.names if name not in hidden)
    return ", ".join(f"{name} (default)" if name == default else name for name in shown)


TOKENIZER_HELP = (
    f"Tokenizer: {', '.join(['bytes (default)', 'chars', 'bpe:SIZE', 'gpt2', 'ints', *registry.TOKENIZERS.plugins])}, "
    "or the path of a tokenizer.json. chars and bpe are fitted to the data."
)
PACKING_HELP = "packed (default): one token stream, cut into blocks; lines: one training sequence per line or row."
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON records, one per line.")]


def _find_model(context: typer.Context, name: Path) -> Path:
    """Return the folder of a model; refuse one that holds none before torch is imported."""
    return name if context.resilient_parsing else find_model(name)


ModelFolder = Annotated[
    Path,
    typer.Argument(
        help="Folder of a run, of one of its checkpoints, or of an imported model; or a name on the Hugging Face Hub, "
        "owner/name.",
        show_default=False,
        callback=_find_model,
    ),
]
Column = Annotated[
    str | None, typer.Option(help="Column of a table that holds the text; by default recognized by its name.")
]
Encoding = Annotated[
    str | None,
    typer.Option(help="Encoding of text files, such as latin-1; by default utf-8; a tokenizer of bytes needs none."),
]


def _check_device(name: str | None) -> str | None:
    """Refuse what is no device, before torch is imported."""
    if name is not None and re.fullmatch(r"cpu|mps|cuda(:\d+)?", name) is None:
        raise ValueError(f"device is {name!r}; choose one of cpu, cuda, cuda:N, mps")
    return name


Device = Annotated[
    str | None, typer.Option(callback=_check_device, help="cpu, cuda or cuda:N; by default the GPU if there is one.")
]
ModelDevice = Annotated[
    str | None,
    typer.Option(callback=_check_device, help="cpu, cuda, cuda:N or mps; by default the GPU of CUDA if there is one."),
]


def _print_version(version: bool | None) -> None:
    if version:
        print(f"sedd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = None,
) -> None:
    pass


def print_record(record: dict[str, Any], as_json: bool) -> None:
    """Print a record as one line per entry, or as JSON."""
    if as_json:
        print(json.dumps(record))
        return
    for name, value in record.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if isinstance(value, float) else str(value)
        print(f"{name.replace('_', ' '):26s} {shown}")


@contextmanager
def stderr_progress(label: str, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr; yields a callback that takes the work done and the total."""
    from sedd.training.progress import progress_on_stderr

    with progress_on_stderr(label, shown) as on_progress:
        yield on_progress


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Create the folder of ``out``; raise ValueError if it cannot be written to."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ValueError(f"{out} cannot be written to ({error.strerror}); choose another --out") from None


def check_precision(precision: str | None) -> str | None:
    """Refuse a precision that inference does not have; the callback of options."""
    if precision is not None:
        check_choice("precision", precision, PRECISIONS)
    return precision


def find_model(name: Path) -> Path:
    """Return the folder of a model: ``name`` itself, or the files of that name on the Hugging Face Hub."""
    from sedd import checkpoint, hub

    try:
        checkpoint.peek_model(name)
    except ValueError:
        published = (".safetensors", ".bin", ".ckpt", ".pt", ".pth")
        has_weights = name.is_dir() and any(file.suffix in published for file in name.iterdir())
        if not has_weights and (name.exists() or not hub.is_repo_id(str(name))):
            raise
        return hub.fetch(name)
    return name
