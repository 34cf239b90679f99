"""Sample quality against compute: samplers, steps, temperatures and the precision of draws, for one trained model.

python experiments/quality_curves.py MODEL --judge SmolLM2 --out quality.json --limit-seconds 560      again until done
python experiments/quality_curves.py UNIFORM --judge SmolLM2 --out uniform.json --samplers euler,tweedie
python experiments/quality_curves.py stories --judge SmolLM2 --out q.json --steps 8,64 -n 8 --temperatures 1    on a CPU
python experiments/quality_curves.py stories --samples FOLDER --samplers remask        draws, on the machine to be timed
python experiments/quality_curves.py stories --samples FOLDER --judge SmolLM2 --out q.json     judges, on any machine
python experiments/quality_curves.py --table quality.json uniform.json --plot quality.svg

For every sampler and number of steps: generative perplexity under the judge, always with the entropy of the samples,
seconds per sample and, with ``--mauve``, MAUVE. Temperatures other than 1 trace the frontier of perplexity and entropy;
float32 draws repeat the exponential race of published samplers, whose perplexity falls with the number of steps only
because its entropy does. Rows are as those of `sedd quality`, each stored at once; rows that are there are skipped.
With ``--samples`` samples are drawn and judged apart, by two machines if wanted; the results name the first.
"""

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from study_runs import Results, TimeLimit, has_gpu, report_skipped, save_figure

from sedd import draws, plot, samplers
from sedd.evaluation.quality import evaluate_samples, judges
from sedd.evaluation.quality import samples as sample_sets
from sedd.evaluation.quality.metrics import MauveReference
from sedd.loading import load_model

ABSORBING = ("euler", "tweedie", "first-hitting", "remask", "theta", "confidence")
UNIFORM = ("euler", "tweedie", "theta")
"""Samplers by the noise of the model; the others reveal masks."""
STEPS = (8, 16, 32, 64, 128, 256, 512, 1024)
PRECISIONS = ("float64", "float32")
COLUMNS = {
    "sampler": "{}",
    "steps": "{}",
    "temperature": "{}",
    "draws": "{}",
    "gen_ppl_by_token": "{:.1f}",
    "entropy_nats": "{:.3f}",
    "seconds_per_sample": "{:.3f}",
    "nfe": "{:.0f}",
    "mauve": "{:.3f}",
}


class Setting(NamedTuple):
    """One row: a sampler at a number of steps, a temperature and a precision of draws."""

    sampler: str
    steps: int
    temperature: float
    draws: str

    @property
    def name(self) -> str:
        """The key of the row."""
        return f"{self.sampler}, {self.steps} steps, temperature {self.temperature:g}, {self.draws} draws"


def settings(args: argparse.Namespace, default_samplers: Sequence[str]) -> list[Setting]:
    """Return the rows: all combinations at float64, and with float32 draws those of temperature 1."""
    samplers = args.samplers.split(",") if args.samplers else default_samplers
    steps = [int(word) for word in args.steps.split(",")]
    temperatures = [float(word) for word in args.temperatures.split(",")]
    rows = [
        Setting(sampler, count, temperature, draws)
        for draws, temperature, count, sampler in itertools.product(
            args.draw_precisions.split(","), temperatures, steps, samplers
        )
    ]
    return [row for row in rows if row.draws == "float64" or row.temperature == 1]


