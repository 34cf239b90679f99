"""Plots of generative perplexity against cost and entropy; a low perplexity at low entropy is due to repetition."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from sedd import plot
from sedd.evaluation.report import column


@plot.Style()
def plot_quality(records: Sequence[dict[str, Any]], swept: Sequence[str] = ()) -> Figure:
    """Plot the records with 95 % intervals; records that differ only in the first swept setting are joined."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        label = ", ".join([record["source"], *(f"{name} {_value(record, name)}" for name in swept[1:])])
        groups.setdefault(label, []).append(record)
    figure, labels = plot.figure(11.0, 4.8), []
    cost, entropy = plot.axes(figure, columns=2, sharey=True)
    for number, (label, points) in enumerate(groups.items()):
        style: Any = {"fmt": "o-", "color": f"C{number % 10}", "linewidth": 1, "capsize": 2, "label": label}
        x, y = column(points, "entropy_nats"), column(points, "gen_ppl_by_token")
        x_error, y_error = (
            1.96 * np.nan_to_num(column(points, f"stderr_{name}")) for name in ("entropy_nats", "gen_ppl_by_token")
        )
        entropy.errorbar(x, y, y_error, x_error, **style)
        timed = np.array([point["nfe"] is not None for point in points])
        cost.errorbar(column(points, "nfe")[timed], y[timed], y_error[timed], **style)
        if swept:
            names = [str(_value(point, swept[0])) for point in points]
            labels += list(zip(x, y, names, [style["color"]] * len(x), strict=True))
    cost.set(xlabel="network calls per sample", ylabel="generative perplexity, by token")
    if calls := sorted({round(record["nfe"]) for record in records if record["nfe"]}):
        cost.set_xscale("log")
        shown, room = calls[-1:], (calls[-1] / calls[0]) ** (1 / 14)  # for a label, on the logarithmic axis
        for number in reversed(calls):
            shown += [number] * (number * room < shown[-1])
        cost.set_xticks(shown, [str(number) for number in shown])
        cost.set_xticks([], minor=True)
    entropy.set(xlabel="unigram entropy of a sample, nats" + (f"; labels: {swept[0]}" if swept else ""))
    entropy.legend(fontsize="small")
    figure.suptitle(f"Judge {records[0]['judge']}, first token {records[0]['first_token']}", fontsize=11)
    if labels:
        plot.label_points(entropy, labels)
    return figure


def _value(record: dict[str, Any], name: str) -> Any:
    return record[name] if name in record else (record["options"] or {}).get(name)
