"""Comparison of runs: one validation likelihood each, under one protocol, and the validation curves of training."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from sedd import checkpoint, files, plot
from sedd.runtime import run_log
from sedd.templates import render

if TYPE_CHECKING:
    from sedd.evaluation.corpus import Corpus
    from sedd.factory import LoadedModel

COLUMNS = (
    *("run", "objective", "process", "parameterization", "parameters", "step", "trained_tokens", "seconds"),
    *("bits", "stderr_bits", "nats_per_token", "ppl_bound", "is_exact"),
)
PLOT_SUFFIXES = (".png", ".html")


class ValidationCurve(NamedTuple):
    """Validation bits per character during training, on a small fixed set of sequences, with standard errors.

    Bits are per token where the tokens are not text.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    bits: np.ndarray
    stderr: np.ndarray


def read_curve(run: Path) -> ValidationCurve:
    """Read the validation bounds in the log of a run; seconds are logged less often and interpolated linearly."""
    records = run_log.read_log(run)
    timed = [record for record in records if "seconds" in record]
    evaluated = [record for record in records if "bound" in record]
    tokens = np.array([record["tokens"] for record in evaluated], dtype=float)
    known = np.array([(0, 0), *((record["tokens"], record["seconds"]) for record in timed)], dtype=float)
    seconds = np.interp(tokens, *known.T)
    nats, stderr = (np.array([r[name] for r in evaluated], dtype=float) for name in ("bound", "bound_stderr"))
    bits = np.array([r.get("bound_bits_per_char", r["bound"] / np.log(2)) for r in evaluated], dtype=float)
    return ValidationCurve(tokens, seconds, bits, stderr * bits / nats)


def require_same_data(names: Sequence[str], corpora: "Sequence[Corpus]") -> None:
    """Raise an error if the runs would be scored on different text."""
    for name, corpus in zip(names, corpora, strict=True):
        if corpus.sha256 != corpora[0].sha256:
            raise ValueError(
                f"{names[0]} and {name} have different validation data (another source, tokenizer, length or "
                "fraction); name a text to score both on with --data"
            )


def run_record(run: Path, loaded: "LoadedModel", record: dict[str, Any]) -> dict[str, Any]:
    """Add to a result what the run is and how far it was trained.

    ``bits`` are per character, or per token where the tokens are not text.
    """
    state, model = checkpoint.read_state(loaded.folder), loaded.config.model
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


def table_cells(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Format the `COLUMNS` of the records as text; records of different protocols are refused."""
    from sedd.evaluation.results import likelihood_table

    return [["" if value is None else str(value) for value in row] for row in likelihood_table(records, COLUMNS)]


def check_plot_path(path: Path) -> Path:
    """Return ``path``, or raise an error if no plot can be written there."""
    if path.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"the plot is {path.name}; its name must end in one of {', '.join(PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} does not exist; make it, or choose another --plot")
    return path


def write_comparison(records: Sequence[dict[str, Any]], curves: Sequence[ValidationCurve], path: Path) -> None:
    """Write a PNG of the curves, or an HTML page with the table and the curves."""
    figure = plot_comparison(records, curves)
    if path.suffix == ".html":
        files.write_text(
            path,
            render(
                "compare.html.j2",
                title="Comparison of runs",
                about=f"Likelihoods under protocol {records[0]['protocol']}.",
                header=[name.replace("_", " ") for name in COLUMNS],
                rows=table_cells(records),
                svg=plot.to_svg(figure, "runs", "Bits against tokens and seconds of training, for each run."),
                caption="Lines: bounds logged during training. Points: the table. Bands and bars are 95 % intervals.",
            ),
        )
    else:
        plot.save_png(figure, path)


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
            axes.fill_between(x, low, high, color=color, alpha=0.1, linewidth=0)
            axes.errorbar(
                end, record["bits"], 1.96 * record["stderr_bits"], fmt="o", color=color, capsize=3, label=label
            )
    left.set(
        xlabel="tokens of training", ylabel="bits per character" if records[0]["bits_per_char"] else "bits per token"
    )
    right.set(xlabel="seconds of training")
    for axes in (left, right):
        axes.set_xlim(left=0)
    right.legend(fontsize="small")
    return figure
