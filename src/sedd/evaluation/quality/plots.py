"""Plots of generative perplexity against cost and entropy; a low perplexity at low entropy is due to repetition."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from sedd import plot


@plot.Style()
def plot_quality(records: Sequence[dict[str, Any]], swept: Sequence[str] = ()) -> Figure:
    """Plot the records with 95 % intervals; records that differ only in the first swept setting are joined."""
    figure = plot.figure(11.0, 4.8)
    cost, entropy = plot.axes(figure, columns=2, sharey=True)
    for number, (label, points) in enumerate(_group(records, swept).items()):
        color = f"C{number % 10}"
        timed = [point for point in points if point["nfe"] is not None]
        _plot_points(cost, timed, "nfe", color, label)
        _plot_points(entropy, points, "entropy_nats", color, label)
    cost.set(xlabel="network calls per sample", ylabel="generative perplexity, by token")
    if calls := sorted({round(record["nfe"]) for record in records if record["nfe"]}):
        cost.set_xscale("log")
        shown = _spaced(calls)
        cost.set_xticks(shown, [str(number) for number in shown])
        cost.set_xticks([], minor=True)
    entropy.set(xlabel="unigram entropy of a sample, nats" + (f"; labels: {swept[0]}" if swept else ""))
    entropy.legend(fontsize="small")
    first = records[0]
    figure.suptitle(f"Judge {first['judge']}, first token {first['first_token']}", fontsize=11)
    if swept:
        labels = [
            (point["entropy_nats"], point["gen_ppl_by_token"], str(_value(point, swept[0])), f"C{i % 10}")
            for i, points in enumerate(_group(records, swept).values())
            for point in points
        ]
        plot.label_points(entropy, labels)
    return figure


def _spaced(calls: Sequence[int]) -> list[int]:
    """Return those numbers, of a sorted list, that have room for their labels on a logarithmic axis."""
    room = (calls[-1] / calls[0]) ** (1 / 14)
    shown = [calls[-1]]
    for number in reversed(calls[:-1]):
        if number * room <= shown[-1]:
            shown.append(number)
    return shown[::-1]


def _plot_points(axes: Any, points: Sequence[dict[str, Any]], x: str, color: str, label: str) -> None:
    values, perplexities = [point[x] for point in points], [point["gen_ppl_by_token"] for point in points]
    x_error = [1.96 * (point["stderr_entropy_nats"] or 0) for point in points] if x == "entropy_nats" else None
    y_error = [1.96 * (point["stderr_gen_ppl_by_token"] or 0) for point in points]
    axes.errorbar(values, perplexities, y_error, x_error, fmt="o-", color=color, linewidth=1, capsize=2, label=label)


def _group(records: Sequence[dict[str, Any]], swept: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Group records by their source and by all swept settings but the first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        label = ", ".join([record["source"], *(f"{name} {_value(record, name)}" for name in swept[1:])])
        groups.setdefault(label, []).append(record)
    return groups


def _value(record: dict[str, Any], name: str) -> Any:
    return record[name] if name in record else (record["options"] or {}).get(name)
