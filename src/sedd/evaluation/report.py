"""One page about a run that needs nothing but itself: no script, no link, pictures inside.

Whatever is shown as text, a sample above all, is escaped; and the page forbids its reader to run any script at all.
"""

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from sedd import checkpoint, factory, generate, plot, sampling
from sedd.config import RunConfig
from sedd.runtime import run_log

MOST_POINTS = 300
"""Longer curves are shown as means of neighbouring records."""
CUT = 0.1
"""The share of records at the start that may run out of a picture's frame: the first losses dwarf all others."""
Records = Sequence[dict[str, Any]]
Values = np.ndarray[Any, np.dtype[np.float64]]


class Story(NamedTuple):
    """All that a run has left to tell."""

    folder: Path
    records: Records
    config: RunConfig
    environment: dict[str, str] | None
    """Where it ran, if it took note."""


class Samples(NamedTuple):
    """Texts, and a sentence about where they are from."""

    texts: list[str]
    origin: str


def read(folder: Path) -> Story:
    """What is in the folder of a run, finished or not."""
    records = run_log.read_log(folder)
    if not records:
        raise ValueError(f"{folder} has logged nothing yet; wait for its first record")
    noted = checkpoint.record(folder, "environment") if (folder / "environment.json").is_file() else None
    return Story(folder, records, RunConfig.from_dict(checkpoint.record(folder, "config")), noted)


# Samples ---------------------------------------------------------------------------------------------------


def samples(story: Story, count: int, seed: int) -> Samples:
    """At most ``count`` texts: the newest that the run logged, else drawn now from its newest checkpoint."""
    if count < 0:
        raise ValueError(f"samples is {count}; it must be 0 or more")
    logged = next((record for record in reversed(story.records) if "samples" in record), None)
    if count and logged is not None:
        return Samples(logged["samples"][:count], f"Logged by the run at step {logged['step']:,}.")
    if count == 0 or not checkpoint.steps(story.folder / "checkpoints"):
        return Samples([], "None were asked for." if count == 0 else "There is no checkpoint yet to draw from.")
    loaded = factory.load(story.folder, device="cuda" if torch.cuda.is_available() else "cpu")
    return Samples(_drawn(loaded, count, seed), f"Drawn from {loaded.folder.name}, averaged weights, seed {seed}.")


def _drawn(loaded: factory.LoadedModel, count: int, seed: int, steps: int = 64) -> list[str]:
    """Texts of a loaded model."""
    job = generate.SamplingRun(
        loaded.model, loaded.process, loaded.schedule, generate.SamplingSettings(steps=steps, seed=seed)
    )
    device = next(loaded.network.parameters()).device
    rows = generate.sample(job, sampling.empty(count, loaded.config.model.seq_len, device))
    return [loaded.tokenizer.decode(row.ids) for row in rows]


# Pictures --------------------------------------------------------------------------------------------------


def _having(records: Records, name: str) -> Records:
    return [record for record in records if name in record]


def _column(records: Records, name: str) -> Values:
    return np.array([record[name] for record in records], dtype=np.float64)


def _place(records: Records, chosen: Records, field: str) -> Values:
    """Where the chosen records stand. Not all have read the clock: between two readings it is in proportion."""
    known = _having(records, field)
    return np.interp(_column(chosen, "step"), _column(known, "step"), _column(known, field))


def _means(values: Values) -> Values:
    """At most `MOST_POINTS` means of neighbours."""
    return np.array([part.mean() for part in np.array_split(values, min(len(values), MOST_POINTS))])


def _unit(seconds: float) -> tuple[str, float]:
    return ("hours", 3600.0) if seconds > 3 * 3600 else ("minutes", 60.0) if seconds > 180 else ("seconds", 1.0)


def _frame(records: Records) -> tuple[float, float] | None:
    """From the least to the greatest value to be seen, the start left out."""
    losses, bounds = _column(_having(records, "loss"), "loss"), _having(records, "bound")
    spread = 1.96 * _column(bounds, "bound_stderr")
    ends = [_column(bounds, "bound") + sign * spread for sign in (-1, 1)]
    seen = np.concatenate([losses[int(CUT * len(losses)) :], *ends])
    seen = seen[np.isfinite(seen)]
    room = 0.05 * np.ptp(seen) if len(seen) else 0
    return (float(seen.min() - room), float(seen.max() + room)) if room else None


