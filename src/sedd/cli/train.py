"""``sedd train`` and ``sedd plan``."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sedd.cli.root import AsJson, app, show

if TYPE_CHECKING:
    from sedd.config import RunConfig

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
Packing = Annotated[
    str | None, typer.Option(help="packed (default): one stream, cut into blocks; lines: a record a line or row.")
]
LabelColumn = Annotated[
    str | None, typer.Option("--label", help="The column of a table that says what each record is; for lines.")
]
Steps = Annotated[int | None, typer.Option(help="Stop after this many steps.")]
Minutes = Annotated[float | None, typer.Option(help="Stop after this many minutes of training.")]


def _configured(words: dict[str, Any], out: Path | None = None) -> "RunConfig":
    """The configuration that the words of a command ask for; with ``out``, of the run that goes on there."""
    from sedd.training import overrides

    given = {name: None if words[name] == () else words[name] for name in overrides.PATHS if name in words}
    stored = overrides.stored_config(out) if out else None
    return overrides.merge_config(
        given, stored=stored, recipe=words["recipe"], file=words["config"], sets=words["sets"] or []
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
    packing: Packing = None,
    label: LabelColumn = None,
    steps: Steps = None,
    minutes: Minutes = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides first weights, order of data and noise.")] = None,
    config: ConfigFile = None,
    sets: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    compile: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Compile the network.")] = None,
    fsdp: Annotated[bool | None, typer.Option("--fsdp/--no-fsdp", help="Cut weights over processes (FSDP2).")] = None,
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
    from sedd import training

    chosen = _configured(context.params, out if resume else None)
    training.check_writable(out)
    with training.progress_bar() as (on_event, preparing):
        try:
            end = training.run(chosen, lambda: training.prepare_data(chosen, preparing), out, resume, on_event)
        except training.NonFiniteError as error:
            print(f"sedd: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
    if end.signal is not None:
        print(f"sedd: stopped by a signal at step {end.state.step}, saved; go on with --resume", file=sys.stderr)
        raise typer.Exit(128 + end.signal)
    if int(os.environ.get("RANK", "0")) == 0:
        if as_json:
            print(json.dumps({"run": str(out), "step": end.state.step, "tokens": end.state.tokens, **end.validation}))
        else:
            bound = end.validation
            print(
                f"{out}: {end.state.step} steps, validation bound {bound['bound']:.4f} nats per token "
                f"= {bound['bound_bits_per_char']:.4f} bits per character (± {bound['bound_stderr']:.4f} nats)"
            )


@app.command()
def plan(
    context: typer.Context,
    sources: Sources = None,
    recipe: Recipe = None,
    process: Process = None,
    parameterization: Parameterization = None,
    objective: Objective = None,
    tokenizer: TokenizerSpec = None,
    packing: Packing = None,
    label: LabelColumn = None,
    steps: Steps = None,
    minutes: Minutes = None,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """What a run would cost here: parameters, memory, tokens a second over 20 steps, time to finish."""
    from sedd import training

    chosen = _configured(context.params)
    show(training.estimate_cost(chosen, lambda: training.prepare_data(chosen)), as_json)
