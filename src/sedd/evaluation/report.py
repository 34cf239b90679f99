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
from sedd.loading import load_model
from sedd.runtime import run_log
from sedd.runtime.device import resolve_device
from sedd.schema import check_count
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
    """What the folder of a run holds."""

    folder: Path
    records: Records
    config: RunConfig
    environment: dict[str, str] | None  # the software and hardware it ran on, if it was recorded


def read_run(folder: Path) -> RunHistory:
    """Read the folder of a run, finished or not."""
    records = run_log.read_log(folder)
    if not records:
        raise ValueError(f"{folder} has logged nothing yet; wait for its first record")
    environment = checkpoint.load_json(folder, "environment") if (folder / "environment.json").is_file() else None
    return RunHistory(folder, records, checkpoint.read_run_config(folder), environment)


def report_samples(history: RunHistory, count: int, seed: int, device: str | None = None) -> tuple[list[str], str]:
    """Return at most ``count`` texts, the latest that the run logged, else of its best checkpoint; and their origin."""
    check_count("samples", count, least=0)
    logged = next((record for record in reversed(history.records) if "samples" in record), None)
    if count and logged is not None:
        return logged["samples"][:count], f"Logged by the run at step {logged['step']:,}."
    if count == 0 or not checkpoint.list_checkpoints(history.folder / checkpoint.CHECKPOINTS):
        return [], "None were requested." if count == 0 else "There is no checkpoint yet to sample from."
    loaded = load_model(history.folder, device=str(resolve_device(device)))
    sampling_run = samplers.SamplingRun.of(loaded, samplers.SamplingSettings(steps=64, seed=seed))
    rows = sampling_run.sample(samplers.empty(count, loaded.config.model.seq_len, loaded.device))
    origin = f"Drawn from {loaded.folder.name} with the EMA weights, seed {seed}."
    return [loaded.tokenizer.decode(row.ids) for row in rows], origin


def having(records: Records, name: str) -> Records:
    """Return the records that have a field."""
    return [record for record in records if name in record]


def column(records: Records, name: str) -> Values:
    """Return a field of all records."""
    return np.array([record[name] for record in records], dtype=np.float64)


def interpolate(records: Records, chosen: Records, name: str) -> Values:
    """Return a field at the steps of the chosen records: linear between those that have it, and 0 at step 0."""
    known = having(records, name)
    found: Values = np.interp(column(chosen, "step"), [0, *column(known, "step")], [0, *column(known, name)])
    return found


def _downsample(values: Values) -> Values:
    """Return at most `MAX_POINTS` means over neighbouring values."""
    return np.array([part.mean() for part in np.array_split(values, min(len(values), MAX_POINTS))])


def _time_unit(seconds: float) -> tuple[str, float]:
    return ("hours", 3600.0) if seconds > 3 * 3600 else ("minutes", 60.0) if seconds > 180 else ("seconds", 1.0)


def _y_limits(records: Records) -> tuple[float, float] | None:
    """Return limits that hold all bounds and all losses but the first."""
    losses, bounds = column(having(records, "loss"), "loss"), having(records, "bound")
    half_width = 1.96 * column(bounds, "bound_stderr")
    ends = [column(bounds, "bound") + sign * half_width for sign in (-1, 1)]
    values = np.concatenate([losses[int(UNSCALED_FRACTION * len(losses)) :], *ends])
    values = values[np.isfinite(values)]
    margin = 0.05 * np.ptp(values) if len(values) else 0
    return (float(values.min() - margin), float(values.max() + margin)) if margin else None


@plot.Style()
def plot_training(records: Records) -> Figure:
    """Plot the training loss and the validation bound against steps, tokens and time."""
    fields: list[tuple[str, str, float]] = [("step", "steps", 1.0), ("tokens", "tokens", 1.0)]
    if timed := having(records, "seconds"):
        name, unit = _time_unit(timed[-1]["seconds"])
        fields.append(("seconds", f"{name} of training", unit))
    losses, bounds = having(records, "loss"), having(records, "bound")
    figure = plot.figure(11.0, 3.6)
    panels = plot.axes(figure, 1, len(fields), sharey=True)
    for ax, (field, label, unit) in zip(panels, fields, strict=True):
        if losses:
            x = _downsample(interpolate(records, losses, field) / unit)
            ax.plot(x, _downsample(column(losses, "loss")), color=plot.ORANGE, linewidth=1.2, label="training loss")
        if bounds:
            x, y = interpolate(records, bounds, field) / unit, column(bounds, "bound")
            error = 1.96 * column(bounds, "bound_stderr")
            ax.errorbar(x, y, error, color=plot.BLUE, marker="o", capsize=3, label="validation bound")
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


def render_report(history: RunHistory, texts: Sequence[str], origin: str) -> str:
    """Return the report of a run as an HTML page, with samples and a sentence about their origin."""
    fields = ("loss", "bound", "seconds", "loss_by_time")
    losses, bounds, timed, by_time = (having(history.records, name) for name in fields)
    return render(
        "report.html.j2",
        history=history,
        losses=losses,
        timed=timed,
        bounds=bounds,
        time=_time_unit(timed[-1]["seconds"]) if timed else None,
        curves=plot.to_svg(plot_training(history.records), "curves") if losses else None,
        losses_per_point=-(-len(losses) // MAX_POINTS),
        loss_by_time=plot.to_svg(plot_loss_by_time(by_time), "by-time") if by_time else None,
        intervals=len(by_time[0]["loss_by_time"]) if by_time else 0,
        texts=texts,
        origin=origin,
        options=[(key, json.dumps(value, ensure_ascii=False)) for key, value in history.config.by_key().items()],
        environment=history.environment or run_log.environment(),
    )
