"""What the engine works on: jobs, their rows, and the events that tell how a row goes on."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from sedd.samplers import networks_per_call
from sedd.samplers.run import SamplingRun


class Edit(NamedTuple):
    """A token that a step has changed."""

    position: int
    id: int
    entropy: float | None = None
    """Of the distribution p(x_0 | x) at this position, in nats; None where it was not computed."""
    log_prob: float | None = None
    """log p(x_0 | x) of the token, after temperature, top-k and top-p."""
    alternatives: list[tuple[int, float]] | None = None
    """The most probable tokens with their probabilities."""


class Step(NamedTuple):
    """A row has made a step."""

    step: int
    """Its number on the time grid, from 1; steps in which nothing can happen may be left out."""
    t: float
    calls: int
    """Calls of the model that are done, or were not needed."""
    total_calls: int
    edits: list[Edit]


class Finished(NamedTuple):
    """A row is filled."""

    ids: list[int]
    calls: int
    """Network calls that were made for it."""


class Failed(NamedTuple):
    """A row will not be filled."""

    code: str
    """deadline_exceeded, non_finite, canceled or internal_error."""
    message: str


Event = Step | Finished | Failed


@dataclass(eq=False)
class Row:
    """A sequence to be filled.

    Args:
        run: The model with its sampler, time grid and seed.
        given: Token ids; −1 at positions to be filled.
        index: Its number among the rows of its seed.
        kept: How many of its positions, from the first, are its text; None: all.
    """

    run: SamplingRun
    given: list[int]
    index: int
    kept: int | None = None

    @cached_property
    def blanks(self) -> int:
        """The number of positions to be filled."""
        return self.given.count(-1)

    @property
    def text(self) -> slice:
        """The positions of its text."""
        return slice(0, len(self.given) if self.kept is None else self.kept)

    def in_text(self, edits: list[Edit]) -> list[Edit]:
        """Return the edits of its text."""
        return [edit for edit in edits if edit.position < self.text.stop]

    @cached_property
    def total_calls(self) -> int:
        """The number of calls of the model, expected where it is random, at most one per position where unknown."""
        expected = self.run.sampler.expected_calls(self.run.model, self.run.times, self.blanks)
        return self.blanks if math.isnan(expected) else math.ceil(expected)

    @property
    def cost(self) -> int:
        """Tokens that the network reads for it: network calls times length."""
        return self.total_calls * networks_per_call(self.run.model) * len(self.given)


@dataclass(eq=False)
class Job:
    """The rows of one request.

    Args:
        rows: The rows.
        deadline: The time of `time.monotonic` after which it fails.
        on_event: Called from the engine's thread with the place of a row in ``rows`` and its event.
        streams: Whether `Step` events are sent; else only the last one of each row.
        alternatives: How many probable tokens every edit lists, with its entropy; None: neither is computed.
    """

    rows: list[Row]
    deadline: float
    on_event: Callable[[int, Event], None]
    streams: bool = False
    alternatives: int | None = None
    canceled: bool = field(default=False, init=False)
    client: str = field(default="", init=False)
    """Who sent it: rows of different clients enter in turn."""

    @property
    def cost(self) -> int:
        """The cost of all rows."""
        return sum(row.cost for row in self.rows)


@dataclass(eq=False)
class Call:
    """A function that needs the model and runs in the engine's thread, as a likelihood does.

    Args:
        function: Called with a function that it must call now and then, which lets other rows go on.
        cost: Tokens that the network reads for it.
        deadline: As for `Job`.
        on_done: Called with what the function returned or raised.
    """

    function: Callable[[Callable[[], None]], object]
    cost: int
    deadline: float
    on_done: Callable[[object], None]
    canceled: bool = field(default=False, init=False)
    client: str = field(default="", init=False)

    @property
    def request(self) -> object:
        """Itself."""
        return self
