"""Notice overfitting: validation bounds that stay above the lowest one while training goes on."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, final

PATIENCE = 3
"""Validations in a row that are above the lowest bound, by more than its standard error, when a run overfits."""


class _Bound(NamedTuple):
    step: int
    nats: float
    stderr: float


@final
class OverfittingCheck:
    """Follows the validation bounds of a run, which have the same sequences, times and noise; it is reported once."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        """Begin with the bounds among the records of a log."""
        self._bounds: list[_Bound] = []
        self._is_reported = False
        for record in records:
            self._add(record)

    def _add(self, record: dict[str, Any]) -> None:
        if math.isfinite(record.get("bound", math.nan)):
            self._bounds.append(_Bound(record["step"], record["bound"], record["bound_stderr"]))

    def describe(self, record: dict[str, Any], saved_step: int | None) -> str | None:
        """Add a record; return what to say where it is the first that shows overfitting."""
        self._add(record)
        if "bound" not in record or self._is_reported or not self._bounds:
            return None
        lowest = min(self._bounds, key=lambda bound: bound.nats)
        later = self._bounds[self._bounds.index(lowest) + 1 :][-PATIENCE:]
        if len(later) < PATIENCE or any(bound.nats <= lowest.nats + lowest.stderr for bound in later):
            return None
        self._is_reported = True
        return (
            f"the run overfits: its validation bound was {lowest.nats:.3f} nats per token at step {lowest.step:,}, the "
            f"last {PATIENCE} were higher, and now it is {later[-1].nats:.3f}. "
            f"{_describe_saved(lowest.step, saved_step)}; stop, and train on more text, a smaller network, or with "
            "--set model.dropout=0.1"
        )


def _describe_saved(lowest: int, saved: int | None) -> str:
    if saved is None:
        return "No checkpoint is saved before the end; set train.save_every to keep the best"
    if saved == lowest:
        return f"Commands use the checkpoint of step {saved:,}"
    return (
        f"Commands use the checkpoint of step {saved:,}, the best that was saved; a lower train.save_every saves more"
    )
