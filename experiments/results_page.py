"""Write the results page and the tables of the README from the JSON files of benchmarks and studies.

python experiments/results_page.py              writes docs/results.md, its figures, and README.md between the markers
python experiments/results_page.py --check      names what is out of date, and then ends with code 1

Every number comes from benchmarks/results/ or experiments/results/. A study without a file there has no section.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ablations
import bits
import float32_draws
import objectives
import quality_curves
import zero_shot
from matplotlib.figure import Figure
from study_runs import digest, save_figure

from sedd import plot
from sedd.training.recipes import RECIPES

ROOT = Path(__file__).parents[1]
IN_README = (
    "absorbing, small, batch 64",
    "uniform, small, batch 32",
    "denoiser, batch 16, 128 steps",
    "absorbing score, Tweedie, batch 16, 128 steps",
)
"""The settings whose speed the README shows; the results page has all."""
BEGIN, END = "<!-- results: written by experiments/results_page.py -->", "<!-- end of results -->"
HEADER = """# Results

Written by `experiments/results_page.py` (`make results`) from the files in `benchmarks/results/` and
`experiments/results/`, which hold the commands, settings and errors of all numbers. Likelihoods of diffusion models
have the standard error of their Monte Carlo draws. Those marked ≤ are upper bounds; protocol `sedd` leaves out terms,
as the papers do, and has no mark. What else a number depends on has a name, its [protocol](guides/likelihood.md). The
[lab log](log.md) has the experiments behind them, negative results included.
"""


class Drawing(NamedTuple):
    """A figure of the page, and the data by which it is known to be up to date."""

    name: str
    description: str
    data: object
    draw: Callable[[], Figure]

    @property
    def link(self) -> str:
        """The image in Markdown."""
        return f"![{self.description}](images/{self.name}.svg)"


class Section(NamedTuple):
    """A part of the page."""

    title: str
    lines: list[str]
    drawings: list[Drawing]


Json = Mapping[str, Any]


def read(root: Path, path: str) -> Any:
    """Return the contents of a JSON file; None if it does not exist."""
    file = root / path
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


# Speed -----------------------------------------------------------------------------------------------------


def fused_row(ours: Json, name: str) -> Json | None:
    """Return the measurement of a setting of benchmarks/gpu.py as users run it."""
    rows = ours.get(name, {}).get("rows", ())
    return next((row for row in rows if row["variant"] == "fused"), None)


def training_rows(ours: Json, rivals: Json) -> list[list[str]]:
    """Return the rows of training: tokens per second and memory of the rival and of this package."""
    rows = []
    for rival in rivals["training"]:
        bf16, float8 = (fused_row(ours, name) for name in (rival["ours"], f"{rival['ours']}, float8"))
        assert bf16 is not None
        assert float8 is not None
        ratios = [each["tokens_per_second"] / rival["tokens_per_second"] for each in (bf16, float8)]
        cells = [f"{each['tokens_per_second']:,.0f}, {each['peak_gib']:.1f} GiB" for each in (rival, bf16, float8)]
        rows.append(
            [rival["setting"], f"{rival['rival']}: {cells[0]}", *cells[1:], f"{ratios[0]:.1f}, {ratios[1]:.1f}"]
        )
    return rows


def sampling_rows(ours: Json, rivals: Json) -> list[list[str]]:
    """Return the rows of sampling: milliseconds per step and memory."""
    rows = []
    for rival in rivals["sampling"]:
        bf16 = fused_row(ours, rival["ours"])
        assert bf16 is not None
        cells = [f"{each['milliseconds']:.3g} ms, {each['peak_gib']:.1f} GiB" for each in (rival, bf16)]
        ratio = rival["milliseconds"] / bf16["milliseconds"]
        rows.append([rival["setting"], f"{rival['rival']}: {cells[0]}", cells[1], f"{ratio:.1f}"])
    return rows


TRAINING_HEADS = ("training, tokens per second", "published code", "sedd, bfloat16", "sedd, float8", "times as fast")
SAMPLING_HEADS = ("sampling, per step", "published code", "sedd, bfloat16", "times as fast")


def speed_note(ours: Json, rivals: Json) -> str:
    """State how the speed was measured."""
    machine, sources = ours["machine"], ", ".join(rivals["sources"].values())
    return (
        f"One {machine['name']}, torch {machine['torch'].split('+')[0]}, vocabulary 50,257, length 1024, random "
        f"tokens; memory is the peak. sedd: `benchmarks/gpu.py` at {machine['commit']}, {ours['date']}. Published "
        f"code, in another run on one H200: {sources}."
    )


def speed_section(root: Path) -> Section | None:
    """Speed beside the rivals."""
    ours, rivals = read(root, "benchmarks/results/gpu-h200.json"), read(root, "benchmarks/results/rivals-h200.json")
    if ours is None or rivals is None:
        return None
    lines = [speed_note(ours, rivals), "", *table(TRAINING_HEADS, training_rows(ours, rivals)), ""]
    lines += table(SAMPLING_HEADS, sampling_rows(ours, rivals))
    lines += ["", f"How the published code was run. {rivals['how']}"]
    data = [training_rows(ours, rivals), sampling_rows(ours, rivals)]
    about = "Speed and peak memory of training and of sampling, beside published code"
    return Section(
        "Speed beside published implementations",
        lines,
        [Drawing("speed", about, data, lambda: draw_speed(ours, rivals))],
    )


@plot.Style()
def draw_speed(ours: Json, rivals: Json) -> Figure:
    """Draw bars of training and of sampling: speed on the left, peak memory on the right."""
    figure = plot.figure(7.4, 7.4)
    panels = plot.axes(figure, rows=2, columns=2, sharey="row", height_ratios=(5, 8))
    draw_bars(panels[:2], ours, rivals["training"], ("tokens_per_second", 1e-3), ("", ", float8"))
    draw_bars(panels[2:], ours, rivals["sampling"], ("milliseconds", 1), ("",))
    panels[0].set(xlabel="training, thousand tokens per second")
    panels[2].set(xlabel="sampling, milliseconds per step")
    panels[1].set(xlabel="training, peak memory in GiB")
    panels[3].set(xlabel="sampling, peak memory in GiB")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3, fontsize=9)
    return figure


def draw_bars(
    panels: Sequence[Any], ours: Json, rivals: Sequence[Json], speed: tuple[str, float], variants: Sequence[str]
) -> None:
    """Draw a rival and our variants for each setting: one panel of speed, one of memory."""
    names = {"": "sedd, bfloat16", ", float8": "sedd, float8"}
    colors = {"": plot.BLUE, ", float8": plot.GREEN}
    height = 0.8 / (1 + len(variants))
    for axes, (key, factor) in zip(panels, (speed, ("peak_gib", 1)), strict=True):
        for place, rival in enumerate(rivals):
            label = "published code" if not place else None
            axes.barh(place - 0.4 + height / 2, rival[key] * factor, 0.9 * height, color=plot.GREY, label=label)
            for number, variant in enumerate(variants, 1):
                row = fused_row(ours, rival["ours"] + variant)
                assert row is not None
                label = names[variant] if not place else None
                at = place - 0.4 + height * (number + 0.5)
                axes.barh(at, row[key] * factor, 0.9 * height, color=colors[variant], label=label)
        axes.set_yticks(range(len(rivals)), [break_setting(rival) for rival in rivals], fontsize=9)
        axes.set_ylim(len(rivals) - 0.45, -0.55)
        axes.grid(axis="y", visible=False)


def break_setting(rival: Json) -> str:
    """Return a rival and its setting in two lines."""
    first, _, rest = rival["setting"].partition(", ")
    return f"{rival['rival']}: {first},\n{rest}"


# Bits ------------------------------------------------------------------------------------------------------


def bits_section(root: Path) -> Section | None:
    """Bits per character beside the rivals."""
    ours, rivals = read(root, "benchmarks/results/text8p-h200.json"), read(root, "benchmarks/results/rivals-h200.json")
    if ours is None or rivals is None:
        return None
    rows = bits.table_rows(ours, rivals)
    lines = [bits.note(ours), "", *table(bits.HEADS, rows), "", f"Published code: {rivals['text8p']['how']}", ""]
    lines += [
        *bits.difference_lines(ours, rivals),
        "",
        "Commands, where `train.txt` holds the first 69M characters of text8, the last 5M of them for validation:",
        "",
        *(line for run in ours["runs"].values() for line in bits.command_lines(run)),
    ]
    data = [rows, [run.get("curve") for run in ours["runs"].values()]]
    about = "Bits per character of text8p against seconds of training, beside published code"
    return Section(
        "Bits per character beside published code",
        lines,
        [Drawing("bits", about, data, lambda: bits.draw(ours, rivals))],
    )


# Studies ---------------------------------------------------------------------------------------------------


def study_note(record: Json, script: str) -> str:
    """State the machine, the commits and the days of the rows of a study."""
    machine, rows = record["machine"], record["rows"].values()
    commits = " and ".join(dict.fromkeys(row.get("commit", machine["commit"]) for row in rows))
    dates = " and ".join(sorted({row.get("date", record["date"]) for row in rows}))
    return f"One {machine['name']}; `experiments/{script}.py` at {commits}, {dates}."


def objectives_section(root: Path) -> Section | None:
    """Training objectives at equal cost."""
    record = read(root, "experiments/results/objectives.json")
    if record is None:
        return None
    note = (
        f"Protocol `{record['protocol']}`. {study_note(record, 'objectives')} Every row is {record['seconds']:g} "
        f"seconds of training of the network of the recipe `text8` in {record['precision']}."
    )
    about = "Validation bounds of all objectives against seconds and characters"
    curves = [row.get("curve") for row in record["rows"].values()]
    drawing = Drawing("objectives", about, curves, lambda: objectives.draw_curves(record))
    return Section("Training objectives at equal cost", [note, "", *objectives.table_lines(record)], [drawing])


def ablations_section(root: Path) -> Section | None:
    """Variants of the recipe text8 at equal time."""
    record = read(root, "benchmarks/results/ablations-equal-time-h200.json")
    if record is None:
        return None
    lines = [ablations.note(record), "", *table(ablations.HEADS, ablations.table_rows(record))]
    return Section("Ablations of the recipe at equal time", lines, [])


def quality_section(root: Path) -> Section | None:
    """Sample quality against compute, a table and curves for each file of results."""
    files = sorted((root / "experiments/results").glob("quality*.json"))
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    # models in the box first, and of those the rows of a GPU
    records.sort(key=lambda record: (record["model"] in zero_shot.ROWS, record["machine"].get("device") == "cpu"))
    if not records:
        return None
    lines = []
    for record in records:
        judge = quality_curves.measured_rows(record)[0]["judge"]
        about = " of the zero-shot table below" if record["model"] in zero_shot.ROWS else ""
        lengths = {row["length"] for row in quality_curves.measured_rows(record)}
        size = f"{record['samples']} samples of {' or '.join(map(str, sorted(lengths)))} tokens per row"
        lines += [f"`{record['model']}`{about}, {record['noise']} noise, judge {judge}, {size}."]
        lines += [study_note(record, "quality_curves"), "", *quality_curves.summary_lines(record)]
    lines += [quality_curves.seconds_note(records), ""]
    lines += float32_lines(root)
    data = [quality_curves.table_lines(record) for record in records]
    about = "Generative perplexity against steps and entropy"
    drawn = quality_curves.with_curves(records)
    drawings = [Drawing("quality", about, data, lambda: quality_curves.draw_frontier(drawn))] if drawn else []
    return Section("Sample quality against compute", lines, drawings)


def float32_lines(root: Path) -> list[str]:
    """Draws in float32 and in float64 from a known distribution over a large vocabulary."""
    record = read(root, "experiments/results/float32-draws.json")
    if record is None:
        return []
    about = (
        f"Draws in float32 where model and judge are exact: {record['tokens']} independent tokens per cell, "
        f"{record['vocabulary']:,} in the vocabulary with Zipf's probabilities, ancestral sampling. "
    )
    return ["", about + study_note(record, "float32_draws"), "", *float32_draws.table_lines(record)]


def zero_shot_section(root: Path) -> Section | None:
    """The zero-shot table in miniature."""
    record = read(root, "experiments/results/zero-shot.json")
    if record is None:
        return None
    note = (
        f"{study_note(record, 'zero_shot')} Every model is trained for {record['seconds']:g} seconds on "
        f"{record['characters'] / 1e6:.1f} MB ({', '.join(record['sources'])})."
    )
    sources = json.loads(zero_shot.PUBLISHED.read_text(encoding="utf-8"))["sources"]
    cited = [f"- {name}: {title}." for name, title in sources.items()]
    lines = [
        f"{note} {zero_shot.speed_note(record)}".rstrip(),
        "",
        *zero_shot.table_lines(record),
        *cited,
        *text_lines(root),
    ]
    return Section("Zero-shot likelihood in miniature", lines, [])


def text_lines(root: Path) -> list[str]:
    """State what the text of the zero-shot models was assembled from."""
    summary = read(root, "experiments/results/english-text.json")
    if summary is None:
        return []
    names = [f"{name.split(':')[1]} ({part['characters'] / 1e6:.1f}M)" for name, part in summary["sources"].items()]
    return [
        "",
        f"`english.jsonl.xz` is written by `experiments/english_text.py`: {summary['totals']['characters'] / 1e6:.0f}M "
        f"characters of books, news, speeches, encyclopedia summaries and reviews, from packages and files: "
        f"{', '.join(names)}. Paragraphs that share ten words in a row with any of the texts that are scored were left "
        f"out: {summary['totals']['overlapping']}.",
    ]


def models_section(root: Path) -> Section | None:
    """The models in the box."""
    rows = []
    for name in ("stories", "molecules"):
        record = read(root, f"experiments/results/{name}.json")
        if record is None:
            continue
        evaluation, trained = record["export"]["result"]["evaluation"], record["train"]
        bound = f"≤ {evaluation['nats_per_token']:.4f} ± {evaluation['stderr_nats_per_token']:.4f}"
        size = f"{record['export']['folder_bytes'] / 1e6:.1f} MB"
        seconds = f"{trained['result']['seconds']:.0f} s on one {trained['machine']['name']}"
        rows.append([f"`{name}`", size, seconds, bound, f"{evaluation['tokens']:,}", trained["machine"]["commit"]])
    heads = ("model", "size", "training", "nats per token, held out, `strict`", "held-out tokens", "commit")
    lines = [*table(heads, rows), *molecule_lines(root)]
    return Section("Models in the box", lines, []) if rows else None


def molecule_lines(root: Path) -> list[str]:
    """Return validity, uniqueness and novelty of the molecules of the model in the box, by temperature."""
    record = read(root, "experiments/results/molecules.json") or {}
    found = [step["result"] for name, step in record.items() if name == "quality" or name.startswith("temperature ")]
    heads = ("temperature", "molecules", "valid by RDKit", "of those unique", "not in the training data")
    rows = [
        [
            f"{row['temperature']:g}",
            f"{row['samples']:,}",
            f"{row['validity']:.1%} ± {row['stderr_validity']:.1%}",
            *("" if row[name] is None else f"{row[name]:.1%}" for name in ("uniqueness", "novelty")),
        ]
        for row in found
    ]
    return ["", "Samples of `molecules`, one character per network call:", "", *table(heads, rows)] if rows else []


# Serving and saving ----------------------------------------------------------------------------------------


def serving_section(root: Path) -> Section | None:
    """Throughput and latency of a server under load, beside offline sampling."""
    lines: list[str] = []
    for name in ("serve-h200", "serve-cpu"):
        record = read(root, f"benchmarks/results/{name}.json")
        if record is None:
            continue
        machine, setting, offline = record["machine"], record["setting"], record["offline_tokens_per_second"]
        command = record["command"].replace("sedd bench serve", "python benchmarks/serve.py")  # its earlier name
        heads = ("load", "tokens/s", "of offline", "replies", "refused", "p50, p95, p99", "first edit", "rows per pass")
        rows = [
            [
                load["variant"],
                f"{load['tokens_per_second']:,.0f}",
                f"{load['tokens_per_second'] / offline:.0%}",
                str(load["replies"]),
                str(load["refused"]),
                ", ".join(f"{load[p] / 1e3:.2f}" for p in ("p50", "p95", "p99")) + " s",
                "" if load["first_edit"] is None else f"{load['first_edit']:.0f} ms",
                f"{load['occupancy']:.1f}",
            ]
            for load in record["loads"]
        ]
        differing = sum(load["differing"] for load in record["loads"])
        errors = sum(load["errors"] for load in record["loads"])
        lines += [
            f"One {machine['name']}, `{command}` at {machine['commit']}: the network of recipe "
            f"`{setting['recipe']}` with random weights, {setting['steps']} steps, {setting['batch']} slots, "
            f"{machine['precision']}. Offline sampling of as many texts at once: {offline:,.0f} tokens per second. "
            f"Replies that differ from those that the same request had alone: {differing}; errors: {errors}.",
            "",
            *table(heads, rows),
            "",
        ]
    return Section("Serving", lines[:-1], []) if lines else None


def saving_section(root: Path) -> Section | None:
    """What checkpoints cost a run on a GPU."""
    record = read(root, "benchmarks/results/saving-h200.json")
    if record is None:
        return None
    heads = (
        "run",
        "checkpoint",
        "cost of one during the run",
        "share at the recipe's interval",
        "share of the whole run",
    )
    rows = []
    for name, run in record["runs"].items():
        training, count = run["training"], run["checkpoints"]
        cost, every = (run["waited_seconds"] + run["slowed_seconds"]) / count, RECIPES[name]["train"]["save_every"]
        total = training["seconds"] + training["eval_seconds"] + training["save_seconds"]
        share = (training["save_seconds"] + run["slowed_seconds"]) / total
        what = f"`{name}`, {training['step']:,} steps, {count + 1} checkpoints"
        rows.append(
            [
                what,
                f"{run['checkpoint_bytes'] / 1e9:.2f} GB",
                f"{cost:.2f} s",
                f"{cost / (cost + every * run['seconds_per_step']):.2%} (every {every:,} steps)",
                f"{share:.1%} of {total:.0f} s",
            ]
        )
    commits, dates = (
        " and ".join(dict.fromkeys(run[key] for run in record["runs"].values())) for key in ("commit", "date")
    )
    note = (
        f"One {record['machine']['name']}; `benchmarks/saving.py` at {commits}, {dates}. On a GPU checkpoints "
        "are copied to the host and written beside training. The first one of a run costs more than the next, since "
        "memory of the host is allocated for it; for the last one a run waits. `small` is saved far more often here "
        "than by its recipe."
    )
    return Section("Checkpoints", [note, "", *table(heads, rows)], [])


SECTIONS = (
    speed_section,
    bits_section,
    objectives_section,
    ablations_section,
    quality_section,
    zero_shot_section,
    models_section,
    serving_section,
    saving_section,
)


# Page and README -------------------------------------------------------------------------------------------


def sections(root: Path) -> list[Section]:
    """Return the sections for which there are results."""
    return [section for build in SECTIONS if (section := build(root)) is not None]


def page(found: Sequence[Section]) -> str:
    """Return the page in Markdown."""
    parts = [HEADER]
    for section in found:
        images = "".join(f"\n{drawing.link}\n" for drawing in section.drawings)
        body = "\n".join(section.lines).rstrip()
        parts.append(f"## {section.title}\n\n{body}\n{images}")
    return "\n".join(parts)


def fastest(rivals: Sequence[Json], key: Callable[[Json], float]) -> list[Json]:
    """Return the fastest rival of each of our settings."""
    names = dict.fromkeys(rival["ours"] for rival in rivals)
    return [min((rival for rival in rivals if rival["ours"] == name), key=key) for name in names]


def readme(root: Path, text: str) -> str:
    """Return the README with its two tables between the markers: speed beside the fastest rivals, and bits."""
    ours, rivals = read(root, "benchmarks/results/gpu-h200.json"), read(root, "benchmarks/results/rivals-h200.json")
    runs = read(root, "benchmarks/results/text8p-h200.json")
    best = {
        "training": fastest(rivals["training"], lambda rival: -rival["tokens_per_second"]),
        "sampling": fastest(rivals["sampling"], lambda rival: rival["milliseconds"]),
    }
    training, sampling = training_rows(ours, best), sampling_rows(ours, best)
    speed = [[f"training, {row[0]}", *row[1:4], row[4]] for row in training if row[0] in IN_README]
    speed += [[f"sampling, {row[0]}", row[1], row[2], "", row[3]] for row in sampling if row[0] in IN_README]
    ratios = [float(word) for row in training for word in row[4].split(", ")], [float(row[3]) for row in sampling]
    ranges = [f"{min(values):.1f} to {max(values):.1f}" for values in ratios]
    heads = ("tokens per second of training, time per step of sampling", *TRAINING_HEADS[1:])
    blocks = [
        f"On one GPU, training is {ranges[0]} and sampling {ranges[1]} times as fast as the fastest published code. "
        f"Four of the {len(training) + len(sampling)} settings compared ([all results](docs/results.md)):",
        "",
        *table(heads, speed),
        "",
        speed_note(ours, rivals),
        "",
        "Equal seconds of training, in bits per character of held-out text (each row is one run):",
        "",
        *table(bits.HEADS, bits.table_rows(runs, rivals)),
        "",
        f"{bits.note(runs)} Published code: {rivals['text8p']['how']}",
    ]
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"README.md has no place for the tables; put {BEGIN} and {END} around it")
    content = "\n".join(blocks)
    return pattern.sub(lambda _: f"{BEGIN}\n\n{content}\n\n{END}", text)


def stale(root: Path) -> list[str]:
    """Return the files that are not what the results give, with the reason."""
    found = sections(root)
    problems = []
    for name, expected in (
        ("docs/results.md", page(found)),
        ("README.md", readme(root, (root / "README.md").read_text(encoding="utf-8"))),
    ):
        file = root / name
        if not file.exists() or file.read_text(encoding="utf-8") != expected:
            problems.append(f"{name} differs from the results; run make results")
    for drawing in (drawing for section in found for drawing in section.drawings):
        file = root / f"docs/images/{drawing.name}.svg"
        if not file.exists() or f"<dc:identifier>{digest(drawing.data)}<" not in file.read_text(encoding="utf-8"):
            problems.append(f"docs/images/{drawing.name}.svg shows other data; run make results")
    return problems


def write(root: Path) -> None:
    """Write the page, its figures and the tables of the README."""
    found = sections(root)
    for drawing in (drawing for section in found for drawing in section.drawings):
        save_figure(drawing.draw(), root / f"docs/images/{drawing.name}.svg", drawing.data)
    (root / "docs/results.md").write_text(page(found), encoding="utf-8")
    file = root / "README.md"
    file.write_text(readme(root, file.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    """Write everything, or name what is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; end with code 1 if something is out of date"
    )
    args = parser.parse_args()
    if not args.check:
        write(ROOT)
    elif problems := stale(ROOT):
        print("\n".join(problems), file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
