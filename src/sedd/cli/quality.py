"""``sedd quality``: what samples are worth to a judge."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sedd.cli.evaluate import watched
from sedd.cli.root import AsJson, app
from sedd.cli.sample import (
    Batch,
    Device,
    Grid,
    Guidance,
    LabelName,
    Length,
    Options,
    SamplerName,
    Seed,
    Steps,
    Temperature,
    TopK,
    TopP,
    best_device,
    settings,
    written,
)

if TYPE_CHECKING:
    from sedd.evaluation.quality import SampleSet
    from sedd.evaluation.quality.sweep import SweepPoint
    from sedd.generate import SamplingRun
    from sedd.sampling import Prompt

PICTURES, RECORDS = (".png",), (".json", ".jsonl")
Record = dict[str, Any]
Look = Callable[["SampleSet"], Record]


@app.command()
def quality(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Runs, which are sampled; samples (.jsonl of sedd sample, a .txt with one a line, a folder of .txt); "
            "or results that were saved here, to stand beside them.",
            show_default=False,
        ),
    ],
    judge: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face causal model (folder, .gguf file, name on the Hub), or an autoregressive run of ours."
        ),
    ] = None,
    count: Annotated[int, typer.Option("-n", "--count", help="How many samples of each run.")] = 64,
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
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="Vary a setting: steps=16,32,64, temperature=0.8,1, sampler=…, eta=…; repeat it for a grid."),
    ] = None,
    mauve: Annotated[
        Path | None, typer.Option(help="Human texts, read as samples are; MAUVE against them in the judge's features.")
    ] = None,
    first_token: Annotated[
        str | None,
        typer.Option(
            help="skipped: not counted, as in published tables (default of Hugging Face judges). scored: counted, "
            "given the judge's starting token (default of ours)."
        ),
    ] = None,
    ids: Annotated[
        bool, typer.Option("--ids", help="Score the model's tokens as they are, if the judge has the same ones.")
    ] = False,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut what is longer than the judge's context; else it is refused.")
    ] = False,
    draw_precision: Annotated[
        str | None, typer.Option(help="With what precision samples were drawn whose file does not say: float32 …")
    ] = None,
    judge_precision: Annotated[
        str, typer.Option(help="Of a Hugging Face judge: float32, bfloat16, float64.")
    ] = "float32",
    judge_batch: Annotated[int, typer.Option(help="Samples judged side by side; it changes no number.")] = 8,
    batch: Batch = 16,
    save: Annotated[Path | None, typer.Option(help="Keep the samples that were drawn, as JSON lines.")] = None,
    out: Annotated[
        list[Path] | None, typer.Option(help="A .png of quality against cost and entropy; .jsonl for the results.")
    ] = None,
    as_json: AsJson = False,
    device: Device = None,
) -> None:
    """What samples are worth to a judge: generative perplexity, and what shows whether it was earned.

    Both conventions in use are printed: by token, e^(all nats/all tokens), and by sample, the mean of each sample's
    e^(nats/tokens). Beside them, always: the entropy of a sample's tokens in nats, distinct 1- to 4-grams over all
    samples, the share of 4-grams that repeat inside a sample, network calls (NFE) and seconds a sample, and the
    precision of the draws. All in the judge's tokens, with standard errors.

    Examples: `sedd quality run --judge gpt2-large -n 256 --sweep steps=16,64,256 --out sweep.png`,
    `sedd quality samples.jsonl --judge ar-run --json > a.json`, `sedd quality a.json b.json`.
    """
    from sedd.evaluation.quality import results as record
    from sedd.evaluation.quality import sweep as sweeps

    for path in out or []:
        _writable(path, PICTURES + RECORDS)
    if save is not None:
        _writable(save, RECORDS[1:])
    how = settings(steps, sampler, grid, seed, temperature, top_p, top_k, options, label, guidance)
    base = sweeps.SweepPoint(how, length)
    plan = _Plan(
        sweeps.sweep_points(base, sweep or []), count, batch, device or best_device(), draw_precision, bool(sweep)
    )
    if save is not None and (len(inputs) > 1 or len(plan.ways) > 1):
        raise ValueError("save keeps the samples of one run, drawn in one way; leave out other inputs and --sweep")
    work = [record.read_results(path) or plan.samples(path) for path in inputs]
    records = [one for each in work if isinstance(each, list) for one in each]
    if not all(isinstance(each, list) for each in work):
        look = _judge(judge, first_token, judge_precision, plan.device, mauve, ids, truncate, judge_batch, records)
        verdicts = (each if isinstance(each, list) else [look(_kept(one, save)) for one in each] for each in work)
        records = [one for several in verdicts for one in several]
    _deliver(records, sweeps.swept_names(sweep or []), out or [], as_json)


@dataclass(frozen=True)
class _Plan:
    """How runs are sampled, and files taken."""

    ways: "list[SweepPoint]"
    count: int
    batch: int
    device: str
    draw_precision: str | None
    swept: bool

    def __post_init__(self) -> None:
        for name in ("count", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")

    def samples(self, path: Path) -> "Iterator[SampleSet]":
        """Those of a run are drawn when they are asked for; all that can be refused is refused now."""
        from sedd.evaluation.quality import judges
        from sedd.evaluation.quality import samples as given

        if judges.is_run_folder(path):
            return self._drawn(path)
        if not path.exists():
            raise ValueError(f"{path} does not exist; name the folder of a run, a file of samples, or saved results")
        if self.swept:
            raise ValueError(f"{path} holds samples, which are drawn already; --sweep needs the folder of a run")
        found = given.read_samples(path)
        facts = {**found.facts, "draw_precision": found.facts.get("draw_precision") or self.draw_precision}
        return iter([replace(found, facts=facts)])

    def _drawn(self, path: Path) -> "Iterator[SampleSet]":
        from sedd import factory, generate
        from sedd.evaluation.quality import samples as given

        loaded = factory.load(path, device=self.device)
        jobs = [generate.SamplingRun.of(loaded, way.settings) for way in self.ways]
        canvases = [generate.blank(loaded, self.count, way.length) for way in self.ways]

        def draw(job: "SamplingRun", prompt: "Prompt") -> "SampleSet":
            with watched(f"sampling {path}", shown=True) as on_progress:
                return given.generate_samples(loaded, job, prompt, self.batch, str(path), on_progress)

        return map(draw, jobs, canvases)


def _judge(
    name: str | None,
    first: str | None,
    precision: str,
    device: str,
    mauve: Path | None,
    ids: bool,
    truncate: bool,
    batch: int,
    beside: list[Record],
) -> Look:
    """The judge, and MAUVE's reference as it has it in mind, as a function from samples to their record."""
    from sedd.evaluation.quality import evaluate_samples, judges
    from sedd.evaluation.quality import results as record
    from sedd.evaluation.quality import samples as given
    from sedd.evaluation.quality.mauve import MauveReference

    if name is None:
        raise ValueError("samples need a judge; name a Hugging Face model or an autoregressive run with --judge")
    texts = None if mauve is None else given.read_samples(mauve)
    judge = judges.load_judge(name, first_token=first, precision=precision, device=device)
    record.quality_table([*beside, record.judge_record(judge)], ())  # refused before the work is done
    reference = None if texts is None else MauveReference(texts, judge, batch)

    def look(samples: "SampleSet") -> Record:
        with watched(f"judging {samples.source}", shown=True) as on_progress:
            return evaluate_samples(
                samples, judge, by_ids=ids, truncate=truncate, reference=reference, batch=batch, on_progress=on_progress
            )

    return look


