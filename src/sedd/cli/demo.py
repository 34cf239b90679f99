"""``sedd demo``: demonstrations on small, fully known distributions."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sedd import registry
from sedd.cli.root import App, AsJson, app, check_seed, list_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

demo = App(help="Demonstrations on distributions small enough to enumerate.", no_args_is_help=True)
app.add_typer(demo, name="demo")


VocabSize = Annotated[int, typer.Option(help="Number of tokens in the vocabulary.")]
Length = Annotated[int, typer.Option(help="Tokens per sequence.")]
TrainingSteps = Annotated[int, typer.Option(help="Training steps.")]
Seed = Annotated[int, typer.Option(callback=check_seed, help="Random seed.")]
Out = Annotated[Path, typer.Option(help="Folder for the picture.")]
FOLDER = Path("sedd-demo")

T = TypeVar("T")


def _collect(rows: Iterable[T], label: str, total: int) -> list[T]:
    """Collect all rows, with a progress bar on stderr."""
    return list(track(rows, label, total, console=Console(stderr=True), transient=True))


def _print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table, width=None if console.is_terminal else 120)  # no wrapping in files


def _print_json(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        print(json.dumps(row))


def _save(figure: "Figure", path: Path) -> None:
    from sedd import plot

    Console(stderr=True).print(f"picture: {plot.save_png(figure, path)}", markup=False, highlight=False, soft_wrap=True)


@demo.command("bound")
def demo_bound(
    vocab_size: VocabSize = 3,
    length: Length = 3,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Show that the likelihood bound of the exact score equals the entropy, for every process and schedule.

    The data distribution is a random one over short sequences. Its score at every noise level and every term of the
    bound are computed by enumeration. The gap is the error of quadrature and rounding.
    """
    from sedd.demos import bound

    rows = bound.compute_bounds(vocab_size, length, seed)
    found = _collect(rows, "enumerating", len(registry.PROCESSES.built_in) * len(registry.SCHEDULES.built_in))
    if as_json:
        _print_json(row._asdict() for row in found)
        return
    columns = [name for name in found[0]._fields if name != "bound"]
    cells = []
    for row in found:
        terms = (f"{round(getattr(row, name), 6) + 0.0:.6f}" for name in columns[2:-1])  # + 0: no −0
        cells.append((row.process, row.schedule, *terms, f"{row.gap:+.1e}"))
    _print_table(f"nats per sequence, {vocab_size} tokens, length {length}, seed {seed}", columns, cells)


