"""``sedd train`` and ``sedd plan``."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from sedd.cli.root import AsJson, app, show

if TYPE_CHECKING:
    from sedd.config import Run
    from sedd.train import Hear

Sources = Annotated[
    list[str] | None,
    typer.Argument(help="Files or folders: .txt .jsonl .csv .parquet .npy, also compressed. Not needed with --resume."),
]
Recipe = Annotated[
    str | None, typer.Option(help="A named run to start from: tiny, text8, dna, molecules, small, medium.")
]
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


PATHS = {
    "process": "noise.process",
    "parameterization": "model.parameterization",
    "objective": "objective",
    "tokenizer": "data.tokenizer",
    "steps": "budget.steps",
    "minutes": "budget.minutes",
    "save_every": "loop.save_every",
    "seed": "seed",
    "compile": "loop.compile",
    "shard": "loop.shard",
    "on_nonfinite": "loop.on_nonfinite",
    "sources": "data.sources",
}
"""Which option of a run a word of the command line sets."""


def _configure(words: dict[str, Any], stored: dict[str, Any] | None = None) -> "Run":
    """Defaults, then what a run stored, a recipe, a file, the flags, and --set: the later wins."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    from sedd.config import Run
    from sedd.recipes import RECIPES

    if (recipe := words["recipe"]) is not None and recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}; choose one of {', '.join(RECIPES)}")
    flags = [f"{path}={json.dumps(words[name])}" for name, path in PATHS.items() if words.get(name) not in (None, ())]
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(Run),
            OmegaConf.create(stored or {}),
            OmegaConf.create(RECIPES[recipe] if recipe else {}),
            OmegaConf.load(words["config"]) if words["config"] else {},
            OmegaConf.from_dotlist(flags),
            OmegaConf.from_dotlist(words["sets"] or []),
        )
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, OSError, TypeError, YAMLError) as error:
        raise ValueError(f"the options do not fit: {str(error).splitlines()[0]}") from None
    assert isinstance(config, Run)
    return config.resolved()


def _stored(out: Path) -> dict[str, Any] | None:
    """The configuration of a run that goes on."""
    from sedd import checkpoint

    file = out / "config.json"
    return checkpoint.record(out, "config") if file.is_file() else None


def prepared(config: "Run", progress: Callable[[int, int], None] | None = None) -> Path:
    """The data of a run as shards: made once for each content and kept in a cache, or a folder of them as it is."""
    from sedd import build
    from sedd import data as corpora

    chosen = config.data
    if not chosen.sources:
        raise ValueError("no data was given; name a file or a folder, as in: sedd train book.txt --out run")
    if len(chosen.sources) == 1 and corpora.is_prepared(chosen.sources[0]):
        return Path(chosen.sources[0])
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
        progress=progress,
    )


@app.command()
def train(
    context: typer.Context,
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

    chosen = _configure(context.params, _stored(out) if resume else None)
    _writable(out)
    with _bar() as bar:
        try:
            end = training.run(chosen, lambda: prepared(chosen, _preparing(bar)), out, resume, _hearing(bar))
        except training.NonFiniteError as error:
            print(f"sedd: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
    if end.signal is not None:
        print(f"sedd: stopped by a signal at step {end.progress.step}, saved; go on with --resume", file=sys.stderr)
        raise typer.Exit(128 + end.signal)
    if int(os.environ.get("RANK", "0")) == 0:
        if as_json:
            print(json.dumps({"run": str(out), "step": end.progress.step, "tokens": end.progress.tokens, **end.bound}))
        else:
            print(
                f"{out}: {end.progress.step} steps, held-out bound {end.bound['bound']:.4f} nats a token "
                f"= {end.bound['bound_bits_per_char']:.4f} bits a character (± {end.bound['bound_stderr']:.4f} nats)"
            )


def _preparing(bar: Progress) -> Callable[[int, int], None]:
    task = bar.add_task("preparing", visible=False, note="")
    return lambda done, total: bar.update(task, completed=done, total=total or None, visible=done != total)


def _hearing(bar: Progress) -> "Hear":
    """What a run tells, as a bar and lines above it."""
    task = bar.add_task("training", total=1.0, visible=False, note="")

    def hear(kind: str, record: dict[str, Any]) -> None:
        if kind == "note":
            bar.console.print(record["text"], markup=False, highlight=False)
            return
        bar.update(task, completed=record["spent"], visible=True)
        if "loss" in record:
            note = f"step {record['step']}  {record['bits_per_char']:.3f} bits/char"
            bar.update(task, note=f"{note}  {record['tokens_per_second']:,} tok/s")
        if "bound" in record:
            bound = f"held-out bound {record['bound_bits_per_char']:.3f} bits/char"
            bar.console.print(f"step {record['step']}: {bound}", markup=False, highlight=False)

    return hear


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
    context: typer.Context,
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

    chosen = _configure(context.params)
    show(training.plan(chosen, lambda: prepared(chosen)), as_json)
