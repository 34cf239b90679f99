"""The command line. Data goes to stdout, everything else to stderr; torch is imported by the commands."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn, track
from rich.table import Table

from sedd import __version__

if TYPE_CHECKING:
    from sedd.config import Run

app = typer.Typer(
    help="Score entropy discrete diffusion: learn the ratios of discrete data, follow them back from noise.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
lab = typer.Typer(help="Demonstrations on laws small enough to know everything about.", no_args_is_help=True)
app.add_typer(lab, name="lab")
data = typer.Typer(help="Corpora, as token ids on disk.", no_args_is_help=True)
app.add_typer(data, name="data")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sedd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@lab.command("bound")
def lab_bound(
    vocab_size: Annotated[int, typer.Option(help="How many tokens there are.")] = 3,
    length: Annotated[int, typer.Option(help="How long a sequence is.")] = 3,
    seed: Annotated[int, typer.Option(help="Which random law.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record a line.")] = False,
) -> None:
    """The likelihood bound of the exact score equals the entropy: every process, every schedule.

    A random law of short sequences is written down; its true score at every noise level is known by
    enumeration, and so is every term of the bound. The gap is what quadrature and rounding leave.
    """
    from sedd import build
    from sedd import lab as demonstrations

    rows = demonstrations.bound(vocab_size, length, seed)
    total = len(build.PROCESSES) * len(build.SCHEDULES)
    shown = list(track(rows, "enumerating", total, console=Console(stderr=True), transient=True))
    if as_json:
        for row in shown:
            print(json.dumps(row._asdict()))
        return
    columns = [name for name in shown[0]._fields if name != "bound"]
    title = f"nats a sequence, {vocab_size} tokens, length {length}, seed {seed}"
    table = Table(*columns, box=None, pad_edge=False, title=title)
    for row in shown:
        terms = (f"{round(getattr(row, name), 6) + 0.0:.6f}" for name in columns[2:-1])  # + 0: no −0
        table.add_row(row.process, row.schedule, *terms, f"{row.gap:+.1e}")
    Console().print(table)


@data.command("prepare")
def data_prepare(
    sources: Annotated[
        list[str],
        typer.Argument(help="Files (.txt .jsonl .csv .parquet .npy, also compressed), folders, or hf:NAME[:SPLIT]."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, chars, bpe:SIZE, gpt2, ints, or the path of a tokenizer.json.")
    ] = "bytes",
    records: Annotated[
        str, typer.Option(help="packed: one stream, cut into blocks; lines: a record a line or row.")
    ] = "packed",
    length: Annotated[
        int | None, typer.Option(help="Tokens in a record of lines; the longest where it is left out.")
    ] = None,
    pad: Annotated[
        str | None, typer.Option(help="Padding of shorter records: model, to be learned; ignore, not to count.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="The column that holds the text.")] = None,
    workers: Annotated[int | None, typer.Option(help="Pieces encoded at a time; as many as cores by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record.")] = False,
) -> None:
    """Turn a corpus into token shards with an index: memory-mapped, hashed, the tokenizer beside them."""
    from sedd import build
    from sedd import data as corpora

    console = Console(stderr=True)
    with Progress(
        *Progress.get_default_columns(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("fitting the tokenizer", total=None)
        made = build.tokenizer(tokenizer, lambda: corpora.documents(sources, column, records))
        if not made.is_exact:
            console.print(f"note: {tokenizer} changes some texts; what it decodes may differ from what it was given")
        bar.update(task, description="encoding")
        index = corpora.prepare(
            sources,
            out,
            made,
            records=records,
            length=length,
            pad=pad,
            column=column,
            workers=workers,
            progress=lambda done, total: bar.update(task, completed=done, total=total or None),
        )
    row = {
        "folder": str(out),
        "tokens": index.tokens,
        "records": index.records,
        "vocab_size": index.vocab_size,
        "bytes_per_token": round(index.bytes / index.tokens, 4),
        "length": index.length,
        "pad": index.pad,
        "sha256": index.sha256,
    }
    if as_json:
        print(json.dumps(row))
    else:
        print(
            f"{out}: {index.tokens} tokens in {index.records} records, {row['bytes_per_token']:.4f} bytes a token, "
            f"vocabulary of {index.vocab_size}"
        )


# Training --------------------------------------------------------------------------------------------------

Sources = Annotated[
    list[str] | None,
    typer.Argument(help="Files or folders: .txt .jsonl .csv .parquet .npy, also compressed. Not needed with --resume."),
]
Recipe = Annotated[str | None, typer.Option(help="A named run to start from: tiny, text8, small, medium.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A YAML or JSON file of options, as a run stores it.")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Any option by its path: --set optim.lr=3e-4. Repeatable.")
]
Process = Annotated[str | None, typer.Option(help="What noise does: absorbing (default) or uniform.")]
Parameterization = Annotated[str | None, typer.Option(help="What the network says: score or mean.")]
Objective = Annotated[str | None, typer.Option(help="What is made small: score-entropy (default), lambda-dce, d3pm …")]
TokenizerSpec = Annotated[
    str | None, typer.Option("--tokenizer", help="bytes (default), chars, bpe:4096, gpt2, ints, or a tokenizer.json.")
]
Steps = Annotated[int | None, typer.Option(help="Stop after this many steps.")]
Minutes = Annotated[float | None, typer.Option(help="Stop after this many minutes of training.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def _configure(
    sources: list[str] | None,
    recipe: str | None,
    file: Path | None,
    flags: dict[str, Any],
    sets: list[str] | None,
    stored: dict[str, Any] | None = None,
) -> "Run":
    """Defaults, then what a run stored, a recipe, a file, the flags, and --set: the later wins."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from sedd.config import Run
    from sedd.recipes import RECIPES

    if recipe is not None and recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}; choose one of {', '.join(RECIPES)}")
    flags = {path: value for path, value in flags.items() if value is not None}
    if sources:
        flags["data.sources"] = list(sources)
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(Run),
            OmegaConf.create(stored or {}),
            OmegaConf.create(RECIPES[recipe] if recipe else {}),
            OmegaConf.load(file) if file else {},
            *(OmegaConf.from_dotlist([f"{path}={json.dumps(value)}"]) for path, value in flags.items()),
            OmegaConf.from_dotlist(sets or []),
        )
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, OSError) as error:
        raise ValueError(f"the options do not fit: {str(error).splitlines()[0]}") from None
    assert isinstance(config, Run)
    return config.resolved()


