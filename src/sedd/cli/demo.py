"""``sedd lab``: demonstrations."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sedd import registry
from sedd.cli.root import app

if TYPE_CHECKING:
    from matplotlib.figure import Figure

lab = typer.Typer(help="Demonstrations on laws small enough to know everything about.", no_args_is_help=True)
app.add_typer(lab, name="lab")


def _seed(value: int) -> int:
    if not 0 <= value < 2**63:
        raise ValueError(f"seed is {value}; it must lie in 0..2^63 − 1")
    return value


Seed = Annotated[int, typer.Option(callback=_seed, help="Decides the law, the first weights and every draw.")]
Out = Annotated[Path, typer.Option(help="The folder for the picture.")]
Lines = Annotated[bool, typer.Option("--json", help="One JSON record a line.")]
FOLDER = Path("sedd-lab")

T = TypeVar("T")


def _watched(rows: Iterable[T], doing: str, total: int) -> list[T]:
    """All of ``rows``, with a bar on stderr while they come."""
    return list(track(rows, doing, total, console=Console(stderr=True), transient=True))


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table, width=None if console.is_terminal else 120)  # a file is no narrower than its lines


def _lines(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        print(json.dumps(row))


def _keep(figure: "Figure", path: Path) -> None:
    from sedd import plot

    Console(stderr=True).print(f"picture: {plot.save_png(figure, path)}", markup=False, highlight=False, soft_wrap=True)


@lab.command("bound")
def lab_bound(
    vocab_size: Annotated[int, typer.Option(help="How many tokens there are.")] = 3,
    length: Annotated[int, typer.Option(help="How long a sequence is.")] = 3,
    seed: Seed = 0,
    as_json: Lines = False,
) -> None:
    """The likelihood bound of the exact score equals the entropy: every process, every schedule.

    A random law of short sequences is written down; its true score at every noise level is known by
    enumeration, and so is every term of the bound. The gap is what quadrature and rounding leave.
    """
    from sedd.demos import bound

    rows = bound.rows(vocab_size, length, seed)
    found = _watched(rows, "enumerating", len(registry.PROCESSES.built_in) * len(registry.SCHEDULES.built_in))
    if as_json:
        _lines(row._asdict() for row in found)
        return
    columns = [name for name in found[0]._fields if name != "bound"]
    cells = []
    for row in found:
        terms = (f"{round(getattr(row, name), 6) + 0.0:.6f}" for name in columns[2:-1])  # + 0: no −0
        cells.append((row.process, row.schedule, *terms, f"{row.gap:+.1e}"))
    _table(f"nats a sequence, {vocab_size} tokens, length {length}, seed {seed}", columns, cells)


@lab.command("ratios")
def lab_ratios(
    states: Annotated[int, typer.Option(help="How many states the law has.")] = 10,
    steps: Annotated[int, typer.Option(help="Steps of learning; six of them are shown.")] = 100,
    seed: Seed = 0,
    out: Out = FOLDER,
    as_json: Lines = False,
) -> None:
    """Three objectives learn a matrix of ratios that is known: two find it, one cannot.

    Score entropy, concrete score matching (ℓ2) and softmax-linear start from one table and take the same
    steps on the ratios p(y)/p(x) of a random law. The picture shows what each has found, beside the truth.
    """
    from sedd.demos import ratios

    truth = ratios.true_log_ratios(states, seed)
    found = _watched(ratios.learn(states, steps, seed), "learning", len(ratios.OBJECTIVES) * (steps + 1))
    _keep(ratios.picture(found, truth), out / "ratios.png")
    when = ratios.snapshots(steps)
    seen = [row for row in found if row.step in when]
    if as_json:
        _lines(row._asdict() | {"log_score": row.log_score.tolist()} for row in seen)
        return
    title = f"error of log ratios (root mean square), {states} states, seed {seed}"
    cells = ((name, *(f"{row.error:.4f}" for row in seen if row.objective == name)) for name in ratios.OBJECTIVES)
    _table(title, ["objective", *(f"step {step}" for step in when)], cells)


@lab.command("one-step")
def lab_one_step(
    steps: Annotated[int, typer.Option(help="Steps of learning.")] = 600,
    noise: Annotated[float, typer.Option(help="For the examples: the share of words that noise touches.")] = 0.75,
    examples: Annotated[int, typer.Option(help="How many examples to show.")] = 8,
    seed: Seed = 0,
    out: Out = FOLDER,
    as_json: Lines = False,
) -> None:
    """Sentences under uniform noise, put right in one step; beside it, what the exact posterior would do.

    A small network learns six sentences such as `I love NLP .` by score entropy. Noise turns one into something
    like `You AI <pad> I`, and the network says at once, word by word, what stood there. The shares are sums over
    every noisy sequence, not estimates.
    """
    from sedd.demos import one_step

    one_step.sigma_of(noise)  # refused before the wait, not after it
    if examples < 1:
        raise ValueError(f"examples is {examples}; it must be 1 or more")
    model = one_step.network(seed)
    _watched(one_step.learn(model, steps, seed), "learning", steps)
    found = _watched(one_step.shares(model), "enumerating", len(one_step.TOUCHED) * len(one_step.WAYS))
    shown = one_step.examples(model, noise, examples, seed)
    _keep(one_step.picture(found), out / "one-step.png")
    if as_json:
        _lines({"record": "share", **row._asdict()} for row in found)
        _lines({"record": "example", **row._asdict()} for row in shown)
        return
    _table(f"{noise:.0%} of words touched", ["sentence", "noisy", "model, argmax", "model, draw"], shown)
    for what, title in one_step.MEASURES.items():
        print()
        cells = ((way, *(f"{getattr(row, what):.3f}" for row in found if row.way == way)) for way in one_step.WAYS)
        levels = (f"{touched:.0%}" for touched in one_step.TOUCHED)
        _table(title, ["words touched", *levels], cells)


@lab.command("all-masked")
def lab_all_masked(
    steps: Annotated[int, typer.Option(help="Steps of learning.")] = 600,
    sampling_steps: Annotated[int, typer.Option(help="Steps from masks to a sentence.")] = 64,
    draws: Annotated[int, typer.Option(help="Sentences drawn in each way.")] = 4000,
    seed: Seed = 0,
    out: Out = FOLDER,
    as_json: Lines = False,
) -> None:
    """Sentences out of `[MASK] [MASK] [MASK] [MASK]`: the law of what is said against the law of the corpus.

    A small network learns six sentences of unequal shares by score entropy. Drawn a little at a time, what it says
    follows the corpus; drawn at once, words do not go together; always the likeliest word, and it is one sentence.
    """
    from sedd.demos import all_masked, sentences

    all_masked.refuse(sampling_steps, draws)  # before the wait, not after it
    model = all_masked.network(seed)
    _watched(all_masked.learn(model, steps, seed), "learning", steps)
    found = _watched(all_masked.said(model, sampling_steps, draws, seed), "sampling", len(all_masked.WAYS))
    _keep(all_masked.picture(found), out / "all-masked.png")
    if as_json:
        _lines(row._asdict() for row in found)
        return
    cells = [
        (text, f"{count / sum(sentences.CORPUS.values()):.3f}", *(f"{row.shares[text]:.3f}" for row in found))
        for text, count in sentences.CORPUS.items()
    ]
    cells.append(("anything else", "0.000", *(f"{row.astray:.3f}" for row in found)))
    cells.append(("total variation", "", *(f"{row.distance:.3f}" for row in found)))
    cells.append(("chi-square, 5 degrees", "", *(f"{row.chi_square:.1f}" for row in found)))
    cells.append(("p-value", "", *(f"{row.p_value:.2g}" if row.p_value else "< 1e-300" for row in found)))
    _table(f"{draws} draws in each way, seed {seed}", ["sentence", "corpus", *(row.way for row in found)], cells)


@lab.command("samplers")
def lab_samplers(
    vocab_size: Annotated[int, typer.Option(help="How many tokens there are.")] = 3,
    length: Annotated[int, typer.Option(help="How long a sequence is.")] = 3,
    schedule: Annotated[str, typer.Option(help="log-linear, geometric, cosine or polynomial.")] = "log-linear",
    most: Annotated[int, typer.Option(help="The most steps to take; powers of two up to it are tried.")] = 256,
    seed: Seed = 0,
    out: Out = FOLDER,
    as_json: Lines = False,
) -> None:
    """The error of every sampler against its number of steps, on an exact score, without a single draw.

    The law of the samples is followed by dynamic programming from the true law at t = 1 to no noise, and compared with
    the data's: total variation. A sampler of order k has an error that falls as steps^−k.
    """
    from sedd.demos import samplers

    total = len(registry.PROCESSES.built_in) * len(samplers.SAMPLERS) * len(samplers.step_counts(most))
    found = _watched(samplers.errors(vocab_size, length, schedule, most, seed), "enumerating", total)
    _keep(samplers.picture(found), out / "samplers.png")
    if as_json:
        _lines({"record": "error", **row._asdict()} for row in found)
        for (process, name), curve in samplers.curves(found).items():
            fall = {"slope": samplers.slope(curve), "order": samplers.order(process, name)}
            _lines([{"record": "slope", "process": process, "sampler": name, **fall}])
        return
    print(f"total variation, {schedule} schedule, {vocab_size} tokens, length {length}, seed {seed}")
    for process in registry.PROCESSES.built_in:
        curves = {name: curve for (where, name), curve in samplers.curves(found).items() if where == process}
        cells = [
            (str(steps), *(f"{curve[i].error:.2e}" for curve in curves.values()))
            for i, steps in enumerate(samplers.step_counts(most))
        ]
        slopes = map(samplers.slope, curves.values())
        cells.append(("slope", *("exact" if slope is None else f"{slope:.2f}" for slope in slopes)))
        cells.append(("order", *(f"{samplers.order(process, name):g}" for name in curves)))
        print()
        _table(f"{process} noise", ["steps", *curves], cells)