@contextlib.contextmanager
def draw_precision(name: str) -> Iterator[None]:
    """Draw tokens with 53 bits, or as published samples were: by an exponential race in float32."""
    if name == "float64":
        yield
        return
    import torch

    def race(x: torch.Tensor, weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Draw as `categorical.sample_next` does, all uniforms but the seed of the race left aside."""
        seed = int((u[:1, 0].double() * 2**53).sum()) if len(u) else 0
        generator = torch.Generator(device=weights.device).manual_seed(seed)
        return draws.legacy_fp32(weights / weights.sum(-1, keepdim=True), generator)

    before = draws.sample_next
    draws.sample_next = race
    try:
        yield
    finally:
        draws.sample_next = before


class SampleFolder:
    """Samples that were drawn but not judged: a file per row, and the facts and the machine of the study."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder, Results(folder / "facts.json")

    def path(self, setting: Setting) -> Path:
        """Return the file of a row."""
        return self.folder / f"{setting.sampler}-{setting.steps}-{setting.temperature:g}-{setting.draws}.jsonl"

    def settings(self) -> list[Setting]:
        """Return the rows that have been drawn, those with the fewest steps first."""
        words = (path.name.removesuffix(".jsonl").rsplit("-", 3) for path in self.folder.glob("*.jsonl"))
        rows = (Setting(name, int(steps), float(temperature), draws) for name, steps, temperature, draws in words)
        return sorted(rows, key=lambda row: (row.steps, row))

    def __contains__(self, setting: Setting) -> bool:
        """Whether a row has been drawn."""
        return self.path(setting).exists()

    def store(self, setting: Setting, drawn: sample_sets.SampleSet) -> str:
        """Write the samples of a row; return their cost in words."""
        sample_sets.write_samples(drawn, self.path(setting))
        self.results.store(setting.name, {"file": self.path(setting).name})
        return f"{drawn.seconds:.4f} s per sample"


class JudgedRows:
    """A judge, loaded once, and the results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.results = args, Results(args.out)
        self.judge = judges.load_judge(args.judge, device=default_device())
        texts = None if args.mauve is None else sample_sets.read_samples(args.mauve)
        self.reference = None if texts is None else MauveReference(texts, self.judge, args.judge_batch)

    def __contains__(self, setting: Setting) -> bool:
        """Whether a row has been judged."""
        return setting.name in self.results

    def store(self, setting: Setting, drawn: sample_sets.SampleSet) -> str:
        """Judge the samples of a row and store it, or why it has no metrics; return which."""
        try:
            judged = evaluate_samples(
                drawn, self.judge, truncate=True, reference=self.reference, batch=self.args.judge_batch
            )
        except ValueError as error:  # samples without text: of records, a sampler may be surest of padding
            judged = {"failed": str(error)}
        files = {"judge": self.args.judge, "mauve_reference": judged.get("mauve_reference")}
        judged |= {name: Path(path).name for name, path in files.items() if path}  # without their folders
        judged["source"] = Path(self.args.model).name
        self.results.store(setting.name, {**setting._asdict(), **judged})
        return str(judged.get("failed") or f"perplexity {judged['gen_ppl_by_token']}")


class Study:
    """A model, loaded once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.loaded = load_model(find_model(args.model), device=default_device(), precision=None)
        self.noise = self.loaded.config.noise.process
        self.samplers = ABSORBING if self.noise == "absorbing" else UNIFORM

    def describe(self, results: Results) -> None:
        """Store the facts of the study and this machine."""
        model, objective = Path(self.args.model).name, self.loaded.config.objective
        results.describe(model=model, noise=self.noise, objective=objective, samples=self.args.count)

    def draw(self, setting: Setting) -> sample_sets.SampleSet:
        """Draw the samples of a row."""
        options = samplers.SamplingSettings(
            sampler=setting.sampler, steps=setting.steps, temperature=setting.temperature, seed=self.args.seed
        )
        fused = False if setting.draws == "float32" else None  # draws from logits have no table to race over
        name = Path(self.args.model).name
        with draw_precision(setting.draws):
            run = samplers.SamplingRun.of(self.loaded, options, fused)
            prompt = samplers.blank_prompt(self.loaded, self.args.count, self.args.length)
            drawn = sample_sets.generate_samples(
                self.loaded, run, prompt, self.args.batch, name, lambda done, total: None
            )
        return replace(drawn, facts={**drawn.facts, "draw_precision": setting.draws, "model": name})


def default_device() -> str:
    """Return the GPU, if there is one."""
    return "cuda" if has_gpu() else "cpu"


def find_model(name: str) -> Path:
    """Return the folder of a model: a path, or a name in the box."""
    from sedd.training import checkpoint

    return checkpoint.locate_model(Path(name)) or Path(name)


# Table and figure ------------------------------------------------------------------------------------------


def table_lines(record: Mapping[str, Any]) -> list[str]:
    """Return the rows as Markdown."""
    rows = measured_rows(record)
    columns = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    heads = [name.replace("gen_ppl_by_token", "perplexity").replace("_", " ") for name in columns]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = ("" if row.get(name) is None else COLUMNS[name].format(row[name]) for name in columns)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *failed_lines(record)]


