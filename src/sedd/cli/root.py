"""The Typer application, and what its commands share: common options, output and progress bars."""

import inspect
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ParameterInfo

from sedd import __version__, files, models, registry
from sedd.runtime.launch import find_launch
from sedd.schema import MAX_COUNT, MAX_SAMPLES, MAX_VOCABULARY, check_choice, check_count, check_seed
from sedd.terminal import visible, warn
from sedd.training import checkpoint, networks
from sedd.training.config import PRECISIONS

F = TypeVar("F", bound=Callable[..., Any])

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
LEAST: Mapping[str, int] = {"count": 1, "batch": 1, "samples": 0}
"""The smallest values of options that count, where what takes them does not check it."""
CHOICES: Mapping[str, Sequence[str]] = {
    "precision": PRECISIONS,
    "judge_precision": (*PRECISIONS, "float64"),
    "first_token": ("skipped", "scored"),
    "estimator": ("bound", "any-order", "forward", "backward", "random"),  # which of them fit depends on the model
    "format": ("sedd", "radd", "mdlm"),  # the keys of `hub.convert.LAYOUTS`
}
"""The values of options that have a choice."""


class _PlainFlags:
    """Show no type next to options that take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """A command whose options are checked."""

    def invoke(self, ctx: Any) -> Any:
        """Reject wrong options, then run; the configuration checks the options of train and plan."""
        check_device(ctx.params.get("device"))
        if self.name not in ("train", "plan"):
            check_limits(ctx.params)
            for name in ctx.params.get("network") or ():
                networks.allow(name)
        return super().invoke(ctx)


def check_limits(options: Mapping[str, Any]) -> None:
    """Reject integers outside of `LEAST` and `LIMITS`, seeds that no generator takes, and what is not in `CHOICES`."""
    for name, value in options.items():
        shown = name.replace("_", "-")
        if name == "seed":
            check_seed(value)
        elif isinstance(value, int) and name != "port":
            check_count(shown, value, LEAST.get(name, -math.inf), LIMITS.get(name, MAX_COUNT))
        elif value is not None and name in CHOICES:
            check_choice(shown, value, CHOICES[name])


def check_device(name: str | None) -> None:
    """Reject an invalid device name."""
    if name is not None and re.fullmatch(r"cpu|mps|cuda(:\d+)?", name) is None:
        raise ValueError(f"device is {name!r}; choose one of cpu, cuda, cuda:N, mps")


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


BUNDLED = models.built_in_names()
app = typer.Typer(
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


def command(name: str | None = None, group: typer.Typer = app, **settings: Any) -> Callable[[F], F]:
    """Register a function, whose parameters are declared as `parameters` reads them, as a command."""

    def register(function: F) -> F:
        about, _, _ = _parts(function)
        declared = _with_parameters(function, parameters(function))
        return group.command(name, cls=Command, help=about, **settings)(declared)

    return register


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function for Typer: those before ``*`` are arguments, those after it options.

    Their help is in ``Args:`` of its docstring, or in `COMMON`. Spellings of an option may follow its name there, in
    parentheses, and ``{names}`` stands for the names with which its type is annotated, which shells complete.
    """
    documented = COMMON | _read_help(_parts(function)[2])

    def declare(parameter: inspect.Parameter) -> inspect.Parameter:
        kind, names = parameter.annotation, ()
        if get_origin(kind) is Annotated:
            kind, names = get_args(kind)
        if parameter.name not in documented or isinstance(names, ParameterInfo):
            return parameter
        spelt, text = documented[parameter.name]
        if parameter.default is False and not spelt:
            spelt = [f"--{parameter.name.replace('_', '-')}"]  # without a --no- that Typer would add
        settings: Any = {"help": text.replace("{names}", ", ".join(names) or "none")}
        settings |= {"autocompletion": lambda: list(names)} if names else {}
        is_option = parameter.kind is parameter.KEYWORD_ONLY
        info = typer.Option(*spelt, **settings) if is_option else typer.Argument(**settings)
        return parameter.replace(annotation=Annotated[kind, info])

    return [*map(declare, inspect.signature(function).parameters.values())]


