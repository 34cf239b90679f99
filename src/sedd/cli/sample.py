"""``sedd sample``, ``sedd infill`` and ``sedd trace``: texts from a model."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import Progress
from rich.text import Text

from sedd.cli.root import app

if TYPE_CHECKING:
    from sedd.factory import LoadedModel
    from sedd.generate import GeneratedSequence, SamplingRun, SamplingSettings
    from sedd.sampling import Prompt, State

ModelFolder = Annotated[
    Path, typer.Argument(help="The folder of a run, or one of its checkpoints.", show_default=False)
]
Count = Annotated[int, typer.Option("-n", "--count", help="How many samples.")]
Length = Annotated[int | None, typer.Option(help="Tokens in a sample; the model's length if left out.")]
Steps = Annotated[str, typer.Option(help="Steps from noise to text; inf reveals one token after another, exactly.")]
SamplerName = Annotated[
    str | None,
    typer.Option(
        "--sampler",
        help="exact, tweedie, euler, ancestral, theta, gibbs, remask, ordered; confidence and entropy do not sample "
        "the model's law. By default exact for denoisers under absorbing noise, ancestral under uniform, tweedie for "
        "scores.",
    ),
]
Grid = Annotated[str, typer.Option(help="uniform, cosine, or times from 1 down to 0, as in 1,0.6,0.2,0.")]
Seed = Annotated[int, typer.Option(help="Decides every draw: a sample's number and the seed make the sample.")]
Temperature = Annotated[float, typer.Option(help="Of the law of the clean token; below 1 is bolder.")]
TopP = Annotated[float, typer.Option(help="Draw among the fewest tokens that have this share.")]
TopK = Annotated[int | None, typer.Option(help="Draw among the k likeliest tokens.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", help="Of the sampler: theta=0.5, eta=0.02, strategy=loop, direction=forward, sites=2 …"),
]
LabelName = Annotated[str | None, typer.Option("--label", help="What the texts are to be, for a model with labels.")]
Guidance = Annotated[
    float, typer.Option(help="How far towards the label: 1 is its own law, 0 that without it, above 1 more of it.")
]
Watch = Annotated[bool, typer.Option("--watch", help="Show the text forming, on stderr.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON record a line.")]
Out = Annotated[Path | None, typer.Option(help="Write the texts here, not to stdout; JSON lines if it ends in .jsonl.")]
Batch = Annotated[int, typer.Option(help="Samples drawn side by side; it changes no sample.")]
Precision = Annotated[
    str | None, typer.Option(help="Of matrix products: float32 or bfloat16; by default, on a GPU, that of training.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda …; a GPU if there is one.")]


@app.command()
def sample(
    model: ModelFolder,
    count: Count = 4,
    length: Length = None,
    steps: Steps = "128",
    sampler: SamplerName = None,
    grid: Grid = "uniform",
    seed: Seed = 0,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = None,
    options: Options = None,
    label: LabelName = None,
    guidance: Guidance = 1.0,
    watch: Watch = False,
    as_json: AsJson = False,
    out: Out = None,
    batch: Batch = 16,
    device: Device = None,
    precision: Precision = None,
) -> None:
    """Draw texts from nothing.

    Texts go to stdout, one after another; what they cost goes to stderr. The same seed gives the same texts.
    """
    from sedd.generate import blank

    if count < 1:
        raise ValueError(f"count is {count}; ask for at least 1 sample")
    how = settings(steps, sampler, grid, seed, temperature, top_p, top_k, options, label, guidance)
    loaded, job = _job(model, device, precision, how)
    _deliver(loaded, job, blank(loaded, count, length), [None] * count, watch, as_json, out, batch)


@app.command()
def infill(
    model: ModelFolder,
    templates: Annotated[
        list[str] | None, typer.Argument(help="Texts with gaps: 'The {8} sat.' has one of eight tokens.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A file with a template a line.")] = None,
    count: Annotated[int, typer.Option("-n", "--count", help="How many fillings of each template.")] = 1,
    steps: Steps = "128",
    sampler: SamplerName = None,
    grid: Grid = "uniform",
    seed: Seed = 0,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = None,
    options: Options = None,
    label: LabelName = None,
    guidance: Guidance = 1.0,
    watch: Watch = False,
    as_json: AsJson = False,
    out: Out = None,
    batch: Batch = 16,
    device: Device = None,
    precision: Precision = None,
) -> None:
    """Fill the gaps of templates: a beginning, an end, several gaps, anything.

    {n} is a gap of n tokens; a brace itself is written twice. What is given comes back as it is. With a BPE tokenizer
    words bring their own space: write 'The{8} sat', not 'The {8} sat'. Under uniform noise a filling is approximate.
    """
    from sedd.generate import template

    wanted = [*(templates or []), *(_lines(file) if file else [])]
    if not wanted:
        raise ValueError("no template was given; write one, as in: sedd infill run 'The {8} sat.', or give --file")
    if count < 1:
        raise ValueError(f"count is {count}; ask for at least 1 filling")
    how = settings(steps, sampler, grid, seed, temperature, top_p, top_k, options, label, guidance)
    loaded, job = _job(model, device, precision, how)
    named = [text for text in wanted for _ in range(count)]
    _deliver(loaded, job, template.around(named, loaded), named, watch, as_json, out, batch)


@app.command()
def trace(
    model: ModelFolder,
    templates: Annotated[list[str] | None, typer.Argument(help="Texts with gaps; none: from nothing.")] = None,
    out: Annotated[Path, typer.Option(help="The picture: .html, or .png.")] = Path("trace.html"),
    count: Annotated[int, typer.Option("-n", "--count", help="How many texts, where no template is given.")] = 1,
    length: Length = None,
    steps: Steps = "128",
    sampler: SamplerName = None,
    grid: Grid = "uniform",
    seed: Seed = 0,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = None,
    options: Options = None,
    label: LabelName = None,
    guidance: Guidance = 1.0,
    device: Device = None,
    precision: Precision = None,
) -> None:
    """Draw a picture of how texts came to be: every token in the colour of the step at which it appeared."""
    from sedd import generate

    if out.suffix not in (".html", ".png"):
        raise ValueError(f"out is {out}; a picture is an .html or a .png file")
    if count < 1:
        raise ValueError(f"count is {count}; ask for at least 1 text")
    how = settings(steps, sampler, grid, seed, temperature, top_p, top_k, options, label, guidance)
    loaded, job = _job(model, device, precision, how)
    prompt = generate.template.around(templates, loaded) if templates else generate.blank(loaded, count, length)
    rows = [generate.trace.tokens(loaded.tokenizer, row) for row, _, _ in _rows(job, prompt, 16, loaded, False)]
    name = type(job.sampler).__name__.lower()
    title = f"{len(rows)} texts of {model.name}" if len(rows) > 1 else f"A text of {model.name}"
    about = f"Sampler {name}, {steps} steps, seed {seed}."
    with written(out):
        if out.suffix == ".png":
            generate.trace.save_trace_png(rows, f"{title}. {about}", out)
        else:
            out.write_text(generate.trace.trace_page(rows, title, about), encoding="utf-8")
    print(out)
    _cost(job)


# What the three share --------------------------------------------------------------------------------------


def _job(
    model: Path, device: str | None, precision: str | None, how: "SamplingSettings"
) -> tuple["LoadedModel", "SamplingRun"]:
    from sedd import factory, generate

    loaded = factory.load(model, device=device or best_device(), precision=precision)
    return loaded, generate.SamplingRun.of(loaded, how)


def best_device() -> str:
    """A GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def settings(
    steps: str,
    sampler: str | None,
    grid: str,
    seed: int,
    temperature: float,
    top_p: float,
    top_k: int | None,
    options: list[str] | None,
    label: str | None = None,
    guidance: float = 1.0,
) -> "SamplingSettings":
    """How to sample, as it was asked for."""
    from sedd.generate.settings import SamplingSettings, parse_options, parse_steps

    return SamplingSettings(
        sampler=sampler,
        steps=parse_steps(steps),
        grid=grid,
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        options=parse_options(options),
        label=label,
        guidance=guidance,
    )


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} could not be read: {error}") from None


