"""``sedd train`` and ``sedd plan``: train a model, or estimate what it would cost."""

import inspect
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sedd.cli import root
from sedd.runtime.launch import find_launch
from sedd.terminal import warn
from sedd.training import checkpoint
from sedd.training.config import NOT_FOR_TRAINING, OBJECTIVES, PROCESSES, RunConfig
from sedd.training.networks import NETWORKS
from sedd.training.progress import format_duration, import_tracker, progress_bar, progress_on_stderr, track_run
from sedd.training.recipes import RECIPES

OBJECTIVE_MEANINGS = {
    "score-entropy": "ratios of probabilities, by the likelihood bound (SEDD)",
    "concrete-score": "the same ratios, in squared error",
    "ratio-matching": "a noisy token given all others, which are all it sees",
    "mean": "the clean token, by its cross-entropy at equal weights",
    "d3pm": "the clean token, by the bound of a chain of 1000 steps",
    "t-dce": "the clean token, by the bound, given σ (RADD); absorbing",
    "lambda-dce": "the clean token, by the bound, without σ (RADD); absorbing",
    "any-order": "as lambda-dce, with an exact number of masks; absorbing",
    "autoregressive": "the next token from left to right, a baseline",
}
"""What each objective of ``--objective`` learns, in one line."""
TRAINABLE = [name for name in OBJECTIVES.names if name not in NOT_FOR_TRAINING]
OBJECTIVES_HELP = "Objectives and what they learn, under every process unless one is named:\n\n" + "\n".join(
    f"- `{name}`: {OBJECTIVE_MEANINGS.get(name, 'from another package')}" for name in TRAINABLE
)


@root.command("train", epilog=OBJECTIVES_HELP)
def train_model(
    context: typer.Context,
    sources: list[str] | None = None,
    *,
    out: Path = Path("run"),
    recipe: Annotated[str | None, RECIPES] = None,
    network: Annotated[str | None, NETWORKS.names] = None,
    process: Annotated[str | None, PROCESSES.names] = None,
    parameterization: str | None = None,
    objective: Annotated[str | None, TRAINABLE] = None,
    tokenizer: str | None = None,
    packing: str | None = None,
    label: str | None = None,
    column: str | None = None,
    encoding: str | None = None,
    seq_len: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    save_every: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    config: Path | None = None,
    sets: list[str] | None = None,
    resume: bool = False,
    compile: bool | None = None,
    fsdp: bool | None = None,
    on_nonfinite: str | None = None,
    track: str | None = None,
    as_json: bool = False,
) -> None:
    """Train a model, in one process or, under torchrun, in several.

    Options that are not given have the values of the recipe; without one, size, batch, tokenizer, optimizer and
    precision are chosen for this machine, the data and the budget, and printed. All are stored in the run's
    config.json. Examples:

    - `sedd train book.txt --out run --minutes 5`
    - `torchrun --nproc-per-node 8 -m sedd train corpus/ --out run --recipe small`

    Args:
        out: Folder of the run: checkpoints, logs and configuration.
        recipe: Named configuration to start from: {names}.
        network: Your own network: the import path of its class, as in my_package:MyNet, or the name of an installed one
            ({names}); options of its constructor are set as in --set network.width=64. By default sedd's own
            transformer.
        parameterization: Network output: score (ratios), mean (the clean token) or, for concrete-score, signed-score
            (ratios of any sign); by default what the objective needs.
        objective: Training objective: {names}; each is described below. By default score-entropy.
        seq_len: Tokens per sequence; with --packing lines, longer records are left out.
        batch_size: Sequences per step, over all processes.
        lr: Peak learning rate.
        steps: Number of training steps; without --steps and --minutes, the recipe's, or 5 minutes.
        minutes: Minutes of training by the wall clock, evaluation and saving not counted; with --steps too, whichever
            limit is reached first.
        save_every: Training steps between checkpoints.
        seed: Random seed of initial weights, data order and noise.
        config: YAML or JSON file of configuration keys, such as a config.json of a run or a model.
        sets (--set): Set any configuration key: --set optim.lr=3e-4. Repeatable.
        resume: Continue from the newest checkpoint in --out, on the same data.
        compile: Compile the network with torch.compile.
        fsdp: Shard weights over processes (FSDP2).
        on_nonfinite: What to do at a non-finite loss: stop (default) or skip the step.
        track: Send the log to a tracker too: wandb (Weights & Biases) or trackio; each is an extra.
    """
    from sedd.training.overrides import decide_resume

    resume = decide_resume(out, resume)
    if track is not None:
        import_tracker(track)
    checkpoint.check_writable(out)
    run_config = _configure(context.params, out if resume else None)  # without torch: an error comes at once
    from sedd.training import loop
    from sedd.training.datasets import prepare_data
    from sedd.training.trainer import NonFiniteError

    with progress_bar() as (on_event, preparing):
        prepare = partial(prepare_data, run_config, preparing)
        try:
            with track_run(track, run_config, out, on_event) as on_tracked_event:
                end = loop.run(run_config, prepare, out, resume, on_tracked_event, device)
        except NonFiniteError as error:
            warn(str(error))
            raise typer.Exit(1) from None
    if end.signal is not None:
        print(f"sedd: stopped by a signal at step {end.state.step} and saved; continue with --resume", file=sys.stderr)
        raise typer.Exit(128 + end.signal)
    if find_launch().rank == 0:
        bound, state = end.validation, end.state
        times = {name: round(getattr(state, name), 3) for name in ("seconds", "eval_seconds", "save_seconds")}
        if as_json:
            root.print_records([{"run": str(out), "step": state.step, "tokens": state.tokens, **times, **bound}])
        else:
            bits = bound.get("bound_bits_per_char")  # none where the tokens are not text
            root.show(
                f"{out}: {state.step} steps, validation bound {bound['bound']:.4f} nats per token "
                + ("" if bits is None else f"= {bits:.4f} bits per character ")
                + f"(± {bound['bound_stderr']:.4f} nats)"
            )
            spent = zip(("training", "evaluation", "saving"), map(format_duration, times.values()), strict=True)
            print(f"time: {', '.join(f'{name} {duration}' for name, duration in spent)}", file=sys.stderr)