def failed_lines(record: Mapping[str, Any]) -> list[str]:
    """Name the rows without metrics, and why, those of a sampler together."""
    failed: dict[str, list[Mapping[str, Any]]] = {}
    for row in record["rows"].values():
        if "failed" in row:
            failed.setdefault(row["sampler"], []).append(row)
    return [
        f"- {sampler}, {', '.join(str(row['steps']) for row in rows)} steps: no metrics. {rows[0]['failed']}."
        for sampler, rows in failed.items()
    ]


def measured_rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows that have metrics."""
    return [row for row in record["rows"].values() if "failed" not in row]


def summary_lines(record: Mapping[str, Any]) -> list[str]:
    """Return perplexity and entropy by sampler and steps, and by temperature where there are several; and calls."""
    rows = measured_rows(record)
    at_one = [row for row in rows if row["temperature"] == 1]
    cooled = {row["steps"] for row in rows if row["temperature"] != 1}
    lines = pivot("perplexity, entropy in nats; steps:", at_one, "steps", show_quality)
    for count in sorted(cooled):
        part = [row for row in rows if row["steps"] == count]
        lines += pivot(f"{count} steps; temperature:", part, "temperature", show_quality)
    lines += pivot("network calls per sample; steps:", at_one, "steps", lambda row: f"{row['nfe']:.0f}")
    if texts := {row["mauve_texts"] for row in rows if row.get("mauve") is not None}:
        count = " or ".join(map(str, sorted(texts)))
        lines.append(
            f"- MAUVE of {count} texts beside as many human ones: so few that it compares rows of this table only."
        )
    return [*lines, *failed_lines(record), ""]


def seconds_note(records: Sequence[Mapping[str, Any]]) -> str:
    """State why the page shows network calls and no seconds, by the rows that differ in nothing but temperature."""
    groups: dict[tuple[object, ...], list[float]] = {}
    for number, record in enumerate(records):
        for row in measured_rows(record):
            key = (number, row["sampler"], row["steps"], row["draws"], row["nfe"])
            groups.setdefault(key, []).append(row["seconds_per_sample"])
    most = max(max(seconds) / min(seconds) for seconds in groups.values())
    return (
        "Compute is counted in network calls. The seconds of each row were measured once, and they are not reliable: "
        f"rows that differ only in temperature make the same calls and differ by a factor of up to {most:.1f} in "
        "time. The cause was not recorded, so seconds are stored and not shown."
    )


def show_quality(row: Mapping[str, Any]) -> str:
    """Return perplexity and entropy, neither of which is stated without the other, and MAUVE if it was computed."""
    mauve = "" if row.get("mauve") is None else f", MAUVE {row['mauve']:.2f}"
    return f"{row['gen_ppl_by_token']:.1f}, {row['entropy_nats']:.2f}{mauve}"


def pivot(
    title: str, rows: Sequence[Mapping[str, Any]], column: str, show: Callable[[Mapping[str, Any]], str]
) -> list[str]:
    """Return a table of samplers, one column per value of ``column``."""
    values = sorted({row[column] for row in rows})
    found = {(row["sampler"], row["draws"], row[column]): row for row in rows}
    lines = [f"| {title} | {' | '.join(f'{value:g}' for value in values)} |", "|---|" + "---|" * len(values)]
    for sampler, kind in dict.fromkeys(key[:2] for key in found):
        cells = (found.get((sampler, kind, value)) for value in values)
        name = sampler if kind == "float64" else f"{sampler}, float32 draws"
        lines.append(f"| {name} | {' | '.join('' if row is None else show(row) for row in cells)} |")
    return [*lines, ""]


STYLES = {
    "euler": (plot.ORANGE, "o"),
    "tweedie": (plot.BLUE, "x"),
    "first-hitting": ("black", "D"),
    "remask": (plot.PURPLE, "v"),
    "theta": (plot.GREEN, "s"),
    "confidence": ("#b8860b", "P"),
    "ancestral": (plot.BLUE, "x"),
    "gibbs": (plot.PURPLE, "D"),
}
"""Colour and marker of a sampler."""


def with_curves(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records of several numbers of steps."""
    return [record for record in records if len({row["steps"] for row in measured_rows(record)}) > 1]