def _rows(
    job: "SamplingRun", prompt: "Prompt", batch: int, loaded: "LoadedModel", watch: bool
) -> Iterator[tuple["GeneratedSequence", int, dict[str, float]]]:
    """Finished rows with their numbers and what each cost, a batch at a time."""
    from sedd import generate

    if batch < 1:
        raise ValueError(f"batch is {batch}; it must be 1 or more")
    console, device = Console(stderr=True), loaded.device
    total = len(prompt.given)
    quiet = watch or not console.is_terminal
    with Progress(console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("sampling", total=total * max(1, len(job.times) - 1))
        for first in range(0, total, batch):
            piece = prompt.rows(slice(first, first + batch)).to(device)
            before, began, states = job.tally.rows, job.tally.seconds, job.states(piece, first)
            if watch:
                last = _watched(states, loaded, console)
            else:
                for last in states:
                    bar.update(
                        task, completed=(first + len(piece.given) * _share(last, job)) * max(1, len(job.times) - 1)
                    )
            spent = {"calls": (job.tally.rows - before) / len(piece.given)}
            spent["seconds"] = round((job.tally.seconds - began) / len(piece.given), 6)
            for i, row in enumerate(generate.finished(last, piece)):
                yield row, first + i, spent


def _share(state: "State", job: "SamplingRun") -> float:
    return state.step / max(1, len(job.times) - 1, state.step)


def _watched(states: Iterator["State"], loaded: "LoadedModel", console: Console) -> "State":
    """Show the first text of a batch as it forms: live on a terminal, else a line now and then."""
    from sedd.diffusion.process import Absorbing

    mask = loaded.process.mask if isinstance(loaded.process, Absorbing) else None

    def text(state: "State") -> Text:
        shown = Text()
        for masked, run in groupby(state.x[0].tolist(), lambda token: token == mask):
            ids = list(run)
            shown.append("·" * len(ids) if masked else loaded.tokenizer.decode(ids), style="dim" if masked else "")
        return shown

    last = next(states)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=20, transient=True) as live:
            for last in states:
                live.update(text(last))
        return last
    for last in states:
        if last.step & (last.step - 1) == 0:  # 0, 1, 2, 4, 8 …
            console.print(f"step {last.step}: {text(last).plain!r}", markup=False, highlight=False, soft_wrap=True)
    return last