def keywords(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the options of a function, for a command that passes them on to it."""
    return [parameter for parameter in parameters(function) if parameter.kind is parameter.KEYWORD_ONLY]


def takes(options: Iterable[inspect.Parameter]) -> Callable[[F], F]:
    """Let a function take these options, by name, as its ``**`` parameter."""
    added = list(options)

    def change(function: F) -> F:
        *own, _ = inspect.signature(function).parameters.values()
        return _with_parameters(function, [*own, *added])

    return change


def _with_parameters(function: F, declared: Sequence[inspect.Parameter]) -> F:
    """Set the signature of a function, which Typer reads."""
    function.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in declared}
    return function


def _parts(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Split a docstring at ``Args:``."""
    return (inspect.getdoc(function) or "").partition("\n\nArgs:\n")


def _read_help(text: str) -> dict[str, tuple[list[str], str]]:
    """Return the spellings and the help of parameters by name, from the section ``Args:`` of a docstring."""
    _, *parts = re.split(r"^ {4}(\w+)(?: \((.+?)\))?: ", text, flags=re.MULTILINE)
    columns = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return {name: ((spelt or "").split(), " ".join(help.split())) for name, spelt, help in columns}


COMMON = _read_help(f"""
    sources: Files or folders (.txt .jsonl .json .csv .parquet .smi .fasta .npy .bin .ds, also compressed),
        hf:NAME[:SPLIT] (a Hugging Face dataset); to train, also a folder written by sedd data prepare.
    process: Noise process: {{names}}; by default absorbing.
    network: Import this network, which a model names that you did not train here: my_package:MyNet. Repeatable.
    protocol: How text is cut into sequences and which terms are counted: strict (default with a text), held-out
        (default without), text8p, sedd or mdlm (as in the published tables).
    tokenizer: Tokenizer: {", ".join(["bytes", "chars", "bpe:SIZE", "gpt2", "ints", *registry.TOKENIZERS.plugins])}, or
        the path of a tokenizer.json; chars is fitted to the data, bpe to what is not held out. The default comes
        from the recipe; sedd train without a recipe chooses one for the data; else bytes.
    packing: packed (default): one token stream, cut into blocks; lines: one training sequence per line or row.
    label: Column of a table that holds the label of each row; implies --packing lines.
    column: Column of a table that holds the text; by default recognized by its name.
    encoding: Encoding of text files, such as latin-1; by default utf-8; a tokenizer of bytes needs none.
    length: Tokens per sample; by default the model's sequence length.
    batch: Samples drawn at a time; affects speed and memory only.
    device: cpu, cuda or cuda:N; by default the GPU if there is one.
    precision: Precision of matrix products: float32 or bfloat16. By default a GPU uses the precision of training.
    as_json (--json): Print JSON records, one per line.
""")
"""Options of several commands."""
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


def _find_model(context: typer.Context, name: Path | None) -> Path | None:
    return name if context.resilient_parsing else find_model(name)


_model: dict[str, Any] = {"show_default": False, "autocompletion": models.built_in_names}
ModelFolder = Annotated[Path, typer.Argument(help=MODEL_HELP, callback=_find_model, **_model)]
OptionalModel = Annotated[Path | None, typer.Argument(help=MODEL_HELP + DEFAULT_HELP, callback=_find_model, **_model)]
FirstModel = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP + FIRST_HELP, **_model)]
"""A model that may be left out before other arguments; `split_model` tells them apart."""


# Output ----------------------------------------------------------------------------------------------------


