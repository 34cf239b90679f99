"""Runs side by side: one held-out number each, under one protocol, and the way there."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from sedd import checkpoint, plot
from sedd.evaluation.corpus import Corpus
from sedd.evaluation.results import table
from sedd.factory import LoadedModel
from sedd.runtime import run_log

COLUMNS = (
    *("run", "objective", "process", "parameterization", "parameters", "step", "trained_tokens", "seconds"),
    *("bits", "stderr_bits", "nats_per_token", "ppl_bound", "is_exact"),
)
KINDS = (".png", ".html")


class Curve(NamedTuple):
    """Held-out bits a character as a run went on, and their error: it looked at few sequences, always the same."""

    tokens: np.ndarray
    seconds: np.ndarray
    bits: np.ndarray
    stderr: np.ndarray


def curve(run: Path) -> Curve:
    """The held-out bounds in the log of a run; seconds are written less often, and drawn straight in between."""
    records = run_log.read_log(run)
    timed = [record for record in records if "seconds" in record]
    looked = [record for record in records if "bound_bits_per_char" in record]
    tokens = np.array([record["tokens"] for record in looked])
    seconds = np.interp(tokens, [0, *(r["tokens"] for r in timed)], [0, *(r["seconds"] for r in timed)])
    bits, nats, error = (
        np.array([r[name] for r in looked]) for name in ("bound_bits_per_char", "bound", "bound_stderr")
    )
    return Curve(tokens, seconds, bits, error * bits / nats)


def same_data(names: Sequence[str], corpora: Sequence[Corpus]) -> None:
    """Refuse runs that would be scored on different text."""
    for name, corpus in zip(names, corpora, strict=True):
        if corpus.sha256 != corpora[0].sha256:
            raise ValueError(
                f"{names[0]} and {name} did not keep the same data from their training (another source, tokenizer, "
                "length or share); name a text to score both on with --data"
            )


def row(run: Path, loaded: LoadedModel, record: dict[str, Any]) -> dict[str, Any]:
    """What a run is, how far it was trained, and its record; bits are a character's, or a token's that is no text."""
    state, model = checkpoint.record(loaded.folder, "state"), loaded.config.model
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


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table, as words; rows of different protocols are refused."""
    return [["" if value is None else str(value) for value in line] for line in table(rows, COLUMNS)]


def plottable(path: Path) -> Path:
    """Refuse what no plot can be written to, before the work is done."""
    if path.suffix not in KINDS:
        raise ValueError(f"the plot is {path.name}; its name must end in one of {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} does not exist; make it, or choose another --plot")
    return path


def draw(rows: Sequence[dict[str, Any]], curves: Sequence[Curve], path: Path) -> None:
    """A picture, or a page with the table and the picture."""
    figure = _figure(rows, curves)
    if path.suffix == ".html":
        path.write_text(_page(rows, plot.svg(figure, "runs", "bits against tokens and seconds")), encoding="utf-8")
    else:
        plot.save(figure, path)


@plot.Style()
def _figure(rows: Sequence[dict[str, Any]], curves: Sequence[Curve]) -> Figure:
    """Bits against tokens and against seconds: the way there, and the final number; bands and bars hold 95 %."""
    figure = plot.figure(11, 4.5)
    left, right = plot.axes(figure, columns=2, sharey=True)
    for number, (one, way) in enumerate(zip(rows, curves, strict=True)):
        color, label = f"C{number % 10}", f"{Path(one['run']).name} ({one['objective']})"
        low, high = way.bits - 1.96 * way.stderr, way.bits + 1.96 * way.stderr
        for axes, x, end in ((left, way.tokens, one["trained_tokens"]), (right, way.seconds, one["seconds"])):
            axes.plot(x, way.bits, color=color, linewidth=1, alpha=0.8)
            axes.fill_between(x, low, high, color=color, alpha=0.1, linewidth=0)
            axes.errorbar(end, one["bits"], 1.96 * one["stderr_bits"], fmt="o", color=color, capsize=3, label=label)
    left.set(xlabel="tokens of training", ylabel="held-out bits a character")
    right.set(xlabel="seconds of training")
    right.legend(fontsize="small")
    return figure


def _page(rows: Sequence[dict[str, Any]], drawing: str) -> str:
    def line(words: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(word)}</{tag}>" for word in words) + "</tr>"

    body = "\n".join(line(words, "td") for words in cells(rows))
    return (
        "<!doctype html><meta charset=utf-8><title>runs compared</title>"
        "<style>body{font:14px sans-serif}td,th{padding:2px 8px;text-align:right}svg{max-width:70em}</style>"
        f"<h1>protocol {html.escape(rows[0]['protocol'])}</h1>\n"
        f"<table>{line(COLUMNS, 'th')}\n{body}</table>\n{drawing}"
    )
