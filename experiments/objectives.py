"""Training objectives at equal cost: the same network, data and seconds for each, on text8p.

python experiments/objectives.py TEXT8 --out FOLDER --tune --limit-seconds 560       learning rates, a part at a time
python experiments/objectives.py TEXT8 --out FOLDER --confirm --limit-seconds 560    the two best, for all seconds
python experiments/objectives.py TEXT8 --out FOLDER --limit-seconds 560              the study; again until it is done
python experiments/objectives.py TEXT8 --out FOLDER --only "SEDD absorbing;autoregressive" --seeds 0,1
python experiments/objectives.py --table FOLDER/objectives.json --plot objectives.svg
python experiments/objectives.py words.txt --test test.txt --out FOLDER --seconds 2 --set model.width=32    on a CPU

Every row is `sedd train` with the network and the optimizer of the recipe text8, for ``--seconds`` of training by the
wall clock, and `sedd eval --protocol text8p`: the strict bound, or the exact likelihood of the autoregressive row. All
rows run in one process; on a GPU each is first run for a few steps, so that no row pays for the compilation of
kernels. ``--tune`` trains every row for fewer seconds with several learning rates and keeps the one with the best
bound on validation text; ``--confirm`` trains the rows that were tuned for as long as the study does, with their two
best rates, and keeps the better. The test text is not used. The table states which differences are significant.
"""

import argparse
import itertools
import json
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from study_runs import (
    Printed,
    Results,
    TimeLimit,
    has_gpu,
    parse_config,
    report_skipped,
    run_command,
    save_figure,
    set_options,
    thin,
)

from sedd import plot
from sedd.data import text_file

TRAIN_CHARACTERS, VALIDATION_CHARACTERS = 64_000_000, 5_000_000
COMMON = {"train.eval_every": 100, "train.eval_sequences": 512, "train.save_every": 0, "train.keep_checkpoints": 1}
UNIFORM = {"noise.process": "uniform", "train.loss_weighting": 0}
CONCRETE = {"objective": "concrete-score", "objective_options.t_min": 1e-3, "train.loss_weighting": 1.5}
"""Of squared errors a masked token weighs 1/t² and not 1/t: this weighting leaves t^−1/2, as in the other rows."""
ROWS: dict[str, dict[str, object]] = {
    "SEDD absorbing": {"objective": "score-entropy"},
    "SEDD uniform": {"objective": "score-entropy", **UNIFORM, "train.time_sampling": "low-noise"},
    "RADD λ-DCE": {"objective": "lambda-dce"},
    "RADD t-DCE": {"objective": "t-dce", "model.time_conditioning": "none"},
    "RADD any-order": {"objective": "any-order"},
    "mean prediction": {"objective": "mean", "train.loss_weighting": 0},
    "D3PM absorbing": {"objective": "d3pm"},
    "D3PM uniform": {"objective": "d3pm", **UNIFORM},
    "concrete score, positive": CONCRETE,
    "concrete score, any sign": {**CONCRETE, "model.parameterization": "signed-score"},
    "autoregressive": {"objective": "autoregressive", "train.loss_weighting": 0},
}
"""The difference of each row from the recipe text8: an 8 × 512 transformer with n-gram embeddings, Muon, batch 256."""
STORED = {"optim.decay_fraction": "1.0", "optim.weight_decay": "0.0"}
"""What all rows have beside the recipe: what it was when the stored rows were measured."""
RECIPE_RATE = "4e-3"
"""The learning rate of the recipe text8, which rows have that are not tuned; the results do not store it."""
NOTES = {
    "concrete score, any sign": "the bound is that of the model whose scores are raised to 10⁻⁴ of a uniform guess's",
    "autoregressive": "the exact likelihood, not a bound",
}


# Runs ------------------------------------------------------------------------------------------------------