@demo.command("ratios")
def demo_ratios(
    states: Annotated[int, typer.Option(help="Number of states.")] = 10,
    steps: Annotated[int, typer.Option(help="Training steps, of which six are shown.")] = 100,
    seed: Seed = 0,
    out: Out = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Learn a known matrix of ratios with three objectives: two recover it, one cannot.

    Score entropy, concrete score matching (ℓ2) and softmax-linear learn the ratios p(y)/p(x) of a random distribution
    from the same start. The picture shows the learned matrices beside the true one.
    """
    from sedd.demos import ratios

    truth = ratios.true_log_ratios(states, seed)
    found = _collect(ratios.learn_ratios(states, steps, seed), "training", len(ratios.OBJECTIVES) * (steps + 1))
    _save(ratios.plot_ratios(found, truth), out / "ratios.png")
    steps_shown = ratios.shown_steps(steps)
    shown = [row for row in found if row.step in steps_shown]
    if as_json:
        _print_json(row._asdict() | {"log_score": row.log_score.tolist()} for row in shown)
        return
    title = f"error of log ratios (root mean square), {states} states, seed {seed}"
    cells = ((name, *(f"{row.error:.4f}" for row in shown if row.objective == name)) for name in ratios.OBJECTIVES)
    _print_table(title, ["objective", *(f"step {step}" for step in steps_shown)], cells)


@demo.command("one-step")
def demo_one_step(
    steps: TrainingSteps = 600,
    noise: Annotated[float, typer.Option(help="Fraction of words replaced by noise in the examples.")] = 0.75,
    examples: Annotated[int, typer.Option(help="Number of examples to show.")] = 8,
    seed: Seed = 0,
    out: Out = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Reconstruct sentences under uniform noise in one step, with a trained model and with the exact posterior.

    A small network learns six sentences such as `I love NLP .` by score entropy. Noise changes one into something like
    `You AI <pad> I`, and the network predicts the original words all at once. Probabilities are exact sums over all
    noisy sequences.
    """
    from sedd.demos import one_step, sentences

    one_step.sigma_at(noise)  # raises before training, not after it
    if examples < 1:
        raise ValueError(f"examples is {examples}; it must be 1 or more")
    model = sentences.build_denoiser(one_step.PROCESS, seed)
    _collect(sentences.train_denoiser(model, one_step.OBJECTIVE, steps, seed), "training", steps)
    total = len(one_step.NOISE_LEVELS) * len(one_step.METHODS)
    found = _collect(one_step.evaluate_reconstructions(model), "enumerating", total)
    shown = one_step.reconstruct_examples(model, noise, examples, seed)
    _save(one_step.plot_one_step(found), out / "one-step.png")
    if as_json:
        _print_json({"type": "reconstruction", **row._asdict()} for row in found)
        _print_json({"type": "example", **row._asdict()} for row in shown)
        return
    _print_table(f"{noise:.0%} of words replaced", ["sentence", "noisy", "model, argmax", "model, draw"], shown)
    for field, title in one_step.MEASURES.items():
        print()
        cells = (
            (method, *(f"{getattr(row, field):.3f}" for row in found if row.method == method))
            for method in one_step.METHODS
        )
        levels = (f"{level:.0%}" for level in one_step.NOISE_LEVELS)
        _print_table(title, ["words replaced", *levels], cells)


@demo.command("all-masked")
def demo_all_masked(
    steps: TrainingSteps = 600,
    sampling_steps: Annotated[int, typer.Option(help="Sampling steps.")] = 64,
    draws: Annotated[int, typer.Option(help="Samples per method.")] = 4000,
    seed: Seed = 0,
    out: Out = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Generate sentences from `[MASK] [MASK] [MASK] [MASK]` and compare their distribution with the corpus.

    A small network learns six sentences of unequal frequency by score entropy. Sampled in many steps, they follow the
    corpus; in one step, words are independent of each other; by argmax, every sample is the same sentence.
    """
    from sedd.demos import all_masked, sentences

    all_masked.check_settings(sampling_steps, draws)  # raises before training, not after it
    model = sentences.build_denoiser(all_masked.PROCESS, seed, all_masked.SCHEDULE)
    _collect(sentences.train_denoiser(model, all_masked.OBJECTIVE, steps, seed), "training", steps)
    found = _collect(
        all_masked.sample_sentences(model, sampling_steps, draws, seed), "sampling", len(all_masked.METHODS)
    )
    _save(all_masked.plot_all_masked(found), out / "all-masked.png")
    if as_json:
        _print_json(row._asdict() for row in found)
        return
    cells = [
        (text, f"{count / sum(sentences.CORPUS.values()):.3f}", *(f"{row.frequencies[text]:.3f}" for row in found))
        for text, count in sentences.CORPUS.items()
    ]
    cells.append(("other sequences", "0.000", *(f"{row.other:.3f}" for row in found)))
    cells.append(("total variation", "", *(f"{row.total_variation:.3f}" for row in found)))
    cells.append(("chi-square, 5 degrees", "", *(f"{row.chi_square:.1f}" for row in found)))
    cells.append(("p-value", "", *(f"{row.p_value:.2g}" if row.p_value else "< 1e-300" for row in found)))
    _print_table(
        f"{draws} samples per method, seed {seed}", ["sentence", "corpus", *(row.method for row in found)], cells
    )


@demo.command("samplers")
def demo_samplers(
    vocab_size: VocabSize = 3,
    length: Length = 3,
    schedule: Annotated[str, typer.Option(help=f"Noise schedule: {list_names(registry.SCHEDULES)}.")] = "log-linear",
    max_steps: Annotated[
        int, typer.Option(help="Largest number of steps; the powers of two up to it are computed.")
    ] = 256,
    seed: Seed = 0,
    out: Out = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Compute the error of samplers against the number of steps, with an exact score and without sampling.

    The distribution of the samples is propagated from the true marginal at t = 1 to no noise and compared with the data
    distribution by total variation. The error of a sampler of order k falls as steps^−k.
    """
    from sedd.demos import samplers

    total = len(registry.PROCESSES.built_in) * len(samplers.SAMPLERS) * len(samplers.step_counts(max_steps))
    found = _collect(samplers.sampler_errors(vocab_size, length, schedule, max_steps, seed), "enumerating", total)
    _save(samplers.plot_samplers(found), out / "samplers.png")
    if as_json:
        _print_json({"type": "error", **row._asdict()} for row in found)
        for (process, name), curve in samplers.group_curves(found).items():
            slope = {"slope": samplers.fitted_slope(curve), "order": samplers.declared_order(process, name)}
            _print_json([{"type": "slope", "process": process, "sampler": name, **slope}])
        return
    print(f"total variation, {schedule} schedule, {vocab_size} tokens, length {length}, seed {seed}")
    for process in registry.PROCESSES.built_in:
        curves = {name: curve for (noise, name), curve in samplers.group_curves(found).items() if noise == process}
        cells = [
            (str(steps), *(f"{curve[i].error:.2e}" for curve in curves.values()))
            for i, steps in enumerate(samplers.step_counts(max_steps))
        ]
        slopes = map(samplers.fitted_slope, curves.values())
        cells.append(("slope", *("exact" if slope is None else f"{slope:.2f}" for slope in slopes)))
        cells.append(("order", *(f"{samplers.declared_order(process, name):g}" for name in curves)))
        print()
        _print_table(f"{process} noise", ["steps", *curves], cells)
