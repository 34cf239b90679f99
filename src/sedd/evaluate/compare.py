"""Runs side by side: one held-out number each, under one protocol, and the way there."""

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from sedd import checkpoint, logs
from sedd.build import Loaded
from sedd.evaluate.corpus import Corpus
from sedd.evaluate.record import table

COLUMNS = (
    *("run", "objective", "process", "parameterization", "parameters", "step", "trained_tokens", "seconds"),
    *("bits_per_char", "stderr_bits_per_char", "nats_per_token", "ppl_bound", "is_exact"),
)
KINDS = (".png", ".svg", ".pdf", ".html")


class Curve(NamedTuple):
    """Held-out bits a character as a run went on; it looked at few sequences, so the last point has the error."""

    tokens: np.ndarray
    seconds: np.ndarray
    bits: np.ndarray


def curve(run: Path) -> Curve:
    """The held-out bounds in the log of a run; seconds are written less often, and drawn straight in between."""
    records = logs.read(run)
    timed = [record for record in records if "seconds" in record]
    looked = [record for record in records if "bound_bits_per_char" in record]
    tokens = np.array([record["tokens"] for record in looked])
    seconds = np.interp(tokens, [0, *(r["tokens"] for r in timed)], [0, *(r["seconds"] for r in timed)])
    return Curve(tokens, seconds, np.array([record["bound_bits_per_char"] for record in looked]))


def same_data(names: Sequence[str], corpora: Sequence[Corpus]) -> None:
    """Refuse runs that would be scored on different text."""
    for name, corpus in zip(names, corpora, strict=True):
        if corpus.sha256 != corpora[0].sha256:
            raise ValueError(
                f"{names[0]} and {name} did not keep the same data from their training (another source, tokenizer, "
                "length or share); name a text to score both on with --data"
            )


def row(run: Path, loaded: Loaded, record: dict[str, Any]) -> dict[str, Any]:
    """What a run is, how far it was trained, and its record."""
    state, model = checkpoint.record(loaded.folder, "state"), loaded.config.model
    error = record["stderr_nats_per_token"]
    share = record["bits_per_char"] / record["nats_per_token"] if record["bits_per_char"] is not None else None
    return {
        "run": str(run),
        "objective": loaded.config.objective,
        "process": None if model.parameterization == "causal" else loaded.config.noise.process,
        "parameterization": model.parameterization,
        "parameters": sum(p.numel() for p in loaded.network.parameters()),
        "step": state["step"],
        "trained_tokens": state["tokens"],
        "seconds": round(state["seconds"], 1),
        "stderr_bits_per_char": None if share is None else round(error * share, 6),
        **record,
    }


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table, as words; rows of different protocols are refused."""
    return [["" if value is None else str(value) for value in line] for line in table(rows, COLUMNS)]


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bits a character against tokens and against seconds: the curves, and the final number with 95 % of its error."""
    if path.suffix not in KINDS:
        raise ValueError(f"the plot is {path.name}; its name must end in one of {', '.join(KINDS)}")
    figure = _figure(rows)
    if path.suffix != ".html":
        figure.savefig(path, dpi=150)
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    path.write_text(_page(rows, drawn.getvalue()), encoding="utf-8")


def _figure(rows: Sequence[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, along in zip(figure.subplots(1, 2, sharey=True), ("tokens", "seconds"), strict=True):
        for number, one in enumerate(rows):
            found = curve(Path(one["run"]))
            along_run, color = getattr(found, along), f"C{number % 10}"
            axes.plot(along_run, found.bits, color=color, linewidth=1, alpha=0.8)
            if one["bits_per_char"] is not None:
                error = 1.96 * one["stderr_bits_per_char"]
                end = one["trained_tokens" if along == "tokens" else "seconds"]
                label = f"{Path(one['run']).name} ({one['objective']})"
                axes.errorbar(end, one["bits_per_char"], error, fmt="o", color=color, capsize=3, label=label)
        axes.set_xlabel(f"{along} of training")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("held-out bits a character")
    figure.axes[1].legend(fontsize="small")
    return figure


def _page(rows: Sequence[dict[str, Any]], drawing: str) -> str:
    def line(words: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(word)}</{tag}>" for word in words) + "</tr>"

    body = "\n".join(line(words, "td") for words in cells(rows))
    return (
        "<!doctype html><meta charset=utf-8><title>runs compared</title>"
        "<style>body{font:14px sans-serif}td,th{padding:2px 8px;text-align:right}svg{max-width:100%}</style>"
        f"<h1>protocol {html.escape(rows[0]['protocol'])}</h1>\n"
        f"<table>{line(COLUMNS, 'th')}\n{body}</table>\n{drawing[drawing.index('<svg') :]}"
    )