@plot.Style()
def curves(records: Records) -> Figure:
    """Loss and held-out bound against steps, tokens and time."""
    fields: list[tuple[str, str, float]] = [("step", "steps", 1.0), ("tokens", "tokens", 1.0)]
    if timed := _having(records, "seconds"):
        name, second = _unit(timed[-1]["seconds"])
        fields.append(("seconds", f"{name} of training", second))
    figure = plot.figure(11.0, 3.6)
    panels = plot.axes(figure, 1, len(fields), sharey=True)
    for ax, (field, label, unit) in zip(panels, fields, strict=True):
        if losses := _having(records, "loss"):
            x, y = _means(_place(records, losses, field) / unit), _means(_column(losses, "loss"))
            ax.plot(x, y, color=plot.ORANGE, linewidth=1.2, label="training loss")
        if bounds := _having(records, "bound"):
            x, y, spread = (
                _place(records, bounds, field) / unit,
                _column(bounds, "bound"),
                _column(bounds, "bound_stderr"),
            )
            ax.errorbar(x, y, 1.96 * spread, color=plot.BLUE, marker="o", capsize=3, label="held-out bound")
        ax.set(xlabel=label, ylim=_frame(records))
        ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[0].set_ylabel("nats a token")
    panels[-1].legend()
    return figure


@plot.Style()
def by_time(records: Records) -> Figure:
    """The loss in each part of time, over the first, the middle and the last third of the run."""
    figure = plot.figure(7.0, 3.6)
    (ax,) = plot.axes(figure)
    looks = ((plot.GREY, "^", ":"), (plot.ORANGE, "s", "--"), (plot.BLUE, "o", "-"))
    thirds = [part for part in np.array_split(np.arange(len(records)), 3) if len(part)]
    for part, (colour, marker, line) in zip(thirds, looks[-len(thirds) :], strict=True):
        levels = np.array([records[i]["loss_by_time"] for i in part], dtype=np.float64).mean(0)
        label = f"steps {records[part[0]]['step']:,} to {records[part[-1]]['step']:,}"
        middle = (np.arange(len(levels)) + 0.5) / len(levels)
        ax.plot(middle, levels, color=colour, marker=marker, linestyle=line, label=label)
    ax.set(xlabel="time t: 0 is data, 1 is noise", ylabel="nats a token", xlim=(0, 1))
    ax.set_ylim(bottom=0)
    ax.legend()
    return figure


# The page --------------------------------------------------------------------------------------------------

_CSS = """
:root { color-scheme: light dark; --ink: #1b1d21; --soft: #5a5f69; --paper: #ffffff; --panel: #f3f4f6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ea; --soft: #a7acb5; --paper: #15171b; --panel: #22252b; }
}
body { margin: 0 auto; max-width: 66rem; padding: 1.5rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.6rem; } h2 { margin: 2.2rem 0 .6rem; font-size: 1.2rem; }
p, figcaption { color: var(--soft); margin: .3rem 0; }
dl { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
dl div { background: var(--panel); border-radius: .5rem; padding: .6rem 1rem; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
figure { margin: 0; overflow-x: auto; } svg { width: 100%; min-width: 44rem; height: auto; }
svg text { fill: currentColor; font-family: system-ui, sans-serif !important; }
.narrow svg { min-width: 26rem; max-width: 44rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem 1.2rem .2rem 0; vertical-align: top; border-bottom: 1px solid var(--panel); }
td:last-child { overflow-wrap: anywhere; }
th { font-weight: 600; }
pre { background: var(--panel); border-radius: .5rem; padding: .8rem 1rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); margin: .6rem 0; }
"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{about}</p>
{body}
</main>
</body>
</html>
"""


def page(story: Story, samples: Samples) -> str:
    """The page, as HTML."""
    parts = [
        _facts(story),
        _section("Curves", _curves_part(story.records)),
        _section("Held-out bound", _bound_part(story.records)),
        _section("Loss by noise level", _time_part(story)),
        _section("Samples", _paragraph(samples.origin), *(f"<pre>{escape(text)}</pre>" for text in samples.texts)),
        _section("Configuration", _table(("option", "value"), _flat(story.config.as_dict()))),
        _section("Environment", *_environment_part(story)),
    ]
    name, body = escape(story.folder.resolve().name), "\n".join(parts)
    return _PAGE.format(title=name, about=escape(_about(story.config)), css=_CSS, body=body)