def print_record(record: dict[str, Any], as_json: bool) -> None:
    """Print a record as one line per entry, or as JSON."""
    if as_json:
        print_records([record])
        return
    formats = ((name, value, ",.1f" if isinstance(value, float) else ",") for name, value in record.items())
    print_rows({name: format(value, how) if isinstance(value, int | float) else value for name, value, how in formats})


def print_rows(rows: Mapping[str, Any], width: int = 26) -> None:
    """Print one line per entry."""
    for name, value in rows.items():
        show(f"{name.replace('_', ' '):{width}} {value}")


def print_records(records: Iterable[dict[str, Any]]) -> None:
    """Print records as JSON, one per line."""
    for record in records:
        print(json.dumps(record), flush=True)


def write_records(records: Iterable[dict[str, Any]], out: Path) -> None:
    """Write records as JSON, one per line, to a file."""
    with writing_to(out):
        files.write_text(out, "".join(f"{json.dumps(record)}\n" for record in records))


def print_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a Markdown table with aligned columns."""
    table = [[name.replace("_", " ") for name in heads], *map(list, rows)]
    widths = [max(3, *map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    for cells in table:
        show(f"| {' | '.join(map(str.ljust, cells, widths))} |")


def show(text: str) -> None:
    """Print text that may come from a file or a name: on a terminal with control characters escaped, else as it is."""
    print(visible(text) if sys.stdout.isatty() else text, flush=True)


def announce(work: str, model: Path | None = None, **options: Any) -> None:
    """State on stderr what a command is about to do, with the options that are given; of several processes, rank 0."""
    if find_launch().rank == 0:
        given = {name.replace("_", "-"): value for name, value in options.items() if value is not None}
        work = ", ".join([work, *(f"{name} {value}" for name, value in given.items())])
        warn(f"{model_name(model)}: {work}" if model else work)


def count_of(number: int, noun: str) -> str:
    """Return a number of things: 1 sample, 4 samples."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def model_name(folder: Path) -> str:
    """Return the name of a bundled model, or the path of any other."""
    return folder.name if folder.parent == models.built_in_folder() else str(folder)


def check_out(out: Path, kinds: Sequence[str] = ()) -> None:
    """Reject a file that cannot be written or has none of these suffixes, before any work; leave nothing behind."""
    if kinds and out.suffix not in kinds:
        raise ValueError(f"{out} cannot be written; its name must end in {' or '.join(kinds)}")
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file in it with --out")
    if out.exists() and not out.is_file():  # a device, such as /dev/null
        return
    folder = next(path for path in out.absolute().parents if path.exists())
    with writing_to(folder):
        tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Create the folder of ``out``; raise ValueError if it cannot be written to."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ValueError(f"{out} cannot be written to ({error.strerror}); choose another --out") from None


# Models ----------------------------------------------------------------------------------------------------


def find_model(name: Path | str | None) -> Path:
    """Return the folder of a model: ``name`` itself, a bundled model, or one on the Hub; None: the default."""
    if name is None:
        folder = models.default_model()
        announce(f"no model was named; using {models.DEFAULT}")
        return folder
    path = checkpoint.locate_model(name) or Path(name)
    if (path / checkpoint.CHECKPOINTS).is_dir() or (path / "ema.safetensors").is_file():
        return path
    if not checkpoint.has_weights(path) and (path.exists() or not models.is_repo_id(str(path))):
        raise ValueError(checkpoint.no_model(path))
    announce(f"{name}: {'published weights' if path.exists() else 'on the Hugging Face Hub, or in its cache'}")
    from sedd import hub

    return hub.fetch(path)


def split_model(
    first: str | None, others: Sequence[str], kind: str, fits: Callable[[str], bool] = lambda text: True
) -> tuple[Path, list[str]]:
    """Return the folder of the model and the other arguments of a command whose model may be left out.

    The first argument is a model if it is bundled, a path that holds a model, or has the form of a name on the Hub. If
    not, it is one of the others, and the model is the default. ``fits`` says whether a text can be one of the others;
    if not, it was meant as a model.
    """
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
