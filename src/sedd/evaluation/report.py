"""The report of a run: one self-contained HTML page without scripts or links, with its figures inside.

All text, samples included, is escaped, and the page's Content-Security-Policy forbids scripts.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from sedd import plot, samplers
from sedd.loading import LoadedModel, load_model
from sedd.runtime import run_log
from sedd.runtime.device import resolve_device
from sedd.templates import render
from sedd.training import checkpoint
from sedd.training.config import RunConfig

MAX_POINTS = 300
"""Longer curves are shown as means over neighbouring records."""
UNSCALED_FRACTION = 0.1
"""The first records do not set the scale of the loss axis: the initial losses dwarf all others."""
Records = Sequence[dict[str, Any]]
Values = np.ndarray[Any, np.dtype[np.float64]]


class RunHistory(NamedTuple):
    """The records, configuration and environment in the folder of a run."""

    folder: Path
    records: Records
    config: RunConfig
    environment: dict[str, str] | None
    """The software and hardware it ran on, if it was recorded."""


class ReportSamples(NamedTuple):
    """Texts, and a sentence about their origin."""

    texts: list[str]
    origin: str


class Picture(NamedTuple):
    """A figure of the page."""

    svg: str
    caption: str


def read_run(folder: Path) -> RunHistory:
    """Read the folder of a run, finished or not."""
    records = run_log.read_log(folder)
    if not records:
        raise ValueError(f"{folder} has logged nothing yet; wait for its first record")
    environment = checkpoint.load_json(folder, "environment") if (folder / "environment.json").is_file() else None
    return RunHistory(folder, records, checkpoint.read_run_config(folder), environment)


# Samples ---------------------------------------------------------------------------------------------------


def check_samples(count: int) -> None:
    """Refuse a negative number of samples."""
    if count < 0:
        raise ValueError(f"samples is {count}; it must be 0 or more")


def report_samples(history: RunHistory, count: int, seed: int, device: str | None = None) -> ReportSamples:
    """Return at most ``count`` texts: the latest that the run logged, else samples from its best checkpoint."""
    check_samples(count)
    logged = next((record for record in reversed(history.records) if "samples" in record), None)
    if count and logged is not None:
        return ReportSamples(logged["samples"][:count], f"Logged by the run at step {logged['step']:,}.")
    if count == 0 or not checkpoint.list_checkpoints(history.folder / checkpoint.CHECKPOINTS):
        return ReportSamples([], "None were requested." if count == 0 else "There is no checkpoint yet to sample from.")
    loaded = load_model(history.folder, device=str(resolve_device(device)))
    return ReportSamples(
        _generate_texts(loaded, count, seed), f"Drawn from {loaded.folder.name} with the EMA weights, seed {seed}."
    )


def _generate_texts(loaded: LoadedModel, count: int, seed: int, steps: int = 64) -> list[str]:
    sampling_run = samplers.SamplingRun.of(loaded, samplers.SamplingSettings(steps=steps, seed=seed))
    rows = sampling_run.sample(samplers.empty(count, loaded.config.model.seq_len, loaded.device))
    return [loaded.tokenizer.decode(row.ids) for row in rows]


# Figures ---------------------------------------------------------------------------------------------------


def _having(records: Records, name: str) -> Records:
    return [record for record in records if name in record]


def _column(records: Records, name: str) -> Values:
    return np.array([record[name] for record in records], dtype=np.float64)


def _interpolate(records: Records, chosen: Records, field: str) -> Values:
    """Return ``field`` at the steps of the chosen records, interpolated between the records that have it."""
    with_field = _having(records, field)
    return np.interp(_column(chosen, "step"), _column(with_field, "step"), _column(with_field, field))


def _downsample(values: Values) -> Values:
    """Return at most `MAX_POINTS` means over neighbouring values."""
    return np.array([part.mean() for part in np.array_split(values, min(len(values), MAX_POINTS))])


def _time_unit(seconds: float) -> tuple[str, float]:
    return ("hours", 3600.0) if seconds > 3 * 3600 else ("minutes", 60.0) if seconds > 180 else ("seconds", 1.0)


def _y_limits(records: Records) -> tuple[float, float] | None:
    """Return limits that hold all bounds and all losses but the first."""
    losses, bounds = _column(_having(records, "loss"), "loss"), _having(records, "bound")
    half_width = 1.96 * _column(bounds, "bound_stderr")
    ends = [_column(bounds, "bound") + sign * half_width for sign in (-1, 1)]
    values = np.concatenate([losses[int(UNSCALED_FRACTION * len(losses)) :], *ends])
    values = values[np.isfinite(values)]
    margin = 0.05 * np.ptp(values) if len(values) else 0
    return (float(values.min() - margin), float(values.max() + margin)) if margin else None


@plot.Style()
def plot_training(records: Records) -> Figure:
    """Plot the training loss and the validation bound against steps, tokens and time."""
    fields: list[tuple[str, str, float]] = [("step", "steps", 1.0), ("tokens", "tokens", 1.0)]
    if timed := _having(records, "seconds"):
        name, unit = _time_unit(timed[-1]["seconds"])
        fields.append(("seconds", f"{name} of training", unit))
    figure = plot.figure(11.0, 3.6)
    panels = plot.axes(figure, 1, len(fields), sharey=True)
    for ax, (field, label, unit) in zip(panels, fields, strict=True):
        if losses := _having(records, "loss"):
            x, y = _downsample(_interpolate(records, losses, field) / unit), _downsample(_column(losses, "loss"))
            ax.plot(x, y, color=plot.ORANGE, linewidth=1.2, label="training loss")
        if bounds := _having(records, "bound"):
            x, y, stderr = (
                _interpolate(records, bounds, field) / unit,
                _column(bounds, "bound"),
                _column(bounds, "bound_stderr"),
            )
            ax.errorbar(x, y, 1.96 * stderr, color=plot.BLUE, marker="o", capsize=3, label="validation bound")
        ax.set(xlabel=label, ylim=_y_limits(records))
        ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[0].set_ylabel("nats per token")
    panels[-1].legend()
    return figure


@plot.Style()
def plot_loss_by_time(records: Records) -> Figure:
    """Plot the loss in each interval of time, averaged over the first, the middle and the last third of the run."""
    figure = plot.figure(7.0, 3.6)
    (ax,) = plot.axes(figure)
    styles = ((plot.GREY, "^", ":"), (plot.ORANGE, "s", "--"), (plot.BLUE, "o", "-"))
    thirds = [part for part in np.array_split(np.arange(len(records)), 3) if len(part)]
    for part, (color, marker, line) in zip(thirds, styles[-len(thirds) :], strict=True):
        levels = np.array([records[i]["loss_by_time"] for i in part], dtype=np.float64).mean(0)
        label = f"steps {records[part[0]]['step']:,} to {records[part[-1]]['step']:,}"
        middle = (np.arange(len(levels)) + 0.5) / len(levels)
        ax.plot(middle, levels, color=color, marker=marker, linestyle=line, label=label)
    ax.set(xlabel="time t: 0 is data, 1 is noise", ylabel="nats per token", xlim=(0, 1))
    ax.set_ylim(bottom=0)
    ax.legend()
    return figure


# The page --------------------------------------------------------------------------------------------------


def render_report(history: RunHistory, samples: ReportSamples) -> str:
    """Return the report of a run as an HTML page."""
    records, bounds = history.records, _having(history.records, "bound")
    lowest = min(bounds, key=lambda record: float(record["bound"]), default=None)
    return render(
        "report.html.j2",
        title=history.folder.resolve().name,
        about=_summary(history.config),
        facts=_facts(history),
        curves=_training_picture(records),
        bounds=[(f"{r['step']:,}", f"{r['tokens']:,}", _interval(r), *_bits_per_char(r).values()) for r in bounds],
        bounds_head=("step", "tokens", "nats per token, 95 % interval", *_bits_per_char(bounds[0] if bounds else {})),
        lowest=None if lowest is None else {"nats": f"{lowest['bound']:.4f}", "step": f"{lowest['step']:,}"},
        loss_by_time=_loss_by_time_picture(history),
        samples=samples,
        options=[(key, json.dumps(value, ensure_ascii=False)) for key, value in history.config.by_key().items()],
        environment=history.environment or run_log.environment(),
        environment_origin="At the start of the run."
        if history.environment
        else "Where this page was made; the run recorded no environment of its own.",
    )


def _summary(run: RunConfig) -> str:
    """Describe the run in one sentence."""
    model, noise = run.model, run.noise
    network = f"{model.architecture} network of {model.depth} blocks, width {model.width}"
    network = f"network {run.describe_network()}" if run.network else network
    return (
        f"A run of sedd: {run.objective} on {', '.join(run.data.sources)}; {noise.process} noise, {noise.schedule}; "
        f"{network}, length {model.seq_len}."
    )


def _interval(record: dict[str, Any]) -> str:
    """Format a validation bound with the half width of its 95 % interval."""
    return f"{record['bound']:.4f} ± {1.96 * record['bound_stderr']:.4f}"


def _bits_per_char(record: dict[str, Any]) -> dict[str, str]:
    """Return the bound in bits per character; nothing where the tokens are not text."""
    bits = record.get("bound_bits_per_char")
    return {} if bits is None else {"bits per character": f"{bits:.4f}"}


def _facts(history: RunHistory) -> dict[str, str]:
    """Return the figures shown at the top: progress, time and the latest validation bound."""
    last, limit = history.records[-1], history.config.budget.steps
    facts = {"step": f"{last['step']:,}" + (f" of {limit:,}" if limit else ""), "tokens": f"{last['tokens']:,}"}
    if timed := _having(history.records, "seconds"):
        name, unit = _time_unit(timed[-1]["seconds"])
        facts[f"{name} of training"] = f"{timed[-1]['seconds'] / unit:,.1f}"
    if bounds := _having(history.records, "bound"):
        facts["validation bound, nats per token"] = _interval(bounds[-1])
        facts |= _bits_per_char(bounds[-1])
    return facts


def _training_picture(records: Records) -> Picture | None:
    losses = _having(records, "loss")
    if not losses:
        return None
    first, last = losses[0], losses[-1]
    description = (
        f"Training loss from {first['loss']:.3f} nats per token at step {first['step']} to {last['loss']:.3f} at step "
        f"{last['step']}, and the validation bound, against steps, tokens and time."
    )
    per_point = -(-len(losses) // MAX_POINTS)
    caption = "Bars are 95 % intervals."
    if per_point > 1:
        caption += f" Each point of the loss is the mean of {per_point} records."
    caption += " The first losses may lie outside the axes."
    return Picture(plot.to_svg(plot_training(records), "curves", description), caption)


def _loss_by_time_picture(history: RunHistory) -> Picture | None:
    records = _having(history.records, "loss_by_time")
    if not records:
        return None
    intervals = len(records[0]["loss_by_time"])
    caption = (
        "Which noise levels are hard: the training loss in each interval of time, averaged over a third of the run."
    )
    if (batch := history.config.train.batch_size) < intervals:
        caption += (
            f" A batch of {batch} does not reach all {intervals} intervals; an interval without samples counts as 0."
        )
    description = (
        "Training loss by time, from data at 0 to noise at 1, for the first, middle and last third of the run."
    )
    return Picture(plot.to_svg(plot_loss_by_time(records), "by-time", description), caption)
