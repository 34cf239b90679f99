"""Quality against cost, and against entropy: where a low generative perplexity was bought by repetition, it shows."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from sedd import plot


@plot.Style()
def picture(records: Sequence[dict[str, Any]], swept: Sequence[str] = ()) -> Figure:
    """Points with bars that hold 95 %; those that differ in the first swept setting alone are joined."""
    figure = plot.figure(11.0, 4.8)
    cost, entropy = plot.axes(figure, columns=2, sharey=True)
    for number, (label, points) in enumerate(_lines(records, swept).items()):
        color = f"C{number % 10}"
        timed = [point for point in points if point["nfe"] is not None]
        _draw(cost, timed, "nfe", color, label)
        _draw(entropy, points, "entropy_nats", color, label)
        for point in points if swept else ():
            where = (point["entropy_nats"], point["gen_ppl_by_token"])
            entropy.annotate(str(_value(point, swept[0])), where, (4, 4), textcoords="offset points", fontsize=8)
    cost.set(xlabel="network calls a sample", ylabel="generative perplexity, by token")
    if calls := sorted({round(record["nfe"]) for record in records if record["nfe"]}):
        cost.set_xscale("log")
        cost.set_xticks(calls, [str(number) for number in calls])
        cost.set_xticks([], minor=True)
    entropy.set(xlabel="entropy of a sample's tokens, nats" + (f"; labels: {swept[0]}" if swept else ""))
    entropy.legend(fontsize="small")
    first = records[0]
    figure.suptitle(f"Judge {first['judge']}, first token {first['first_token']}", fontsize=11)
    return figure


def _draw(axes: Any, points: Sequence[dict[str, Any]], x: str, color: str, label: str) -> None:
    across, up = [point[x] for point in points], [point["gen_ppl_by_token"] for point in points]
    wide = [1.96 * (point["stderr_entropy_nats"] or 0) for point in points] if x == "entropy_nats" else None
    high = [1.96 * (point["stderr_gen_ppl_by_token"] or 0) for point in points]
    axes.errorbar(across, up, high, wide, fmt="o-", color=color, linewidth=1, capsize=2, label=label)


def _lines(records: Sequence[dict[str, Any]], swept: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Records by where they come from and by all that is swept but the first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        label = ", ".join([record["source"], *(f"{name} {_value(record, name)}" for name in swept[1:])])
        found.setdefault(label, []).append(record)
    return found


def _value(record: dict[str, Any], name: str) -> Any:
    return record[name] if name in record else (record["options"] or {}).get(name)