@plot.Style()
def draw_frontier(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw, for every model, perplexity and entropy against steps, and, of several temperatures, against each other."""
    columns = 2 + any(row["temperature"] != 1 for record in records for row in measured_rows(record))
    figure = plot.figure(7.4, 3.9 * len(records))
    axes = plot.axes(figure, rows=len(records), columns=columns)
    handles: dict[str, Any] = {}
    for number, record in enumerate(records):
        panels = axes[number * columns : (number + 1) * columns]
        rows = measured_rows(record)
        names = dict.fromkeys((row["sampler"], row["draws"]) for row in rows)
        for sampler, kind in names:
            colour, marker = STYLES.get(sampler, (plot.GREY, "*"))
            style: dict[str, Any] = {"color": colour, "marker": marker, "markerfacecolor": "none"}
            style |= {"linestyle": "-" if kind == "float64" else "--"}
            points = [row for row in rows if (row["sampler"], row["draws"]) == (sampler, kind)]
            at_one = sorted((row for row in points if row["temperature"] == 1), key=lambda row: row["steps"])
            label = sampler if kind == "float64" else f"{sampler}, float32 draws"
            for panel, key in zip(panels, ("gen_ppl_by_token", "entropy_nats"), strict=False):
                panel.plot([row["steps"] for row in at_one], [row[key] for row in at_one], **style, label=label)
            if columns > 2:
                most = max((row["steps"] for row in points if row["temperature"] != 1), default=0)
                frontier = sorted((r for r in points if r["steps"] == most), key=lambda row: row["temperature"])
                x, y = ([row[name] for row in frontier] for name in ("entropy_nats", "gen_ppl_by_token"))
                panels[2].plot(x, y, **style)
        perplexity, entropy = panels[:2]
        perplexity.set(ylabel="generative perplexity, by token", yscale="log")
        entropy.set(ylabel="entropy of a sample, nats")
        ticks = sorted({row["steps"] for row in rows})
        shown = 2 if len(ticks) > 5 else 1  # labels of all would overlap
        for panel in (perplexity, entropy):
            panel.set(xlabel="steps", xscale="log")
            panel.set_xticks(ticks, ["" if i % shown else str(tick) for i, tick in enumerate(ticks)])
            panel.set_xticks([], minor=True)
        show_numbers(perplexity)
        if columns > 2 and all(row["temperature"] == 1 for row in rows):
            panels[2].set_axis_off()
        elif columns > 2:
            panels[2].set(xlabel="entropy, nats", yscale="log")
            panels[2].set_title("over temperatures", fontsize=10, loc="right")
            show_numbers(panels[2])
        title = f"{record['model']}, {record['noise']} noise, {record['samples']} samples per point"
        perplexity.set_title(title, fontsize=10, loc="left")
        handles |= dict(zip(*reversed(perplexity.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=9)
    return figure


def show_numbers(axes: Axes) -> None:
    """Label a logarithmic axis at 1, 2 and 5 times powers of ten."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def main() -> None:
    """Measure the rows that are missing, as far as the limit of seconds allows; print the table and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+", help="a model in the box or a folder; with --table, files of results")
    parser.add_argument("--judge", help="language model that judges the samples: a folder or a name on the Hub")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--samples", type=Path, help="folder of samples to draw, or with --judge to judge")
    parser.add_argument("--samplers", help=f"{', '.join(ABSORBING)}; under uniform noise {', '.join(UNIFORM)}")
    parser.add_argument("--steps", default=",".join(map(str, STEPS)), help="numbers of steps")
    parser.add_argument("--temperatures", default="0.7,0.8,0.9,1,1.1", help="temperatures of the frontier")
    parser.add_argument("--draw-precisions", default=",".join(PRECISIONS), help="float64, float32 or both")
    parser.add_argument("-n", "--count", type=int, default=64, help="samples per row")
    parser.add_argument("--length", type=int, help="tokens per sample; by default those of training")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples")
    parser.add_argument("--mauve", type=Path, help="human texts (.txt, .jsonl), for MAUVE")
    parser.add_argument("--batch", type=int, default=64, help="samples drawn at a time")
    parser.add_argument("--judge-batch", type=int, default=16, help="samples judged at a time")
    parser.add_argument("--limit-seconds", type=float, help="start no row that would end later than this")
    parser.add_argument("--table", action="store_true", help="print the tables of earlier results")
    parser.add_argument("--plot", type=Path, help="draw the curves (.svg, .png)")
    args = parser.parse_args()
    if unknown := set(args.draw_precisions.split(",")) - set(PRECISIONS):
        parser.error(f"draw-precisions is {args.draw_precisions}; choose float64, float32, not {', '.join(unknown)}")
    if args.table:
        records = [json.loads(Path(path).read_text(encoding="utf-8")) for path in args.model]
    elif len(args.model) > 1 or (args.judge is None) != (args.out is None) or not (args.judge or args.samples):
        parser.error("name one model, --judge and --out, or --samples; or --table with files of results")
    else:
        args.model = args.model[0]
        try:
            records = [judge_samples(args) if args.samples and args.judge else measure_rows(args)]
        except ValueError as error:
            raise SystemExit(f"{parser.prog}: {error}") from None
    records = [record for record in records if record.get("rows")]
    for record in records:
        print("\n".join(table_lines(record)))
    if args.plot is not None and (drawn := with_curves(records)):
        print(save_figure(draw_frontier(drawn), args.plot))


def measure_rows(args: argparse.Namespace) -> dict[str, Any]:
    """Draw the rows that are missing, those with the fewest steps first, and judge them if there is a judge."""
    study, limit, skipped = Study(args), TimeLimit(args.limit_seconds), []
    rows = SampleFolder(args.samples) if args.judge is None else JudgedRows(args)
    study.describe(rows.results)
    measured: list[tuple[Setting, float]] = []
    if has_gpu():  # so that no row pays for the compilation of kernels and the capture of CUDA graphs
        for sampler in args.samplers.split(",") if args.samplers else study.samplers:
            study.draw(Setting(sampler, 4, 1.0, "float64"))
    for setting in settings(args, study.samplers):
        if setting in rows:
            continue
        if not limit.allows(expected_seconds(setting, measured)):
            skipped.append(setting.name)
            continue
        start = time.perf_counter()
        outcome = rows.store(setting, study.draw(setting))
        seconds = time.perf_counter() - start
        print(f"{setting.name}: {outcome}, {seconds:.1f} s", file=sys.stderr, flush=True)
        measured.append((setting, seconds))
    report_skipped(skipped)
    return rows.results.record


def judge_samples(args: argparse.Namespace) -> dict[str, Any]:
    """Judge the samples in a folder that are not in the results yet; return the results."""
    folder, name = SampleFolder(args.samples), Path(args.model).name
    if not folder.settings() or "model" not in folder.results.record:
        raise ValueError(f"{args.samples} holds no samples; draw them there, without --judge")
    if (drawn_from := folder.results.record["model"]) != name:
        raise ValueError(f"{args.samples} holds samples of {drawn_from}, not of {name}; name that model")
    rows = JudgedRows(args)
    rows.results.take_facts(folder.results)
    for setting in folder.settings():
        if setting not in rows:
            drawn = sample_sets.read_samples(folder.path(setting))
            print(f"{setting.name}: {rows.store(setting, drawn)}", file=sys.stderr, flush=True)
    return rows.results.record


def expected_seconds(setting: Setting, measured: Sequence[tuple[Setting, float]]) -> float:
    """Return the seconds to expect of a row by those of its sampler, or else of all, in proportion to the steps."""
    same = [row for row in measured if row[0].sampler == setting.sampler] or measured
    return max((seconds * max(1.0, setting.steps / row.steps) for row, seconds in same), default=0.0)


if __name__ == "__main__":
    main()