class Study:
    """The runs of the study in the folder ``args.out``, and their results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.given = args, parse_config(args.set)
        self.results = Results(args.out / "objectives.json")
        self.limit, self.longest, self.warm = TimeLimit(args.limit_seconds), 0.0, set[str]()
        self.data = self._training_text()

    def _training_text(self) -> Path:
        """Return the text to train and validate on: the first 69M characters of text8, or all of a text with a test."""
        if self.args.test is not None:
            return Path(self.args.text8)
        data: Path = self.args.out / "train.txt"
        if not data.exists():
            data.parent.mkdir(parents=True, exist_ok=True)
            with self.args.text8.open("rb") as raw, text_file.open_decompressed(self.args.text8, raw) as file:
                data.write_bytes(file.read(TRAIN_CHARACTERS + VALIDATION_CHARACTERS))
        return data

    def _train(self, row: str, seed: int, rate: float | None, folder: Path, *budget: object) -> tuple[Printed, Path]:
        shutil.rmtree(folder, ignore_errors=True)
        share = VALIDATION_CHARACTERS / (TRAIN_CHARACTERS + VALIDATION_CHARACTERS)
        config = {"data.val_fraction": share, "train.precision": self.args.precision, **COMMON, **ROWS[row]}
        config |= {} if rate is None else {"optim.lr": rate}
        words = ["train", self.data, "--recipe", "text8", "--seed", seed, *set_options(STORED | config | self.given)]
        return run_command(*words, *budget, "--out", folder), folder

    def has_time(self, seconds: float) -> bool:
        """Return whether there is time for a row of so many seconds of training, and for all that belongs to it."""
        return self.limit.allows(max(1.3 * seconds, self.longest))

    def warm_up(self, row: str) -> None:
        """Compile the kernels of a row, once per process."""
        if has_gpu() and row not in self.warm:
            self._train(row, 0, None, self.args.out / "warm-up", "--steps", 12)
            shutil.rmtree(self.args.out / "warm-up", ignore_errors=True)
        self.warm.add(row)

    def tune(self, row: str) -> None:
        """Try the learning rates that are missing, and store the best by the validation bound."""
        tuning = self.results.record.setdefault("tuning", {}).setdefault(row, {"bits": {}})
        for rate in self.args.rates.split(","):
            if rate in tuning["bits"] or not self.has_time(self.args.tune_seconds):
                continue
            self.warm_up(row)
            budget = ("--minutes", self.args.tune_seconds / 60)
            trained, folder = self._train(row, 0, float(rate), self.args.out / "tuning", *budget)
            tuning["bits"][rate] = None if trained.code else round(trained.record["bound_bits_per_char"], 4)
            shutil.rmtree(folder, ignore_errors=True)
            self.longest = max(self.longest, trained.seconds)
            finite = {rate: bits for rate, bits in tuning["bits"].items() if bits is not None}
            tuning |= {"seconds": self.args.tune_seconds, "chosen": min(finite, key=finite.__getitem__, default=None)}
            self.results.save()

    def confirm(self, row: str) -> bool:
        """Train with the two best learning rates for as long as the study does, and store the better.

        Returns:
            Whether that is done: also of a row that was not tuned.
        """
        tuning = self.results.record.get("tuning", {}).get(row)
        if tuning is None or tuning.get("chosen") is None:
            return True
        best = sorted((rate for rate, bits in tuning["bits"].items() if bits is not None), key=tuning["bits"].get)[:2]
        full = tuning.setdefault("full", {})
        for rate in best:
            if rate in full or not self.has_time(self.args.seconds):
                continue
            self.warm_up(row)
            budget = ("--minutes", self.args.seconds / 60)
            trained, folder = self._train(row, 0, float(rate), self.args.out / "tuning", *budget)
            shutil.rmtree(folder, ignore_errors=True)
            full[rate] = math.inf if trained.code else round(trained.record["bound_bits_per_char"], 4)
            self.longest = max(self.longest, trained.seconds)
            self.results.save()
        if not full.keys() >= set(best):
            return False
        tuning |= {"full_seconds": self.args.seconds, "chosen": min(best, key=full.__getitem__)}
        self.results.save()
        return True

    def measure(self, row: str, seed: int) -> None:
        """Train and evaluate a row with a seed, and store it with its curve."""
        self.warm_up(row)
        tuning = self.results.record.get("tuning", {}).get(row)
        rate = None if tuning is None or tuning.get("chosen") is None else float(tuning["chosen"])
        folder = self.args.out / f"{row.replace(' ', '-').replace(',', '')}-{seed}"
        trained, _ = self._train(row, seed, rate, folder, "--minutes", self.args.seconds / 60)
        record: dict[str, Any] = {"row": row, "seed": seed, "command": trained.command, "tuning": tuning}
        if trained.code:
            record["failed"] = f"sedd train ended with code {trained.code}"
        else:
            test = ["--protocol", "strict"] if self.args.test else ["--protocol", "text8p"]
            words = ["eval", folder, self.args.test or self.args.text8, *test, "--draws", self.args.draws]
            evaluated = run_command(*words)
            record |= {"training": trained.record, "wall_seconds": trained.seconds, "curve": read_curve(folder)}
            record |= {"eval_command": evaluated.command, "eval_wall_seconds": evaluated.seconds}
            if evaluated.code:
                record["failed"] = f"sedd eval ended with code {evaluated.code}"
            else:
                record["evaluation"] = evaluated.record
            self.longest = max(self.longest, trained.seconds + evaluated.seconds)
        self.results.store(f"{row}, seed {seed}", record)
        if not self.args.keep:
            shutil.rmtree(folder, ignore_errors=True)


def read_curve(folder: Path) -> list[dict[str, float]]:
    """Return the validation bounds of a run, against seconds and characters, at steps that were logged."""
    needed = {"bound_bits_per_char", "seconds", "tokens"}
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for line in lines if needed <= (record := json.loads(line)).keys()]
    points = [
        {
            "seconds": round(record["seconds"], 2),
            "characters": record["tokens"],
            "bits_per_char": round(record["bound_bits_per_char"], 4),
        }
        for record in records
    ]
    return thin(points)


# Statistics ------------------------------------------------------------------------------------------------


class Summary(NamedTuple):
    """A row over its seeds; on one test text, so the choice of the text is not part of its error."""

    row: str
    bits: float
    stderr: float
    seeds: int
    characters: float
    evaluation_error: float
    """Standard error of the mean over seeds by the Monte Carlo draws of the evaluations."""
    exact: bool


class Comparison(NamedTuple):
    """The difference of two rows; ``p`` is corrected for all comparisons."""

    better: str
    worse: str
    difference: float
    stderr: float
    p: float


def summarize(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Summary], float | None]:
    """Return a summary of every row, the best first, and the standard deviation over seeds, pooled over rows.

    The deviation is None if no row has two seeds. The error of a row is that of its evaluations and of its seeds.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "failed" not in row:
            groups.setdefault(row["row"], []).append(row)
    bits = {name: [run["evaluation"]["bits_per_char"] for run in group] for name, group in groups.items()}
    deviation = pooled_deviation(list(bits.values()))
    summaries = []
    for name, group in groups.items():
        errors = [(run["evaluation"]["stderr_nats_per_token"] or 0) / math.log(2) for run in group]
        evaluation_error = math.sqrt(sum(error**2 for error in errors)) / len(group)
        stderr = math.hypot(evaluation_error, (deviation or 0) / math.sqrt(len(group)))
        characters = statistics.mean(run["training"]["tokens"] for run in group)
        exact = all(run["evaluation"]["is_exact"] for run in group)
        mean = statistics.mean(bits[name])
        summaries.append(Summary(name, mean, stderr, len(group), characters, evaluation_error, exact))
    return sorted(summaries, key=lambda summary: summary.bits), deviation


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float | None:
    """Return the standard deviation within groups; None if none has two values."""
    freedom = degrees_of_freedom([len(group) for group in groups])
    squares = sum((value - statistics.mean(group)) ** 2 for group in groups for value in group)
    return math.sqrt(squares / freedom) if freedom else None