def _deliver(
    loaded: "LoadedModel",
    job: "SamplingRun",
    prompt: "Prompt",
    named: Sequence[str | None],
    watch: bool,
    as_json: bool,
    out: Path | None,
    batch: int,
) -> None:
    """Print or write every text as it is done, then what it cost."""
    as_json = as_json or (out is not None and out.suffix == ".jsonl")
    with _sink(out) as put:
        for row, number, spent in _rows(job, prompt, batch, loaded, watch):
            text = loaded.tokenizer.decode(row.ids)
            if not as_json:
                put(text)
                continue
            record = {"text": text, "ids": row.ids, "sample": number, **spent, **job.facts()}
            put(json.dumps(record | ({} if named[number] is None else {"template": named[number]})))
    _cost(job)


@contextmanager
def _sink(out: Path | None) -> Iterator[Any]:
    if out is None:
        yield lambda line: print(line, flush=True)
        return
    with written(out), out.open("w", encoding="utf-8") as file:
        yield lambda line: print(line, file=file)


@contextmanager
def written(out: Path) -> Iterator[None]:
    """What cannot be written is a sentence."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror}); choose another --out") from None


def _cost(job: "SamplingRun") -> None:
    """What was foreseen, what it took."""
    done = job.tally
    made, foreseen = done.rows / done.samples, done.expected / done.samples
    words = [
        f"{done.samples} sample{'s' * (done.samples > 1)} by {type(job.sampler).__name__}",
        f"network calls a sample {made:.1f} (expected {'unknown' if math.isnan(foreseen) else f'{foreseen:.1f}'})",
        f"{done.seconds:.2f} s",
        f"{done.tokens / max(done.seconds, 1e-9):,.0f} tokens/s",
        *([f"{done.clamped} laws clamped"] if done.clamped else []),
    ]
    print("; ".join(words), file=sys.stderr)
    if job.sampler.order == 0:
        print("note: this sampler does not draw from the model's law", file=sys.stderr)