def _writable(path: Path, kinds: Sequence[str]) -> None:
    """Refuse what nothing can be written to, before the work is done."""
    if path.suffix not in kinds:
        raise ValueError(f"{path} cannot be written; its name must end in {' or '.join(kinds)}")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} does not exist; make it, or choose another place for {path.name}")


def _kept(samples: "SampleSet", path: Path | None) -> "SampleSet":
    from sedd.evaluation.quality.samples import write_samples

    if path is not None:
        with written(path):
            write_samples(samples, path)
    return samples


# What is shown ---------------------------------------------------------------------------------------------

WAYS = ("source", "sampler", "steps")
COUNTED = ("entropy_nats", "distinct_1", "distinct_2", "distinct_3", "distinct_4", "self_repetition_4")
COSTS = ("nfe", "seconds_per_sample", "draw_precision")


def _deliver(records: list[Record], swept: list[str], out: list[Path], as_json: bool) -> None:
    """The table or the records to stdout, files where they were asked for, and what to keep in mind to stderr."""
    from sedd import plot
    from sedd.evaluation.quality import comparison_warnings, quality_table
    from sedd.evaluation.quality.plots import plot_quality

    extra = [name if name in records[0] else "options" for name in swept if name not in WAYS]
    columns = [*WAYS, *extra, "gen_ppl_by_token", "gen_ppl_by_sample", *COUNTED]
    columns += [*(["mauve"] if any(record.get("mauve") is not None for record in records) else []), *COSTS]
    rows = quality_table(records, columns)
    for path in out:
        if path.suffix in PICTURES:
            plot.save_png(plot_quality(records, swept), path)
        else:
            with written(path):
                path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    for words in comparison_warnings(records):
        print(f"sedd: {words}", file=sys.stderr)
    if as_json:
        for record in records:
            print(json.dumps(record))
    else:
        _print(records, columns, rows)


def _print(records: list[Record], columns: list[str], found: list[list[Any]]) -> None:
    """One record a line for each number, several a row each; errors behind what they are errors of."""
    cells = [
        [_shown(value, record.get(f"stderr_{name}")) for name, value in zip(columns, row, strict=True)]
        for record, row in zip(records, found, strict=True)
    ]
    heads, first = [name.replace("_", " ") for name in columns], records[0]
    about = f"judge {first['judge']} in {first['judge_precision']}, first token {first['first_token']}"
    print(f"{about}; all in the judge's tokens, entropy in nats")
    if len(cells) == 1:
        kept = ("samples", "tokens", "truncated")
        for name, words in zip([*heads, *kept], [*cells[0], *(str(first.get(name)) for name in kept)], strict=True):
            print(f"{name:22s} {words}")
        return
    for row in (heads, ["---"] * len(heads), *cells):
        print(f"| {' | '.join(row)} |")


def _shown(value: Any, stderr: float | None) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.4g}" if stderr is None else f"{value:.4g} ± {stderr:.2g}"