def _prepared(config: "Run") -> Path:
    """The data of a run as shards, made once for each content and kept in a cache."""
    from sedd import build
    from sedd import data as corpora

    chosen = config.data
    if not chosen.sources:
        raise ValueError("no data was given; name a file or a folder, as in: sedd train book.txt --out run")
    return corpora.cached(
        chosen.sources,
        chosen.tokenizer,
        lambda: build.tokenizer(
            chosen.tokenizer, lambda: corpora.documents(chosen.sources, chosen.column, chosen.records)
        ),
        cache=Path(os.environ.get("SEDD_CACHE", Path.home() / ".cache" / "sedd")) / "data",
        records=chosen.records,
        length=config.model.length if chosen.records == "lines" else None,
        pad=chosen.pad if chosen.records == "lines" else None,
        column=chosen.column,
    )


@app.command()
def train(
    sources: Sources = None,
    out: Annotated[Path, typer.Option(help="The folder of the run.")] = Path("run"),
    recipe: Recipe = None,
    process: Process = None,
    parameterization: Parameterization = None,
    objective: Objective = None,
    tokenizer: TokenizerSpec = None,
    steps: Steps = None,
    minutes: Minutes = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides first weights, order of data and noise.")] = None,
    config: ConfigFile = None,
    sets: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    compile: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Compile the network.")] = None,
    shard: Annotated[
        bool | None, typer.Option("--shard/--no-shard", help="Cut weights over processes (FSDP2).")
    ] = None,
    on_nonfinite: Annotated[
        str | None, typer.Option(help="stop (default) or skip, at a loss that is no number.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model on a file, on one process or, under torchrun, on many.

    Examples: `sedd train book.txt --out run --minutes 5`, or
    `torchrun --nproc-per-node 8 -m sedd train corpus/ --out run --recipe small`.
    What is not given is decided by the recipe or a default, and stored in the run's config.json.
    """
    from sedd import train as training

    flags = {
        "noise.process": process,
        "model.parameterization": parameterization,
        "objective": objective,
        "data.tokenizer": tokenizer,
        "budget.steps": steps,
        "budget.minutes": minutes,
        "loop.save_every": save_every,
        "seed": seed,
        "loop.compile": compile,
        "loop.shard": shard,
        "loop.on_nonfinite": on_nonfinite,
    }
    stored = None
    if resume and (out / "config.json").is_file():
        stored = json.loads((out / "config.json").read_text())
    chosen = _configure(sources, recipe, config, flags, sets, stored)
    _writable(out)
    with _bar() as bar:
        task = bar.add_task("training", total=1.0, note="")

        def hear(kind: str, record: dict[str, Any]) -> None:
            if kind == "note":
                bar.console.print(record["text"], markup=False, highlight=False)
                return
            bar.update(task, completed=record["spent"])
            if "loss" in record:
                note = f"step {record['step']}  {record['bits_per_char']:.3f} bits/char"
                bar.update(task, note=f"{note}  {record['tokens_per_second']:,} tok/s")
            if "bound" in record:
                bound = f"held-out bound {record['bound_bits_per_char']:.3f} bits/char"
                bar.console.print(f"step {record['step']}: {bound}", markup=False, highlight=False)

        try:
            end = training.run(chosen, lambda: _prepared(chosen), out, resume, hear)
        except training.NonFiniteError as error:
            print(f"sedd: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
    if int(os.environ.get("RANK", "0")) == 0:
        if as_json:
            print(json.dumps({"run": str(out), "step": end.progress.step, "tokens": end.progress.tokens, **end.bound}))
        else:
            print(
                f"{out}: {end.progress.step} steps, held-out bound {end.bound['bound']:.4f} nats a token "
                f"= {end.bound['bound_bits_per_char']:.4f} bits a character (± {end.bound['bound_stderr']:.4f} nats)"
            )
    if end.signal is not None:
        print(f"sedd: stopped by a signal at step {end.progress.step}, saved; go on with --resume", file=sys.stderr)
        raise typer.Exit(128 + end.signal)


def _writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to ({error.strerror}); choose another --out") from None


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    hidden = int(os.environ.get("RANK", "0")) != 0
    return Progress(*columns, console=Console(stderr=True), disable=hidden)


@app.command()
def plan(
    sources: Sources = None,
    recipe: Recipe = None,
    process: Process = None,
    parameterization: Parameterization = None,
    objective: Objective = None,
    tokenizer: TokenizerSpec = None,
    steps: Steps = None,
    minutes: Minutes = None,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """What a run would cost here: parameters, memory, tokens a second over 20 steps, time to finish."""
    from sedd import train as training

    flags = {
        "noise.process": process,
        "model.parameterization": parameterization,
        "objective": objective,
        "data.tokenizer": tokenizer,
        "budget.steps": steps,
        "budget.minutes": minutes,
    }
    chosen = _configure(sources, recipe, config, flags, sets)
    _show(training.plan(chosen, lambda: _prepared(chosen)), as_json)


def _show(record: dict[str, Any], as_json: bool) -> None:
    """A line for every entry, or one JSON record."""
    if as_json:
        print(json.dumps(record))
        return
    for name, value in record.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if isinstance(value, float) else str(value)
        print(f"{name.replace('_', ' '):26s} {shown}")


@app.command()
def info(
    model: Annotated[Path, typer.Argument(help="The folder of a run, or one of its checkpoints.")],
    as_json: AsJson = False,
) -> None:
    """What a model is: its size, noise, objective, tokenizer, and how far it was trained."""
    from sedd import build, checkpoint

    loaded = build.load(model)
    state = checkpoint.record(loaded.folder, "state")
    record = {
        "folder": str(loaded.folder),
        "parameters": sum(p.numel() for p in loaded.network.parameters()),
        "vocab_size": loaded.process.vocab_size,
        "length": loaded.config.model.length,
        "process": loaded.config.noise.process,
        "schedule": str(loaded.schedule),
        "objective": loaded.config.objective,
        "parameterization": loaded.config.model.parameterization,
        "style": loaded.config.model.style,
        "tokenizer": loaded.tokenizer.kind,
        "step": state["step"],
        "tokens": state["tokens"],
        "best_bound": None if state["best"] is None else f"{state['best']:.4f} nats a token",
    }
    _show(record, as_json)


def main() -> None:
    """Run the command line; a refusal is a sentence and exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"sedd: {error}", file=sys.stderr)
        raise SystemExit(2) from None