def _about(run: RunConfig) -> str:
    """The run in a line."""
    model, noise = run.model, run.noise
    return (
        f"A run of sedd: {run.objective} on {', '.join(run.data.sources)}; {noise.process} noise, {noise.schedule}; "
        f"{model.architecture} network of {model.depth} blocks, width {model.width}, length {model.seq_len}."
    )


def _section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _picture(figure: Figure, name: str, says: str, caption: str, shape: str = "wide") -> str:
    drawn = plot.svg(figure, name, says)
    return f'<figure class="{shape}">\n{drawn}\n<figcaption>{escape(caption)}</figcaption>\n</figure>'


def _table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    lines = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _flat(config: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Every option by its path, as ``--set`` takes it."""
    rows: list[tuple[str, str]] = []
    for name, value in config.items():
        nested = isinstance(value, dict) and value
        rows += _flat(value, f"{before}{name}.") if nested else [(before + name, json.dumps(value, ensure_ascii=False))]
    return rows


def _facts(story: Story) -> str:
    """What one wants to know first."""
    last, limit = story.records[-1], story.config.budget.steps
    facts = {"step": f"{last['step']:,}" + (f" of {limit:,}" if limit else ""), "tokens": f"{last['tokens']:,}"}
    if timed := _having(story.records, "seconds"):
        name, second = _unit(timed[-1]["seconds"])
        facts[f"{name} of training"] = f"{timed[-1]['seconds'] / second:,.1f}"
    if bounds := _having(story.records, "bound"):
        facts["held-out bound, nats a token"] = f"{bounds[-1]['bound']:.4f} ± {1.96 * bounds[-1]['bound_stderr']:.4f}"
        facts["bits a character"] = f"{bounds[-1]['bound_bits_per_char']:.4f}"
    cards = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return "<dl>" + "".join(cards) + "</dl>"


def _curves_part(records: Records) -> str:
    losses = _having(records, "loss")
    if not losses:
        return _paragraph("No loss was logged.")
    first, last = losses[0], losses[-1]
    says = (
        f"Training loss from {first['loss']:.3f} nats a token at step {first['step']} to {last['loss']:.3f} at step "
        f"{last['step']}, and the held-out bound, against steps, tokens and time."
    )
    each = -(-len(losses) // MOST_POINTS)
    caption = "Bars are 95 % intervals." + (f" A point of the loss is the mean of {each} records." if each > 1 else "")
    return _picture(curves(records), "curves", says, f"{caption} The start may lie above the frame.")


def _bound_part(records: Records) -> str:
    bounds = _having(records, "bound")
    if not bounds:
        return _paragraph("None was logged; train.eval_every says how often it is.")
    rows = (
        (
            f"{record['step']:,}",
            f"{record['tokens']:,}",
            f"{record['bound']:.4f} ± {1.96 * record['bound_stderr']:.4f}",
            f"{record['bound_bits_per_char']:.4f}",
        )
        for record in bounds
    )
    best = min(bounds, key=lambda record: float(record["bound"]))
    table = _table(("step", "tokens", "nats a token, 95 % interval", "bits a character"), rows)
    note = (
        "An upper bound on −log p of held-out data, by the averaged weights; of an autoregressive run, −log p itself. "
        f"The least is {best['bound']:.4f}, at step {best['step']:,}. The interval is of the estimate, with the same "
        "noise every time, and not of other data."
    )
    return f"{_paragraph(note)}\n<details>\n<summary>All {len(bounds)} of them</summary>\n{table}\n</details>"


def _time_part(story: Story) -> str:
    records = _having(story.records, "loss_by_time")
    if not records:
        return _paragraph("None was logged.")
    parts = len(records[0]["loss_by_time"])
    caption = "Which noise is hard: the training loss in each part of time, on average over a third of the run."
    if (batch := story.config.train.batch_size) < parts:
        caption += f" A batch of {batch} does not meet all {parts} parts, and one it does not meet counts as 0."
    says = "Training loss by time, from data at 0 to noise at 1, for the first, middle and last third of the run."
    return _picture(by_time(records), "by-time", says, caption, "narrow")


def _environment_part(story: Story) -> tuple[str, str]:
    of = "Where the run began." if story.environment else "Where this page was made; the run took no note of its own."
    return _paragraph(of), _table(("what", "value"), (story.environment or run_log.environment()).items())
