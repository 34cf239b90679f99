"""The Typer application, and what its commands share: common options, output and progress bars."""

import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from sedd import __version__, models, registry
from sedd.runtime.launch import find_launch
from sedd.schema import MAX_COUNT, MAX_SAMPLES, MAX_VOCABULARY, check_choice, check_count
from sedd.terminal import visible, warn
from sedd.training import networks
from sedd.training.config import PRECISIONS

ORDER = (
    *(
        "train",
        "sample",
        "infill",
        "trace",
        "serve",
        "eval",
        "score",
        "quality",
        "compare",
        "audit",
        "report",
        "info",
        "plan",
        "runs",
    ),
    *("data", "cache", "import", "export", "push", "lm-eval"),
)
"""The order of the commands in ``sedd --help``: as a newcomer needs them."""

LIMITS: Mapping[str, int] = {
    **dict.fromkeys(("count", "samples", "length"), MAX_SAMPLES),
    **dict.fromkeys(("slots", "max_texts", "max_connections"), 2**16),
    "workers": 2**10,
    "top_k": MAX_VOCABULARY,
}
"""The largest values of options that count; of the others `schema.MAX_COUNT`."""
NO_COUNTS = ("seed", "port")
"""Integers that count nothing."""


def _without_flag_types(params: list[Any]) -> list[Any]:
    """Show no type beside options that take no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help fits a reader, and whose counts have limits."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, also for the help."""
        return _without_flag_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Reject counts above their limits, then run the command.

        Those of ``sedd train`` and ``sedd plan`` are keys of the configuration, which has limits of its own.
        """
        if self.name not in ("train", "plan") or ctx.parent.parent is not None:
            check_limits(ctx.params)
        return super().invoke(ctx)


def check_limits(options: Mapping[str, Any]) -> None:
    """Reject an integer above its limit in `LIMITS`, by default `schema.MAX_COUNT`."""
    for name, value in options.items():
        if isinstance(value, int) and name not in NO_COUNTS:
            check_count(name.replace("_", "-"), value, -math.inf, LIMITS.get(name, MAX_COUNT))


class Group(TyperGroup):
    """A group of commands whose help fits a reader."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, also for the help."""
        return _without_flag_types(super().get_params(ctx))


@contextmanager
def _visible_usage_errors() -> Iterator[None]:
    """Escape control characters in the messages of errors of usage, which quote the command line."""
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str):
            error.message = visible(message)  # type: ignore[attr-defined]
        raise


class _OrderedCommands(Group):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _visible_usage_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _visible_usage_errors():
            return super().invoke(ctx)


class App(typer.Typer):
    """A Typer application of such commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": Group, **options})

    def command(self, *args: Any, **options: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Register a command."""
        return super().command(*args, **{"cls": Command, **options})


_BUILT_IN = models.built_in_names()
app = App(
    cls=_OrderedCommands,
    help="Score entropy discrete diffusion: train, sample and evaluate diffusion models of text and other sequences.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    epilog=f"Models in the box: {', '.join(_BUILT_IN)}." if _BUILT_IN else None,
)


def list_names(names: registry.Registry, default: str | None = None, hidden: Collection[str] = ()) -> str:
    """List the names of a registry for a help text, but not ``hidden``; other packages may have added some."""
    shown = (name for name in names.names if name not in hidden)
    return ", ".join(f"{name} (default)" if name == default else name for name in shown)


TOKENIZER_HELP = (
    f"Tokenizer: {', '.join(['bytes', 'chars', 'bpe:SIZE', 'gpt2', 'ints', *registry.TOKENIZERS.plugins])}, "
    "or the path of a tokenizer.json; chars is fitted to the data, bpe to what is not held out. By default that of the "
    "recipe; sedd train without a recipe chooses one for the data; else bytes."
)
PACKING_HELP = "packed (default): one token stream, cut into blocks; lines: one training sequence per line or row."
LABEL_HELP = "Column of a table that holds the label of each row; implies --packing lines."
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON records, one per line.")]


def _find_model(context: typer.Context, name: Path | None) -> Path | None:
    """Return the folder of a model; reject one that holds none."""
    return name if context.resilient_parsing else find_model(name)


MODEL_HELP = (
    "Folder of a run, whose best checkpoint is used, of one of its checkpoints, or of an imported model; or a name on "
    "the Hugging Face Hub, owner/name" + (f"; or a model in the box: {', '.join(_BUILT_IN)}." if _BUILT_IN else ".")
)
_HAS_DEFAULT = models.DEFAULT in _BUILT_IN
DEFAULT_HELP = f" By default {models.DEFAULT}." if _HAS_DEFAULT else ""
FIRST_HELP = (
    f" May be left out: the first argument is a model if it is one in the box, a path that holds a model, or a name "
    f"owner/name; else {models.DEFAULT} is used."
    if _HAS_DEFAULT
    else ""
)
ModelFolder = Annotated[
    Path,
    typer.Argument(help=MODEL_HELP, show_default=False, callback=_find_model, autocompletion=models.built_in_names),
]
OptionalModel = Annotated[
    Path | None,
    typer.Argument(
        help=MODEL_HELP + DEFAULT_HELP, show_default=False, callback=_find_model, autocompletion=models.built_in_names
    ),
]


