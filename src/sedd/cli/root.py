"""The Typer application, and what its commands share: common options, output and progress bars."""

import inspect
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from sedd import __version__, models, registry
from sedd.runtime.launch import find_launch
from sedd.schema import MAX_COUNT, MAX_SAMPLES, MAX_VOCABULARY, check_choice, check_count
from sedd.terminal import visible, warn
from sedd.training import networks
from sedd.training.config import PRECISIONS
from sedd.training.progress import progress_on_stderr

F = TypeVar("F", bound=Callable[..., Any])
stderr_progress = progress_on_stderr

ORDER = (
    "train sample infill trace serve eval score quality compare audit report info plan runs data cache import export "
    "push lm-eval"
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


class _PlainFlags:
    """Show no type next to options that take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """A command whose integers are checked against `LIMITS`."""

    def invoke(self, ctx: Any) -> Any:
        """Reject counts above their limits, then run; the configuration of train and plan has limits of its own."""
        if self.name not in ("train", "plan") or ctx.parent.parent is not None:
            check_limits(ctx.params)
        return super().invoke(ctx)


def check_limits(options: Mapping[str, Any]) -> None:
    """Reject an integer above its limit in `LIMITS`, by default `schema.MAX_COUNT`."""
    for name, value in options.items():
        if isinstance(value, int) and name not in NO_COUNTS:
            check_count(name.replace("_", "-"), value, -math.inf, LIMITS.get(name, MAX_COUNT))


class Group(_PlainFlags, TyperGroup):
    """A group of commands."""


class _Root(Group):
    """All commands in their order; messages of usage errors, which quote the command line, have no control codes."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.split().index)

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _visible_usage_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _visible_usage_errors():
            return super().invoke(ctx)


@contextmanager
def _visible_usage_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str):
            error.message = visible(message)  # type: ignore[attr-defined]
        raise


