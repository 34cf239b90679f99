"""Comparison of runs: one validation likelihood each, under one protocol, and the validation curves of training."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from sedd import files, plot
from sedd.evaluation.report import Values, column, having, interpolate
from sedd.evaluation.results import likelihood_table
from sedd.loading import LoadedModel
from sedd.runtime import run_log
from sedd.templates import render
from sedd.training.config import RunConfig

COLUMNS = (
    *("run", "objective", "process", "parameterization", "parameters", "step", "trained_tokens", "seconds"),
    *("bits", "stderr_bits", "nats_per_token", "ppl_bound", "is_exact"),
)
AVERAGED = ("bits", "nats_per_token", "ppl_bound")
"""Columns of which runs with several seeds have a mean."""
WITHOUT_EFFECT = ("out", "train.keep_checkpoints", *(f"train.{x}_every" for x in ("log", "eval", "save", "sample")))
"""Keys of a configuration on which no weight depends."""
MAX_DIFFERENCES = 6
"""Number of differences between runs that are named."""


class ValidationCurve(NamedTuple):
    """Validation bounds during training, on a small fixed set of sequences, with standard errors."""

    tokens: Values
    seconds: Values
    bits: Values  # per character, or per token where the tokens are not text
    stderr: Values


def read_curve(run: Path) -> ValidationCurve:
    """Read the validation bounds in the log of a run; seconds are logged less often and interpolated linearly."""
    records = run_log.read_log(run)
    evaluated = having(records, "bound")
    tokens, nats, stderr = (column(evaluated, name) for name in ("tokens", "bound", "bound_stderr"))
    bits = np.array([r.get("bound_bits_per_char", r["bound"] / np.log(2)) for r in evaluated], dtype=np.float64)
    return ValidationCurve(tokens, interpolate(records, evaluated, "seconds"), bits, stderr * bits / nats)


def run_record(run: Path, loaded: LoadedModel, state: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Add to a result what the run is and how far it was trained.

    ``bits`` are per character, or per token where the tokens are not text.
    """
    model = loaded.config.model
    bits = record["bits_per_token"] if record["bits_per_char"] is None else record["bits_per_char"]
    return {
        "run": str(run),
        "objective": loaded.config.objective,
        "process": None if model.parameterization == "causal" else loaded.config.noise.process,
        "parameterization": model.parameterization,
        "parameters": sum(p.numel() for p in loaded.network.parameters()),
        "step": state["step"],
        "trained_tokens": state["tokens"],
        "seconds": round(state["seconds"], 1),
        **record,
        "bits": bits,
        "stderr_bits": round(record["stderr_nats_per_token"] * bits / record["nats_per_token"], 6),
    }


def _settings(config: RunConfig) -> dict[str, str]:
    """Return what weights depend on, but for the seed, by configuration key."""
    found = {**config.by_key(), "model.time_conditioning": config.time_conditioning}
    return {key: str(value) for key, value in found.items() if key not in ("seed", *WITHOUT_EFFECT)}


def describe_differences(configs: Sequence[RunConfig], parameters: Sequence[int]) -> str | None:
    """Return in what runs differ, seeds apart; None if they have the same size and differ in one setting at most."""
    settings = [_settings(config) for config in configs]
    columns = {"parameters": [f"{count:,}" for count in parameters]}
    columns |= {key: [one.get(key, "none") for one in settings] for key in {k: 0 for one in settings for k in one}}
    different = {key: dict.fromkeys(values) for key, values in columns.items() if len(set(values)) > 1}
    if "parameters" not in different and len(different) < 2:
        return None
    named = [f"{key} ({' or '.join(values)})" for key, values in list(different.items())[:MAX_DIFFERENCES]]
    others = len(different) - len(named)
    return f"the runs differ in {', '.join(named)}" + (f" and {others} more" if others else "")


def seed_means(records: Sequence[dict[str, Any]], configs: Sequence[RunConfig]) -> list[dict[str, Any]]:
    """Return a record, to be printed, for runs that differ by their seed alone: mean ± standard deviation."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record, config in zip(records, configs, strict=True):
        groups.setdefault(str(_settings(config)), []).append(record)
    means = []
    for group in (group for group in groups.values() if len(group) > 1):
        mean: dict[str, Any] = {**group[0], "stderr_bits": None}
        for name in COLUMNS:
            values = [record[name] for record in group]
            if name in AVERAGED:
                mean[name] = f"{statistics.mean(values):.5g} ± {statistics.stdev(values):.2g}"
            elif any(value != values[0] for value in values):
                mean[name] = None
        runs = ", ".join(record["run"] for record in group)
        means.append(mean | {"run": f"{runs}: mean ± deviation of n = {len(group)} seeds"})
    return means


def write_comparison(
    records: Sequence[dict[str, Any]], means: Sequence[dict[str, Any]], curves: Sequence[ValidationCurve], path: Path
) -> None:
    """Write a PNG of the curves, or an HTML page with the table, that of `seed_means` too, and the curves."""
    figure = plot_comparison(records, curves)
    if path.suffix == ".png":
        plot.save_png(figure, path)
        return
    page = render(
        "compare.html.j2",
        title="Comparison of runs",
        protocol=records[0]["protocol"],
        header=COLUMNS,
        rows=likelihood_table([*records, *means], COLUMNS),
        svg=plot.to_svg(figure, "runs"),
    )
    files.write_text(path, page)


@plot.Style()
def plot_comparison(records: Sequence[dict[str, Any]], curves: Sequence[ValidationCurve]) -> Figure:
    """Plot bits against tokens and seconds of training, with the final results as points and 95 % intervals."""
    figure = plot.figure(11.0, 4.5)
    left, right = plot.axes(figure, columns=2, sharey=True)
    for number, (record, curve) in enumerate(zip(records, curves, strict=True)):
        color, label = f"C{number % 10}", f"{Path(record['run']).name} ({record['objective']})"
        low, high = curve.bits - 1.96 * curve.stderr, curve.bits + 1.96 * curve.stderr
        for axes, x, end in ((left, curve.tokens, record["trained_tokens"]), (right, curve.seconds, record["seconds"])):
            axes.plot(x, curve.bits, color=color, marker=".", linewidth=1, alpha=0.8)
            if len(x) > 1:  # a band of one point is invisible, and would stretch the axis
                axes.fill_between(x, low, high, color=color, alpha=0.1, linewidth=0)
            axes.errorbar(end, record["bits"], 1.96 * record["stderr_bits"], fmt="o", color=color, capsize=3)
        right.plot([], [], color=color, label=label)
    right.plot([], [], color=plot.GREY, marker=".", linewidth=1, label="validation while training (band: 95 %)")
    right.errorbar([], [], [], fmt="o", color=plot.GREY, capsize=3, label="this comparison (bar: 95 %)")
    right.legend(fontsize="small")
    unit = "bits per character" if records[0]["bits_per_char"] else "bits per token"
    left.set(xlabel="tokens of training", ylabel=unit, xlim=(0, None))
    right.set(xlabel="seconds of training", xlim=(0, None))
    if all(len(curve.bits) < 2 for curve in curves):
        left.set_title("no run has curves: each was validated at its end only (train.eval_every)", fontsize="small")
    return figure