def _allow_networks(names: list[str] | None) -> list[str] | None:
    """Allow the networks that the user named to be imported."""
    for name in names or ():
        networks.allow(name)
    return names


Networks = Annotated[
    list[str] | None,
    typer.Option(
        "--network",
        callback=_allow_networks,
        help="Import this network, which a model names that you did not train here: my_package:MyNet. Repeatable.",
    ),
]
FirstModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=MODEL_HELP + FIRST_HELP,
        show_default=False,
        autocompletion=models.built_in_names,
    ),
]
"""A model that may be left out before other arguments; `split_model` tells them apart."""
Column = Annotated[
    str | None, typer.Option(help="Column of a table that holds the text; by default recognized by its name.")
]
Encoding = Annotated[
    str | None,
    typer.Option(help="Encoding of text files, such as latin-1; by default utf-8; a tokenizer of bytes needs none."),
]


def _check_device(name: str | None) -> str | None:
    """Reject an invalid device name."""
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
        show(f"{name.replace('_', ' '):26s} {shown}")


def show(text: str) -> None:
    """Print text that may come from a file or a name: on a terminal with control characters escaped, else as it is."""
    print(visible(text) if sys.stdout.isatty() else text, flush=True)


def announce(work: str) -> None:
    """State on stderr what a command is about to do, after its arguments are checked and before the work.

    Of several processes the first prints it.
    """
    if find_launch().rank == 0:
        warn(work)


def check_batch(value: int | None) -> int | None:
    """Refuse a batch without a sequence; None: as many as suit the device."""
    if value is not None:
        check_count("batch", value)
    return value


def count_of(number: int, noun: str) -> str:
    """Return a number of things: 1 sample, 4 samples."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def model_name(folder: Path) -> str:
    """Return a model as it is known: one in the box by its name, another by its path."""
    return folder.name if folder.parent == models.built_in_folder() else str(folder)


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


def check_out(out: Path) -> None:
    """Refuse a file that cannot be written, before any work; nothing is left behind."""
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file in it with --out")
    if out.exists() and not out.is_file():  # a device, such as /dev/null
        return
    folder = next(path for path in out.absolute().parents if path.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to ({error.strerror}); choose another --out") from None


def check_precision(precision: str | None) -> str | None:
    """Refuse a precision that inference does not have; the callback of options."""
    if precision is not None:
        check_choice("precision", precision, PRECISIONS)
    return precision


def check_file_name(name: Path | str) -> None:
    """Refuse a name that no file can have."""
    try:
        os.path.lexists(name) or os.stat(name)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{str(name)[:40]!r} … is no folder of a model ({reason}); name one") from None


def find_model(name: Path | str | None) -> Path:
    """Return the folder of a model: ``name`` itself, one in the box, or one on the Hub; None: the default."""
    from sedd.training import checkpoint

    if name is None:
        folder = models.default_model()
        announce(f"no model was named; using {models.DEFAULT}")
        return folder
    check_file_name(name)
    path = checkpoint.locate_model(name) or Path(name)
    try:
        checkpoint.peek_model(path)
    except ValueError:
        if not checkpoint.has_weights(path) and (path.exists() or not models.is_repo_id(str(path))):
            raise
        announce(f"{name}: {'published weights' if path.exists() else 'on the Hugging Face Hub, or in its cache'}")
        from sedd import hub

        return hub.fetch(path)
    return path


def split_model(
    first: str | None, others: Sequence[str], kind: str, fits: Callable[[str], bool] = lambda text: True
) -> tuple[Path, list[str]]:
    """Return the folder of the model and the other arguments of a command whose model may be left out.

    The first argument is a model if it is one in the box, a path that holds a model, or has the form of a name on the
    Hub. If not, it is one of the others, and the model is the default.

    Args:
        fits: Whether a text can be one of the others; if not, it was meant as a model.
    """
    from sedd.training import checkpoint

    if first is None:
        return find_model(None), list(others)
    is_model = checkpoint.holds_model(first) or models.built_in_model(first) is not None
    if is_model or (not os.path.exists(first) and models.is_repo_id(first)):
        return find_model(first), list(others)
    if not fits(first):
        raise ValueError(
            f"{first!r} is neither a model nor {kind}; a model is the folder of a run, of one of its checkpoints or "
            f"of what sedd import wrote, or a name on the Hub, owner/name; {models.list_built_in()}"
        )
    return find_model(None), [first, *others]