class App(typer.Typer):
    """A Typer application of such commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": Group, **options})

    def command(self, *args: Any, **options: Any) -> Callable[[F], F]:
        """Register a command."""
        return super().command(*args, **{"cls": Command, **options})


BUNDLED = models.built_in_names()
app = App(
    cls=_Root,
    help="Score entropy discrete diffusion: train, sample and evaluate diffusion models of text and other sequences.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    epilog=f"Bundled models: {', '.join(BUNDLED)}." if BUNDLED else None,
)


def _print_version(wanted: bool | None) -> None:
    if wanted:
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


# Options ---------------------------------------------------------------------------------------------------


def takes(options: Iterable[inspect.Parameter]) -> Callable[[F], F]:
    """Let a function take these options, by name, as its ``**`` parameter."""
    added = list(options)

    def change(function: F) -> F:
        *own, _ = inspect.signature(function).parameters.values()
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in added]
        parameters = {parameter.name: parameter for parameter in (*own, *keywords)}
        function.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        function.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        return function

    return change


def keywords(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function that are passed by name only: options of the command that calls it."""
    return [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def list_names(names: registry.Registry, default: str | None = None, hidden: Collection[str] = ()) -> str:
    """List the names of a registry for a help text, but not ``hidden``; other packages may have added some."""
    shown = (name for name in names.names if name not in hidden)
    return ", ".join(f"{name} (default)" if name == default else name for name in shown)


def _find_model(context: typer.Context, name: Path | None) -> Path | None:
    return name if context.resilient_parsing else find_model(name)


def _allow_networks(names: list[str] | None) -> list[str] | None:
    for name in names or ():
        networks.allow(name)
    return names


def _check_device(name: str | None) -> str | None:
    if name is not None and re.fullmatch(r"cpu|mps|cuda(:\d+)?", name) is None:
        raise ValueError(f"device is {name!r}; choose one of cpu, cuda, cuda:N, mps")
    return name


def check_batch(value: int | None) -> int | None:
    """Reject a batch without a sequence; None: as many as suit the device."""
    if value is not None:
        check_count("batch", value)
    return value


def check_precision(precision: str | None) -> str | None:
    """Reject a precision that inference does not have."""
    if precision is not None:
        check_choice("precision", precision, PRECISIONS)
    return precision


SOURCES_HELP = (
    "Files or folders (.txt .jsonl .json .csv .parquet .smi .fasta .npy .bin .ds, also compressed), hf:NAME[:SPLIT] (a "
    "Hugging Face dataset)"
)
TOKENIZER_HELP = (
    f"Tokenizer: {', '.join(['bytes', 'chars', 'bpe:SIZE', 'gpt2', 'ints', *registry.TOKENIZERS.plugins])}, "
    "or the path of a tokenizer.json; chars is fitted to the data, bpe to what is not held out. By default that of the "
    "recipe; sedd train without a recipe chooses one for the data; else bytes."
)
PACKING_HELP = "packed (default): one token stream, cut into blocks; lines: one training sequence per line or row."
LABEL_HELP = "Column of a table that holds the label of each row; implies --packing lines."
MODEL_HELP = (
    "Folder of a run, whose best checkpoint is used, of one of its checkpoints, or of an imported model; or a name on "
    "the Hugging Face Hub, owner/name" + (f"; or a bundled model: {', '.join(BUNDLED)}." if BUNDLED else ".")
)
DEFAULT_HELP = FIRST_HELP = ""
if models.DEFAULT in BUNDLED:
    DEFAULT_HELP = f" By default {models.DEFAULT}."
    FIRST_HELP = (
        " May be left out: the first argument is a model if it is a bundled one, a path that holds a model, or a name "
        f"owner/name; else {models.DEFAULT} is used."
    )

_model = {"show_default": False, "autocompletion": models.built_in_names}
ModelFolder = Annotated[Path, typer.Argument(help=MODEL_HELP, callback=_find_model, **_model)]
OptionalModel = Annotated[Path | None, typer.Argument(help=MODEL_HELP + DEFAULT_HELP, callback=_find_model, **_model)]
FirstModel = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP + FIRST_HELP, **_model)]
"""A model that may be left out before other arguments; `split_model` tells them apart."""
Networks = Annotated[
    list[str] | None,
    typer.Option(
        "--network",
        callback=_allow_networks,
        help="Import this network, which a model names that you did not train here: my_package:MyNet. Repeatable.",
    ),
]
Column = Annotated[
    str | None, typer.Option(help="Column of a table that holds the text; by default recognized by its name.")
]
Encoding = Annotated[
    str | None,
    typer.Option(help="Encoding of text files, such as latin-1; by default utf-8; a tokenizer of bytes needs none."),
]
Device = Annotated[
    str | None, typer.Option(callback=_check_device, help="cpu, cuda or cuda:N; by default the GPU if there is one.")
]
ModelDevice = Annotated[
    str | None,
    typer.Option(callback=_check_device, help="cpu, cuda, cuda:N or mps; by default the GPU of CUDA if there is one."),
]
Precision = Annotated[
    str | None,
    typer.Option(
        help="Precision of matrix products: float32 or bfloat16; by default, on a GPU, that of training.",
        callback=check_precision,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON records, one per line.")]


# Output ----------------------------------------------------------------------------------------------------


def print_record(record: dict[str, Any], as_json: bool) -> None:
    """Print a record as one line per entry, or as JSON."""
    if as_json:
        print(json.dumps(record))
        return
    for name, value in record.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if isinstance(value, float) else value
        show(f"{name.replace('_', ' '):26s} {shown}")


def show(text: str) -> None:
    """Print text that may come from a file or a name: on a terminal with control characters escaped, else as it is."""
    print(visible(text) if sys.stdout.isatty() else text, flush=True)


def announce(work: str, model: Path | None = None) -> None:
    """State on stderr what a command is about to do, once its arguments are checked; of several processes, rank 0."""
    if find_launch().rank == 0:
        warn(f"{model_name(model)}: {work}" if model else work)


def count_of(number: int, noun: str) -> str:
    """Return a number of things: 1 sample, 4 samples."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def model_name(folder: Path) -> str:
    """Return the name of a bundled model, or the path of any other."""
    return folder.name if folder.parent == models.built_in_folder() else str(folder)


def check_out(out: Path) -> None:
    """Reject a file that cannot be written, before any work; leave nothing behind."""
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file in it with --out")
    if out.exists() and not out.is_file():  # a device, such as /dev/null
        return
    folder = next(path for path in out.absolute().parents if path.exists())
    with _writing_to(folder):
        tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Create the folder of ``out``; raise ValueError if it cannot be written to."""
    with _writing_to(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        yield


@contextmanager
def _writing_to(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be written to ({error.strerror}); choose another --out") from None


# Models ----------------------------------------------------------------------------------------------------


def find_model(name: Path | str | None) -> Path:
    """Return the folder of a model: ``name`` itself, a bundled model, or one on the Hub; None: the default."""
    from sedd.training import checkpoint

    if name is None:
        folder = models.default_model()
        announce(f"no model was named; using {models.DEFAULT}")
        return folder
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

    The first argument is a model if it is bundled, a path that holds a model, or has the form of a name on the Hub. If
    not, it is one of the others, and the model is the default. ``fits`` says whether a text can be one of the others;
    if not, it was meant as a model.
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
