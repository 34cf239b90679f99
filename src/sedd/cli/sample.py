"""``sedd sample``, ``sedd infill`` and ``sedd trace``: generate texts."""

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from sedd import files
from sedd.cli.root import (
    AsJson,
    FirstModel,
    ModelDevice,
    Networks,
    OptionalModel,
    announce,
    app,
    check_out,
    check_precision,
    count_of,
    model_name,
    show,
    split_model,
    stderr_progress,
    writing_to,
)
from sedd.files import read_text
from sedd.sampling_settings import SETTINGS, SamplingSettings, check_length, parse_options, parse_steps
from sedd.schema import MAX_SAMPLES, check_count
from sedd.terminal import visible
from sedd.training.config import RunConfig, check_label

if TYPE_CHECKING:
    from sedd.loading import LoadedModel
    from sedd.samplers import GeneratedSequence, Prompt, SamplingRun

Length = Annotated[int | None, typer.Option(help="Tokens per sample; by default the model's sequence length.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show the texts on stderr as they form.")]
Out = Annotated[
    Path | None, typer.Option(help="File for the texts instead of stdout; JSON records if it ends in .jsonl.")
]
Batch = Annotated[int, typer.Option(help="Samples drawn at a time; affects speed and memory only.")]
Precision = Annotated[
    str | None,
    typer.Option(
        help="Precision of matrix products: float32 or bfloat16; by default, on a GPU, that of training.",
        callback=check_precision,
    ),
]

F = TypeVar("F", bound=Callable[..., Any])

PANEL = "Sampling options"
OPTION_HELP = (
    "Option of one sampler: theta=0.5 for theta; sites=2 for gibbs; strategy=loop or eta=0.02 for remask; "
    "direction=forward for ordered; bound=0.1 for entropy; pad=-1 for confidence or entropy, to reveal padding as any "
    "other token. Repeatable."
)

A_TEMPLATE: tuple[str, Callable[[str], bool]] = (
    "a template with a gap, as in 'The {8} sat.'",
    lambda text: "{" in text,
)
"""What the arguments after the model are, and whether a text can be one, for `split_model`."""


