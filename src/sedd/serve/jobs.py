"""What the engine works on: jobs, their rows, the events that tell how a row goes on, and the queue of what waits."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar, final

from sedd.samplers.model import networks
from sedd.samplers.run import SamplingRun


class Edit(NamedTuple):
    """A token that a step has changed; None where a value was not computed."""

    position: int
    id: int
    entropy: float | None = None  # of the distribution p(x_0 | x) at this position, in nats
    log_prob: float | None = None  # log p(x_0 | x) of the token, after temperature, top-k and top-p
    alternatives: list[tuple[int, float]] | None = None  # the most probable tokens with their probabilities


class Step(NamedTuple):
    """A row has made a step."""

    step: int  # its number on the time grid, from 1; steps in which nothing can happen may be left out
    t: float
    calls: int  # calls of the model that are done, or were not needed
    total_calls: int
    edits: list[Edit]


class Finished(NamedTuple):
    """A row is filled, by so many calls of the network."""

    ids: list[int]
    calls: int


class Failed(NamedTuple):
    """A row will not be filled; ``code``: deadline_exceeded, non_finite, canceled or internal_error."""

    code: str
    message: str


Event = Step | Finished | Failed


@dataclass(eq=False)
class Row:
    """A sequence to be filled."""

    run: SamplingRun  # the model with its sampler, time grid and seed
    given: list[int]  # token ids; −1 at positions to be filled
    index: int  # its number among the rows of its seed
    kept: int | None = None  # how many of its positions, from the first, are its text; None: all

    @property
    def text(self) -> slice:
        return slice(0, len(self.given) if self.kept is None else self.kept)

    @cached_property
    def total_calls(self) -> int:
        """The number of calls of the model, expected where it is random, at most one per position where unknown."""
        blanks = self.given.count(-1)
        expected = self.run.sampler.expected_calls(self.run.model, self.run.times, blanks)
        return blanks if math.isnan(expected) else math.ceil(expected)

    @property
    def cost(self) -> int:
        """Tokens that the network reads for it: network calls times length."""
        return self.total_calls * len(networks(self.run.model)) * len(self.given)


@dataclass(eq=False)
class Call:
    """A function that needs the model and runs in the engine's thread, as a likelihood does."""

    function: Callable[[Callable[[], None]], object]  # it must call its argument now and then: other rows go on
    cost: int


Work = TypeVar("Work", bound=Row | Call, covariant=True)


@dataclass(eq=False)
class Job:
    """The rows, or the call, of one request."""

    rows: Sequence[Row | Call]
    deadline: float  # the time of `time.monotonic` after which it fails
    on_event: Callable[[int, object], None]
    """Called from the engine's thread with a row's place in ``rows`` and an `Event`, or what a call has returned."""
    client: str = ""  # who sent it: rows of different clients enter in turn
    streams: bool = False  # whether `Step` events are sent; else only the last one of each row
    alternatives: int | None = None  # probable tokens that every edit lists, with its entropy; None: not computed
    canceled: bool = field(default=False, init=False)


@dataclass(eq=False)
class Item(Generic[Work]):
    """A row or a call of a job, which waits or is worked on."""

    row: Work
    place: int  # in the job
    job: Job
    calls: int = 0  # of the model so far
    network_calls: int = 0
    failed: Failed | None = None


Waiting = Item[Row | Call]


@final
class FairQueue:
    """Items in the order of their clients' turns, for each client of its jobs' turns, and then of their arrival.

    A client that has many items waiting delays each item of another client by at most one item per turn, and so does
    a job with many items another job of the same client.
    """

    def __init__(self) -> None:
        self._items: dict[str, dict[Job, deque[Waiting]]] = {}  # by client and job; the first of each is next

    def __len__(self) -> int:
        return sum(len(items) for jobs in list(self._items.values()) for items in list(jobs.values()))

    def push(self, item: Waiting) -> None:
        """Add an item; a new client's turn is the last, and so is a new job's of its client."""
        self._items.setdefault(item.job.client, {}).setdefault(item.job, deque()).append(item)

    def pop(self, may: Callable[[Waiting], bool]) -> Waiting | None:
        """Remove the next item that may have a turn, which is decided per job; None if there is none."""
        for jobs in self._items.values():
            for job, items in jobs.items():
                if may(items[0]):
                    item = items.popleft()
                    self._replace(job, items)
                    return item
        return None

    def remove(self, is_gone: Callable[[Job], bool]) -> list[Waiting]:
        """Remove and return the items of jobs for which ``is_gone`` holds."""
        gone = [job for jobs in self._items.values() for job in jobs if is_gone(job)]
        items = [item for job in gone for item in self._items[job.client][job]]
        for job in gone:
            self._replace(job, deque())
        return items

    def _replace(self, job: Job, items: deque[Waiting]) -> None:
        """Let others have their turn before what is left of a job."""
        jobs = self._items.pop(job.client)
        del jobs[job]
        if items:
            jobs[job] = items
        if jobs:
            self._items[job.client] = jobs