NOT_PLANNED = ("context", "out", "save_every", "seed", "resume", "compile", "fsdp", "on_nonfinite", "track")
"""Parameters of ``sedd train`` that ``sedd plan`` does not have."""


@root.command("plan", epilog=OBJECTIVES_HELP)
@root.takes(option for name, option in inspect.signature(train_model).parameters.items() if name not in NOT_PLANNED)
def plan_run(**options: Any) -> None:
    """Estimate a run on this machine within 20 seconds: its steps, characters, memory, time and expected result.

    A few steps are measured on the beginning of the data. For text, the bits per character are those expected from
    runs that were measured.
    """
    run_config = _configure(options)
    from sedd.training.dry_run import estimate_cost

    with progress_on_stderr("measuring") as on_progress:
        record = estimate_cost(run_config, on_progress, options["device"])
    as_json = options["as_json"]
    if not as_json and "expected_bits_per_char" in record:
        error = record.pop("expected_bits_error")
        record["expected_bits_per_char"] = f"{record['expected_bits_per_char']:.2f} ± {error:.2f}"
    root.print_record({name: value for name, value in record.items() if as_json or value is not None}, as_json)


def _configure(options: dict[str, Any], out: Path | None = None) -> RunConfig:
    """Build the configuration from a command's options; with ``out``, continue from the one stored there."""
    from sedd.training import datasets, overrides

    given = {name: None if options[name] == () else options[name] for name in overrides.PATHS if name in options}
    config = overrides.merge_config(
        given,
        resume=out,
        recipe=options["recipe"],
        file=options["config"],
        sets=options["sets"] or [],
        on_sizing=root.announce,
        device=options["device"],
    )
    datasets.check_data(config.data)
    return config