def sampling_options(command: F) -> F:
    """Replace the ``**settings`` of a command by one option per field; `sampling_settings` reads them."""
    signature = inspect.signature(command)
    *unchanged, _ = signature.parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(name), annotation=_annotation(name))
        for name in SETTINGS
    ]
    annotation = Annotated[list[str] | None, typer.Option("--option", help=OPTION_HELP, rich_help_panel=PANEL)]
    added.append(inspect.Parameter("options", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    command.__signature__ = signature.replace(parameters=[*unchanged, *added])  # type: ignore[attr-defined]
    hints = {name: hint for name, hint in command.__annotations__.items() if name != "settings"}
    command.__annotations__ = hints | {parameter.name: parameter.annotation for parameter in added}
    return command


def _default(name: str) -> Any:
    default = SETTINGS[name].default
    return str(default) if name == "steps" else default


def _annotation(name: str) -> Any:
    """Return the type and help text of an option; steps are text, since they may be ``inf``."""
    kind: Any = str if name == "steps" else SETTINGS[name].type
    return Annotated[kind, typer.Option(help=SETTINGS[name].metadata["help"], rich_help_panel=PANEL)]


def sampling_settings(settings: dict[str, Any]) -> SamplingSettings:
    """Build settings from the options that `sampling_options` added to a command."""
    values = {**settings, "steps": parse_steps(settings["steps"]), "options": parse_options(settings["options"])}
    return SamplingSettings(**values)


def describe_sampling(sampling: SamplingSettings, config: RunConfig | None) -> str:
    """Return the settings in a line: 64 steps, seed 3, temperature 0.6.

    Args:
        sampling: The settings; of those that need not be given, the ones that differ from their defaults are named.
        config: The configuration of the model, if it is known; an autoregressive one has no steps.
    """
    others = [name for name in SETTINGS if name not in ("sampler", "steps", "seed")]
    return ", ".join(
        [
            *([f"sampler {sampling.sampler}"] if sampling.sampler else []),
            *([] if config and config.objective == "autoregressive" else [_describe_steps(sampling.steps)]),
            f"seed {sampling.seed}",
            *(
                f"{name.replace('_', '-')} {value}"
                for name in others
                if (value := getattr(sampling, name)) != SETTINGS[name].default
            ),
            *(f"{name} {value}" for name, value in sampling.options.items()),
        ]
    )


def _describe_steps(steps: int | None) -> str:
    return "steps inf" if steps is None else count_of(steps, "step")


@app.command()
@sampling_options
def sample(
    model: OptionalModel = None,
    count: Annotated[int, typer.Option("-n", "--count", help="Number of samples.")] = 4,
    length: Length = None,
    watch: Watch = False,
    as_json: AsJson = False,
    out: Out = None,
    batch: Batch = 16,
    device: ModelDevice = None,
    network: Networks = None,
    precision: Precision = None,
    **settings: Any,
) -> None:
    """Generate texts unconditionally, or given a label.

    Texts go to stdout, with control characters escaped and a line before each if there are several; --json and --out
    keep them as they are. Statistics go to stderr. The same seed gives the same texts, up to rounding.
    """
    assert model is not None  # its callback returns the default
    if out is not None:
        check_out(out)
    sampling = _check(model, count, settings, length, batch=batch)
    from sedd.samplers import blank_prompt

    loaded, sampling_run = _load(model, device, precision, sampling)
    _generate(loaded, sampling_run, blank_prompt(loaded, count, length), [None] * count, watch, as_json, out, batch)


@app.command()
@sampling_options
def infill(
    model: FirstModel = None,
    templates: Annotated[
        list[str] | None, typer.Argument(help="Texts with gaps: 'The {8} sat.' has one gap of eight tokens.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="File with one template per line.")] = None,
    count: Annotated[int, typer.Option("-n", "--count", help="Number of samples per template.")] = 1,
    watch: Watch = False,
    as_json: AsJson = False,
    out: Out = None,
    batch: Batch = 16,
    device: ModelDevice = None,
    network: Networks = None,
    precision: Precision = None,
    **settings: Any,
) -> None:
    """Fill the gaps of templates: at the beginning, at the end, or anywhere between.

    {n} is a gap of n tokens; a literal brace is written twice. The given text is returned unchanged, but with a BPE
    tokenizer, whose words include the space before them, a space before a gap is left to the gap: 'The {8} sat' may
    become 'The, ... sat'. Under uniform noise the conditional distribution is approximate.
    """
    folder, given = split_model(model, templates or (), *A_TEMPLATE)
    all_templates = [*given, *(_read_lines(file) if file else [])]
    if not all_templates:
        raise ValueError("no template was given; write one, as in: sedd infill run 'The {8} sat.', or give --file")
    if out is not None:
        check_out(out)
    sampling = _check(folder, count, settings, templates=all_templates, batch=batch)
    from sedd.samplers import template

    loaded, sampling_run = _load(folder, device, precision, sampling)
    repeated = [text for text in all_templates for _ in range(count)]
    prompt = template.template_prompt(repeated, loaded)
    _generate(loaded, sampling_run, prompt, repeated, watch, as_json, out, batch)


@app.command()
@sampling_options
def trace(
    model: FirstModel = None,
    templates: Annotated[
        list[str] | None, typer.Argument(help="Texts with gaps; without any, texts are generated from noise.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Picture to write: .html or .png.")] = Path("trace.html"),
    count: Annotated[int, typer.Option("-n", "--count", help="Number of samples, without a template.")] = 1,
    length: Length = None,
    device: ModelDevice = None,
    network: Networks = None,
    precision: Precision = None,
    **settings: Any,
) -> None:
    """Draw generated texts with each token coloured by the sampling step at which it appeared."""
    if out.suffix not in (".html", ".png"):
        raise ValueError(f"out is {out}; it must end in .html or .png")
    check_out(out)
    folder, given = split_model(model, templates or (), *A_TEMPLATE)
    sampling = _check(folder, count, settings, length, given)
    from sedd import samplers
    from sedd.trace import save_trace_png, trace_page, trace_tokens

    loaded, sampling_run = _load(folder, device, precision, sampling)
    prompt = samplers.template.template_prompt(given, loaded) if given else samplers.blank_prompt(loaded, count, length)
    finished = _run_batches(sampling_run, prompt, 16, loaded, watch=False)
    rows = [trace_tokens(loaded.tokenizer, sequence) for sequence, _, _ in finished]
    title = f"{len(rows)} texts of {folder.name}" if len(rows) > 1 else f"A text of {folder.name}"
    about = f"Sampler {sampling_run.name}, {settings['steps']} steps, seed {settings['seed']}."
    with writing_to(out):
        if out.suffix == ".png":
            save_trace_png(rows, f"{title}. {about}", out)
        else:
            files.write_text(out, trace_page(rows, title, about))
    show(str(out))
    _print_stats(sampling_run)


def _check(
    model: Path,
    count: int,
    settings: dict[str, Any],
    length: int | None = None,
    templates: Sequence[str] = (),
    batch: int = 1,
) -> SamplingSettings:
    """Reject mistakes that show without the weights; then announce what is sampled."""
    from sedd.training import checkpoint

    check_count("count", count, most=MAX_SAMPLES)
    check_count("batch", batch)
    sampling = sampling_settings(settings)
    stored = checkpoint.peek_model(model)
    longest = stored.config.model.seq_len if stored else MAX_SAMPLES
    if templates:
        from sedd.samplers.template import parse_template

        for text in templates:
            parse_template(text, longest)
    if stored:
        check_length(length, longest)
        if sampling.label is not None:
            check_label(sampling.label, stored.labels)
    config = stored.config if stored else None
    if templates:
        texts = count_of(len(templates), "template") + (f", {count_of(count, 'sample')} each" if count > 1 else "")
    else:
        tokens = length or (config.model.seq_len if config else None)
        texts = count_of(count, "sample") + (f" of {count_of(tokens, 'token')}" if tokens else "")
    announce(f"{model_name(model)}: {texts}, {describe_sampling(sampling, config)}")
    return sampling


def _load(
    model: Path, device: str | None, precision: str | None, sampling: SamplingSettings
) -> tuple["LoadedModel", "SamplingRun"]:
    from sedd import samplers
    from sedd.loading import load_model
    from sedd.runtime.device import resolve_device

    loaded = load_model(model, device=str(resolve_device(device)), precision=precision)
    return loaded, samplers.SamplingRun.of(loaded, sampling)


def _read_lines(file: Path) -> list[str]:
    return [line for line in read_text(file).splitlines() if line.strip()]


def _run_batches(
    sampling_run: "SamplingRun", prompt: "Prompt", batch: int, loaded: "LoadedModel", watch: bool
) -> Iterator[tuple["GeneratedSequence", int, dict[str, float]]]:
    """Sample batch by batch; yields each sequence, its index, and its network calls and seconds."""
    from sedd import samplers
    from sedd.trace import watch_states

    console, stats = Console(stderr=True), sampling_run.stats
    total, grid = len(prompt.given), len(sampling_run.times)
    steps = max(1, grid - 1 if grid else int(prompt.blank.sum(-1).max()))  # without a grid, one token per step
    with stderr_progress("sampling", shown=not watch) as on_progress:
        for first in range(0, total, batch):
            part = prompt.rows(slice(first, first + batch)).to(loaded.device)
            size = len(part.given)
            calls, seconds, states = stats.row_calls, stats.seconds, sampling_run.states(part, first)
            if watch:
                last = watch_states(states, part, loaded, console, first)
            else:
                for last in states:
                    on_progress(round((first + size * last.step / max(steps, last.step)) * steps), total * steps)
                on_progress((first + size) * steps, total * steps)  # the last step may change nothing
            cost = {
                "calls": (stats.row_calls - calls) / size,
                "seconds": round((stats.seconds - seconds) / size, 6),
            }
            for i, sequence in enumerate(samplers.final_sequences(last, part)):
                yield sequence, first + i, cost


def _generate(
    loaded: "LoadedModel",
    sampling_run: "SamplingRun",
    prompt: "Prompt",
    templates: Sequence[str | None],
    watch: bool,
    as_json: bool,
    out: Path | None,
    batch: int,
) -> None:
    """Sample, write every text as soon as its batch is done, then print the statistics.

    Texts that may hold line ends are separated by a line; those that are shown have their control characters escaped.
    """
    from sedd.tokenizer import Integers
    from sedd.trace import separator

    as_json = as_json or (out is not None and out.suffix == ".jsonl")
    has_lines = loaded.config.data.packing == "packed" and not isinstance(loaded.tokenizer, Integers)
    with _open_output(out) as write:
        for sequence, index, cost in _run_batches(sampling_run, prompt, batch, loaded, watch):
            text = loaded.tokenizer.decode(sequence.ids)
            if not as_json:
                if has_lines and len(templates) > 1:
                    write(separator(index + 1))
                write(visible(text, line_ends=has_lines) if out is None else text)
                continue
            record = {"text": text, "ids": sequence.ids, "sample": index, **cost, **sampling_run.describe()}
            write(json.dumps(record | ({} if templates[index] is None else {"template": templates[index]})))
    _print_stats(sampling_run)


@contextmanager
def _open_output(out: Path | None) -> Iterator[Callable[[str], None]]:
    if out is None:
        yield lambda line: print(line, flush=True)
        return
    with writing_to(out), files.atomic_write(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield lambda line: print(line, file=file)


def _print_stats(sampling_run: "SamplingRun") -> None:
    """Print the number of network calls, expected and made, and the speed, on stderr."""
    stats = sampling_run.stats
    calls, expected = stats.row_calls / stats.samples, stats.expected_calls / stats.samples
    parts = [
        f"{stats.samples} sample{'s' * (stats.samples > 1)} by {sampling_run.name}",
        f"network calls per sample {calls:.1f} (expected {'unknown' if math.isnan(expected) else f'{expected:.1f}'})",
        f"{stats.seconds:.2f} s",
        f"{stats.tokens / max(stats.seconds, 1e-9):,.0f} tokens/s",
        *([f"{stats.clamped} distributions clamped"] if stats.clamped else []),
    ]
    print("; ".join(parts), file=sys.stderr)
    if sampling_run.sampler.order == 0:
        note = f"{sampling_run.name} need not sample the model's distribution: {sampling_run.sampler.assumes}"
        print(f"note: {visible(note)}", file=sys.stderr)