def degrees_of_freedom(counts: Sequence[int]) -> int:
    """Return the number of values beyond one per group."""
    return sum(count - 1 for count in counts)


def compare(summaries: Sequence[Summary]) -> list[Comparison]:
    """Test every difference between two rows: Student's t, two-sided, corrected by Holm's method.

    The error of a difference is that of both rows. The evaluations of all rows share their times and noise, and the
    spread over seeds contains some of their error, so it is rather too large.
    """
    from scipy import stats

    freedom = degrees_of_freedom([summary.seeds for summary in summaries])
    pairs = list(itertools.combinations(summaries, 2))
    errors = [math.hypot(a.stderr, b.stderr) for a, b in pairs]
    values = [
        float(2 * stats.t.sf((b.bits - a.bits) / error, freedom)) if error else float(a.bits == b.bits)
        for (a, b), error in zip(pairs, errors, strict=True)
    ]
    return [
        Comparison(a.row, b.row, b.bits - a.bits, error, p)
        for (a, b), error, p in zip(pairs, errors, holm(values), strict=True)
    ]


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number: the k-th smallest of n times n − k + 1, none below the one before."""
    corrected, largest = list(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected


# Table and figure ------------------------------------------------------------------------------------------


def table_lines(record: Mapping[str, Any], level: float = 0.05) -> list[str]:
    """Return the table as Markdown, and in words which differences are not significant."""
    rows = list(record["rows"].values())
    summaries, deviation = summarize(rows)
    lines = ["| objective | bits per character | seeds | characters | learning rate |", "|---|---|---|---|---|"]
    rates = {row["row"]: (row["tuning"] or {}).get("chosen") for row in rows}
    for summary in summaries:
        sign = "" if summary.exact else "≤ "
        value = f"{sign}{summary.bits:.4f} ± {summary.stderr:.4f}"
        rate = rates[summary.row] or f"{RECIPE_RATE}, the recipe's"
        lines.append(f"| {summary.row} | {value} | {summary.seeds} | {summary.characters / 1e6:.3g}M | {rate} |")
    lines += ["", *(f"- {row['row']}, seed {row['seed']}: {row['failed']}." for row in rows if "failed" in row)]
    lines += [f"- {name}: {note}." for name, note in NOTES.items() if any(s.row == name for s in summaries)]
    lines += [f"- {line}" for line in tuning_lines(record)]
    if deviation is None:
        return [*lines, "- No row has two seeds, so no difference can be called significant."]
    comparisons = compare(summaries)
    clear = [c for c in comparisons if c.p < level]
    smallest = f", the smallest of {min(c.difference for c in clear):.4f} bits" if clear else ""
    lines.append(
        f"- Standard deviation over seeds, pooled: {deviation:.4f} bits. {len(clear)} of {len(comparisons)} "
        f"differences are significant at {level:g}{smallest} (two-sided t-tests, Holm's correction)."
    )
    for summary in summaries if clear else ():
        close = [f"{c.worse} (p = {c.p:.2g})" for c in comparisons if c.better == summary.row and c.p >= level]
        if close:
            lines.append(f"- {summary.row} is not significantly better than {', '.join(close)}.")
    return lines


def tuning_lines(record: Mapping[str, Any]) -> list[str]:
    """State the budget of tuning, and whether the best rate may lie outside of those that were tried."""
    tuning = record.get("tuning")
    if not tuning:
        return [f"Nothing was tuned: all rows have the learning rate of the recipe, {RECIPE_RATE}."]
    rates = sorted(dict.fromkeys(rate for row in tuning.values() for rate in row["bits"]), key=float)
    seconds = sorted({row["seconds"] for row in tuning.values() if "seconds" in row})
    confirmed = sorted({row["full_seconds"] for row in tuning.values() if "full_seconds" in row})
    then = f"; of the two best the one that is better after {confirmed[0]:g} seconds" if confirmed else ""
    lines = [
        f"Tuned: {len(tuning)} rows, learning rates {', '.join(rates)} for {' or '.join(f'{s:g}' for s in seconds)} "
        f"seconds each, by the validation bound{then}. The other rows have the rate of the recipe, {RECIPE_RATE}."
    ]
    largest = [row for row, tried in tuning.items() if tried.get("chosen") == rates[-1]]
    if largest and len(rates) > 1:
        who = f"All {len(tuning)} tuned rows" if len(largest) == len(tuning) else ", ".join(largest)
        lines.append(f"{who} chose the largest rate tried, {rates[-1]}. Larger ones were not tried and may be better.")
    return lines


@plot.Style()
def draw_curves(record: Mapping[str, Any]) -> Figure:
    """Draw the validation bound of every run against seconds and characters."""
    figure = plot.figure(7.4, 4.8)
    colors = (plot.BLUE, plot.ORANGE, plot.GREEN, plot.PURPLE, "black", plot.GREY)
    seconds, characters = plot.axes(figure, columns=2, sharey=True)
    runs = [row for row in record["rows"].values() if "failed" not in row]
    names = [summary.row for summary in summarize(runs)[0]]
    for number, name in enumerate(names):
        for index, run in enumerate(run for run in runs if run["row"] == name):
            style: dict[str, Any] = {"color": colors[number % len(colors)], "linewidth": 1, "markersize": 4}
            style |= {"marker": "osv^Dxp*P1+"[number % 11], "linestyle": "-" if number < len(colors) else "--"}
            label = name if index == 0 else None
            bits = [point["bits_per_char"] for point in run["curve"]]
            seconds.plot([point["seconds"] for point in run["curve"]], bits, **style)
            millions = [point["characters"] / 1e6 for point in run["curve"]]
            characters.plot(millions, bits, label=label, **style)
    ends = [run["curve"][-1]["bits_per_char"] for run in runs if run["curve"]]
    if ends:
        seconds.set_ylim(min(ends) - 0.1, max(ends) + 0.8)
    seconds.set(xlabel="seconds of training", ylabel="bits per character, validation bound")
    characters.set(xlabel="characters, millions")
    handles = characters.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def main() -> None:
    """Tune or measure what is missing, as far as the limit of seconds allows, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text8", type=Path, help="text8, also compressed; with --table, a file of results")
    parser.add_argument("--out", type=Path, help="folder of the runs and of objectives.json")
    parser.add_argument("--only", help=f"rows, with ; between them: {'; '.join(ROWS)}")
    parser.add_argument("--seeds", default="0,1,2", help="seeds, with commas between them")
    parser.add_argument("--seconds", type=float, default=60, help="seconds of training of every row")
    parser.add_argument("--draws", type=int, default=2, help="draws per sequence of the evaluation, an even number")
    parser.add_argument("--limit-seconds", type=float, help="start no row that would end later than this")
    parser.add_argument("--tune", action="store_true", help="choose learning rates instead")
    parser.add_argument("--confirm", action="store_true", help="choose between the two best for all --seconds")
    parser.add_argument("--rates", default="2e-3,4e-3,8e-3", help="learning rates to try")
    parser.add_argument("--tune-seconds", type=float, default=20, help="seconds of training per learning rate")
    parser.add_argument("--precision", default="bfloat16", help="precision of training: float8 on an H100 or newer")
    parser.add_argument("--test", type=Path, help="evaluate on this text, by the protocol strict, instead of text8p")
    parser.add_argument("--set", action="append", default=[], help="configuration of all rows, after that of each")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the runs")
    parser.add_argument("--table", action="store_true", help="print the table of earlier results")
    parser.add_argument("--plot", type=Path, help="draw the curves of training (.svg, .png)")
    args = parser.parse_args()
    rows = args.only.split(";") if args.only else list(ROWS)
    if unknown := [row for row in rows if row not in ROWS]:
        parser.error(f"only is {args.only}; choose from {'; '.join(ROWS)}, not {'; '.join(unknown)}")
    if args.table:
        record = json.loads(args.text8.read_text(encoding="utf-8"))
    elif args.out is None:
        parser.error("--out is needed")
    else:
        record = measure_rows(args, rows)
    if record.get("rows"):
        print("\n".join(table_lines(record)))
        if args.plot is not None:
            print(save_figure(draw_curves(record), args.plot))


def measure_rows(args: argparse.Namespace, rows: Sequence[str]) -> dict[str, Any]:
    """Tune or measure the rows that are missing; return the results."""
    study = Study(args)
    protocol = "strict" if args.test else "text8p"
    study.results.describe(seconds=args.seconds, precision=args.precision, protocol=protocol)
    skipped = []
    if args.tune:
        for row in rows:
            study.tune(row)
        tried = study.results.record["tuning"]
        skipped = [row for row in rows if len(tried[row]["bits"]) < len(args.rates.split(","))]
    elif args.confirm:
        skipped = [row for row in rows if not study.confirm(row)]
    else:
        for seed, row in itertools.product(map(int, args.seeds.split(",")), rows):
            if (name := f"{row}, seed {seed}") in study.results:
                continue
            if study.has_time(args.seconds):
                study.measure(row, seed)
            else:
                skipped.append(name)
    report_skipped(skipped)
    return study.results.record


if __name__ == "__main__":
    main()
