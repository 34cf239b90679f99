"""``sedd sample``, ``sedd infill`` and ``sedd trace``: generate texts."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import Parameter
from itertools import count as count_up
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console

from sedd import files
from sedd.cli import root
from sedd.cli.root import count_of
from sedd.sampling_settings import SETTINGS, SamplingSettings, parse_options, parse_steps
from sedd.terminal import visible
from sedd.training.progress import progress_on_stderr

if TYPE_CHECKING:
    from sedd.loading import LoadedModel
    from sedd.samplers import GeneratedSequence, Prompt, SamplingRun


def _sampling_options() -> Iterator[Parameter]:
    """Yield an option per field of `SamplingSettings`, and --option for the fields of its sampler."""
    fields: dict[str, tuple[Any, Any, str]] = {n: (f.type, f.default, f.metadata["help"]) for n, f in SETTINGS.items()}
    fields["steps"] = (str, str(fields["steps"][1]), fields["steps"][2])  # steps may be inf
    fields["option"] = (
        list[str] | None,
        None,
        "Option of one sampler: theta=0.5 for theta; sites=2 for gibbs; strategy=loop or eta=0.02 for remask; "
        "direction=forward for ordered; bound=0.1 for entropy; pad=-1 for confidence or entropy, to reveal padding as "
        "any other token. Repeatable.",
    )
    kind: Any
    for name, (kind, default, text) in fields.items():
        option = Annotated[kind, typer.Option(help=text, rich_help_panel="Sampling options")]
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=option)


sampling_options = root.takes(_sampling_options())
"""Let a command take the options of sampling as ``**settings``; `sampling_settings` reads them."""


def sampling_settings(settings: dict[str, Any]) -> SamplingSettings:
    """Build settings from the options that `sampling_options` added to a command."""
    values = {**settings, "steps": parse_steps(settings["steps"]), "options": parse_options(settings["option"])}
    del values["option"]
    return SamplingSettings(**values)


@sampling_options
def _prepare(
    model: Path,
    count: int,
    length: int | None,
    templates: Sequence[str],
    out: Path | None,
    *,
    device: str | None = None,
    network: list[str] | None = None,
    precision: str | None = None,
    **settings: Any,
) -> tuple["LoadedModel", "SamplingRun", "Prompt"]:
    """Load a model, check the settings against it, and announce what is sampled.

    The prompt has ``count`` samples, or ``count`` of each template.

    Args:
        device: cpu, cuda, cuda:N or mps; by default the GPU of CUDA if there is one.
    """
    if out is not None:
        root.check_out(out)
    sampling = sampling_settings(settings)
    from sedd import samplers
    from sedd.loading import load_model
    from sedd.runtime.device import resolve_device

    loaded = load_model(model, device=str(resolve_device(device)), precision=precision)
    run = samplers.SamplingRun.of(loaded, sampling)
    if templates:
        prompt = samplers.template.template_prompt([text for text in templates for _ in range(count)], loaded)
        texts = count_of(len(templates), "template") + (f", {count_of(count, 'sample')} each" if count > 1 else "")
    else:
        prompt = samplers.blank_prompt(loaded, count, length)
        texts = f"{count_of(count, 'sample')} of {count_of(prompt.given.shape[1], 'token')}"
    stated = ["seed"] if run.name == "left-to-right" else ["steps", "seed"]
    stated += [name for name, field in SETTINGS.items() if getattr(sampling, name) != field.default]
    root.announce(texts, model, **{name: settings[name] for name in stated}, **sampling.options)
    return loaded, run, prompt


@root.takes(root.keywords(_prepare))
def _generate(
    model: Path,
    count: int,
    length: int | None,
    templates: Sequence[str],
    *,
    watch: bool = False,
    as_json: bool = False,
    out: Path | None = None,
    batch: int = 16,
    **options: Any,
) -> None:
    """Sample, write every text as soon as its batch is done, then print the statistics.

    Texts that may hold line ends are separated by a line; those that are shown have their control characters escaped.

    Args:
        watch: Show the texts on stderr as they form.
        out: File for the texts instead of stdout; JSON records if it ends in .jsonl.
    """
    loaded, run, prompt = _prepare(model, count, length, templates, out, **options)
    from sedd.tokenizer import Integers
    from sedd.trace import separator

    as_json = as_json or (out is not None and out.suffix == ".jsonl")
    has_lines = loaded.config.data.packing == "packed" and not isinstance(loaded.tokenizer, Integers)
    with nullcontext(sys.stdout) if out is None else _open_output(out) as file:
        for sequence, index, cost in _run_batches(run, prompt, batch, loaded, watch):
            text = loaded.tokenizer.decode(sequence.ids)
            if as_json:
                template = {"template": templates[index // count]} if templates else {}
                record = {"text": text, "ids": sequence.ids, "sample": index, **cost, **run.describe(), **template}
                text = json.dumps(record)
            else:
                if has_lines and len(prompt.given) > 1:
                    print(separator(index + 1), file=file)
                text = visible(text, line_ends=has_lines) if out is None else text
            print(text, file=file, flush=out is None)
    _print_stats(run)


@contextmanager
def _open_output(out: Path) -> Iterator[TextIO]:
    with root.writing_to(out), files.atomic_write(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield file


def _run_batches(
    run: "SamplingRun", prompt: "Prompt", batch: int, loaded: "LoadedModel", watch: bool
) -> Iterator[tuple["GeneratedSequence", int, dict[str, float]]]:
    """Sample batch by batch; yields each sequence, its index, and its network calls and seconds."""
    from sedd.trace import watch_states

    console, stats = Console(stderr=True), run.stats
    calls, seconds, index = stats.row_calls, stats.seconds, count_up()
    show = partial(watch_states, loaded=loaded, console=console) if watch else None
    with progress_on_stderr("sampling", shown=not watch) as on_progress:
        for sequences in run.batches(prompt, batch, on_progress, show):
            size, took = len(sequences), round((stats.seconds - seconds) / len(sequences), 6)
            cost = {"calls": (stats.row_calls - calls) / size, "seconds": took}
            calls, seconds = stats.row_calls, stats.seconds
            for sequence in sequences:
                yield sequence, next(index), cost


def _print_stats(run: "SamplingRun") -> None:
    """Print the number of network calls, expected and made, and the speed, on stderr."""
    stats = run.stats
    calls, expected = stats.row_calls / stats.samples, stats.expected_calls / stats.samples
    parts = [
        f"{count_of(stats.samples, 'sample')} by {run.name}",
        f"network calls per sample {calls:.1f} (expected {'unknown' if math.isnan(expected) else f'{expected:.1f}'})",
        f"{stats.seconds:.2f} s",
        f"{stats.tokens / max(stats.seconds, 1e-9):,.0f} tokens/s",
        *([f"{stats.clamped} distributions clamped"] if stats.clamped else []),
    ]
    print("; ".join(parts), file=sys.stderr)
    if run.sampler.order == 0:
        note = f"{run.name} need not sample the model's distribution: {run.sampler.assumes}"
        print(f"note: {visible(note)}", file=sys.stderr)


def _split(model: str | None, templates: list[str] | None) -> tuple[Path, list[str]]:
    what = "a template with a gap, as in 'The {8} sat.'"
    return root.split_model(model, templates or (), what, lambda text: "{" in text)


@root.command()
@root.takes(root.keywords(_generate))
def sample(model: root.OptionalModel = None, *, count: int = 4, length: int | None = None, **options: Any) -> None:
    """Generate texts unconditionally, or given a label.

    Texts go to stdout, with control characters escaped and a line before each if there are several; --json and --out
    keep them as they are. Statistics go to stderr. The same seed gives the same texts, up to rounding.

    Args:
        count (-n --count): Number of samples.
    """
    assert model is not None  # its callback returns the default
    _generate(model, count, length, (), **options)


@root.command()
@root.takes(root.keywords(_generate))
def infill(
    model: root.FirstModel = None,
    templates: list[str] | None = None,
    *,
    file: Path | None = None,
    count: int = 1,
    **options: Any,
) -> None:
    """Fill the gaps of templates: at the beginning, at the end, or anywhere between.

    {n} is a gap of n tokens; a literal brace is written twice. The given text is returned unchanged, but with a BPE
    tokenizer, whose words include the space before them, a space before a gap is left to the gap: 'The {8} sat' may
    become 'The, ... sat'. Under uniform noise the conditional distribution is approximate.

    Args:
        templates: Texts with gaps: 'The {8} sat.' has one gap of eight tokens.
        file: File with one template per line.
        count (-n --count): Number of samples per template.
    """
    folder, given = _split(model, templates)
    given += [line for line in files.read_text(file).splitlines() if line.strip()] if file else []
    if not given:
        raise ValueError("no template was given; write one, as in: sedd infill run 'The {8} sat.', or give --file")
    _generate(folder, count, None, given, **options)


@root.command()
@root.takes(root.keywords(_prepare))
def trace(
    model: root.FirstModel = None,
    templates: list[str] | None = None,
    *,
    out: Path = Path("trace.html"),
    count: int = 1,
    length: int | None = None,
    **options: Any,
) -> None:
    """Draw generated texts with each token coloured by the sampling step at which it appeared.

    Args:
        templates: Texts with gaps; without any, texts are generated from noise.
        out: Picture to write: .html or .png.
        count (-n --count): Number of samples, or of samples per template.
    """
    if out.suffix not in (".html", ".png"):
        raise ValueError(f"out is {out}; it must end in .html or .png")
    folder, given = _split(model, templates)
    loaded, run, prompt = _prepare(folder, count, length, given, out, **options)
    from sedd.trace import save_trace_png, trace_page, trace_tokens

    finished = _run_batches(run, prompt, 16, loaded, watch=False)
    rows = [trace_tokens(loaded.tokenizer.tokens(row.ids), row.reveal_step) for row, _, _ in finished]
    title = f"{len(rows)} texts of {folder.name}" if len(rows) > 1 else f"A text of {folder.name}"
    about = f"Sampler {run.name}, {options['steps']} steps, seed {options['seed']}."
    with root.writing_to(out):
        if out.suffix == ".png":
            save_trace_png(rows, f"{title}. {about}", out)
        else:
            files.write_text(out, trace_page(rows, title, about))
    root.show(str(out))
    _print_stats(run)
