"""The engine: one thread that owns the model and advances all rows, step by step.

Waiting rows enter and finished ones leave between any two steps. Jobs are admitted by their cost, which is known in
advance: network calls times length.
"""

import contextlib
import copy
import math
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sedd.loading import LoadedModel
from sedd.samplers import LeftToRight, Prompt, State
from sedd.samplers.run import SamplingRun, SamplingStats
from sedd.serve.batch import BatchRow, Counts, SharedBatch, failure_of, finish_ids, is_shared, width_bucket
from sedd.serve.jobs import Call, Edit, Event, Failed, FairQueue, Finished, Item, Job, Row, Step
from sedd.serve.limits import Limits
from sedd.serve.metrics import Metrics

DEADLINE = Failed("deadline_exceeded", "the request was not finished in time; give a longer timeout, or fewer steps")
CANCELED = Failed("canceled", "the request was canceled")
STOPPED = Failed("canceled", "the server has stopped")
RESERVED = 16
"""One in so many slots is not for the client that holds all others, and one more not for the request that does."""


class Overloaded(Exception):  # noqa: N818  (not an error of the server)
    """A job is refused because others must be done first; ``retry_after`` is in seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the server is busy; try again in {retry_after} s")
        self.retry_after = retry_after


class Waiting(NamedTuple):
    """A row that has no slot yet."""

    row: Row
    place: int
    job: Job

    @property
    def client(self) -> str:
        """Who sent it."""
        return self.job.client


@dataclass
class Share:
    """What a client's accepted work that is not done amounts to."""

    rows: int = 0
    cost: int = 0


@dataclass(eq=False)
class RowAlone:
    """A row whose sampler cannot share forward passes: it runs by itself, one step at a time."""

    waiting: Waiting
    run: SamplingRun
    """One of its own, which counts its network calls."""
    states: Iterator[State]
    x: list[int]
    """Its tokens; −1 where none has been drawn."""

    def show(self, state: State) -> list[int]:
        """Return the tokens of a state; −1 at masks, and where an autoregressive model has not been."""
        process, waits = self.run.model.process, isinstance(self.run.sampler, LeftToRight)
        hidden = state.x[0] >= process.vocab_size
        if waits:
            given = torch.tensor(self.waiting.row.given, device=hidden.device)
            hidden = hidden | ((state.reveal_step[0] == 0) & (given < 0))
        shown: list[int] = torch.where(hidden, -1, state.x[0]).tolist()
        return shown


class Engine:
    """Fills rows in its own thread, all of them one step at a time.

    Args:
        loaded: The model.
        limits: Slots, length of the queue and time per request.
        metrics: Counters to update.
    """

    def __init__(self, loaded: LoadedModel, limits: Limits, metrics: Metrics) -> None:
        self.loaded, self.limits, self.metrics = loaded, limits, metrics
        self.outstanding = 0
        """The cost of all accepted work that is not done."""
        self.tokens_per_second = math.inf
        """The cost that is done per second while at least half of the slots are used."""
        self._waiting, self._calls = FairQueue[Waiting](), FairQueue[Call]()
        self._shares: dict[str, Share] = {}
        self._batches: dict[tuple[int, bool], SharedBatch] = {}
        self._alone: list[RowAlone] = []
        self._condition = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called from any thread --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def cancel(self) -> None:
        """Cancel what is left, and accept nothing more."""
        with self._condition:
            self._stopping = True
            self._condition.notify()

    def stop(self) -> None:
        """Cancel what is left, and wait for the end of the thread."""
        self.cancel()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, work: Job | Call) -> None:
        """Add work; raise `Overloaded` if it would wait too long."""
        rows = [Waiting(row, place, work) for place, row in enumerate(work.rows)] if isinstance(work, Job) else []
        with self._condition:
            if is_open := not self._stopping:
                self._admit(work.client, max(1, len(rows)), work.cost)
                for waiting in rows:
                    self._count(work.client, 1, waiting.row.cost)
                    self._waiting.push(waiting, work.client, work)
                if isinstance(work, Call):
                    self._count(work.client, 1, work.cost)
                    self._calls.push(work, work.client, work)
                self._condition.notify()
        if is_open:
            return
        for waiting in rows:
            waiting.job.on_event(waiting.place, STOPPED)
        if isinstance(work, Call):
            work.on_done(InterruptedError(STOPPED.message))

    def _admit(self, client: str, rows: int, cost: int) -> None:
        """Raise `Overloaded` if work has to wait too long: for all that was accepted, or for its client's turns.

        Clients take turns, so that n times a client's own work is done by the time when its last row is.
        """
        share, clients = self._shares.get(client, Share()), len(self._shares) + (client not in self._shares)
        ahead = min(self.outstanding + cost, clients * (share.cost + cost))
        seconds = ahead / self.tokens_per_second
        waiting, places = self.waiting, self.limits.slots + self.limits.queue  # a burst may come while slots are empty
        taken = min(self.running + waiting + rows, clients * (share.rows + rows))
        if self.outstanding and (taken > places or seconds > self.limits.timeout):
            rest = seconds - self.limits.timeout if math.isfinite(seconds) else 0.0
            left = self.outstanding / self.tokens_per_second * rows / max(1, waiting)
            raise Overloaded(max(1, min(60, math.ceil(max(rest, left)))))

    def _count(self, client: str, rows: int, cost: int) -> None:
        """Add to what has been accepted and is not done."""
        self.outstanding += cost
        share = self._shares.setdefault(client, Share())
        share.rows, share.cost = share.rows + rows, share.cost + cost
        if not share.rows:
            del self._shares[client]

    @property
    def waiting(self) -> int:
        """Rows and calls that wait."""
        return len(self._waiting) + len(self._calls)

    @property
    def running(self) -> int:
        """Rows in slots."""
        return sum(len(batch.rows) for batch in list(self._batches.values())) + len(self._alone)

    # The thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._stopping or self._waiting or self._calls or self.running)
                if self._stopping:
                    break
            try:
                if call := self._next(self._calls):
                    self._make_call(call)
                self._advance()
            except Exception as error:  # a bug: no request may wait forever because of it
                traceback.print_exc(file=sys.stderr)
                self._clear(failure_of(error))
        self._clear(STOPPED)
        while waiting := self._next(self._waiting):
            self._end(waiting, STOPPED)
        while call := self._next(self._calls):
            self._count(call.client, -1, -call.cost)
            call.on_done(InterruptedError(STOPPED.message))

    def _next(self, queue: "FairQueue[Item]") -> "Item | None":
        with self._condition:
            return queue.pop()

    def _admit_next(self) -> Waiting | None:
        """Return the next row to enter; a client, and a request, leave some slots to others: see `RESERVED`."""
        jobs = [row.job for batch in self._batches.values() for row in batch.rows]
        jobs += [alone.waiting.job for alone in self._alone]
        of_client, of_job = Counter(job.client for job in jobs), Counter(jobs)
        slots, left = self.limits.slots, self.limits.slots // RESERVED

        def may_enter(waiting: Waiting) -> bool:
            return of_client[waiting.client] < slots - left and of_job[waiting.job] < slots - 2 * left

        with self._condition:
            return self._waiting.pop(may_enter)

    def _clear(self, event: Failed) -> None:
        """End all rows in slots."""
        shared = [Waiting(r.row, r.place, r.job) for batch in self._batches.values() for r in batch.rows]
        rows = shared + [alone.waiting for alone in self._alone]
        self._batches.clear()
        self._alone.clear()
        for waiting in rows:
            self._end(waiting, event)

    def _advance(self) -> None:
        """Let waiting rows enter, then make a step of every row."""
        self._drop()
        while self.running < self.limits.slots and (waiting := self._admit_next()):
            self._enter(waiting)
        started, tokens, rows = time.perf_counter(), 0, self.running
        for key, batch in list(self._batches.items()):
            if not batch.rows:
                del self._batches[key]
                continue
            before = list(batch.rows)
            try:
                events = batch.advance()
            except Exception as error:  # the forward pass itself failed
                traceback.print_exc(file=sys.stderr)
                events = [(row, failure_of(error)) for row in before]
                batch.remove(before)
            tokens += len(before) * batch.width
            self.metrics.count_step(batch.counts, len(before))
            for row, event in events:
                self._report(Waiting(row.row, row.place, row.job), event)
        for alone in list(self._alone):
            calls = alone.run.sampler.calls_per_step
            self.metrics.count_step(Counts(forwards=calls, rows=calls), 1)
            tokens += len(alone.waiting.row.given)
            self._advance_alone(alone)
        if 2 * rows >= self.limits.slots:
            self._measure(tokens / (time.perf_counter() - started))

    def _measure(self, rate: float) -> None:
        old = self.tokens_per_second
        self.tokens_per_second = rate if math.isinf(old) else 0.95 * old + 0.05 * rate

    def _drop(self) -> None:
        """Remove rows whose client has gone or whose time is over."""
        now = time.monotonic()
        with self._condition:
            late = self._waiting.remove(lambda waiting: _reason(waiting.job, now) is not None)
            calls = self._calls.remove(lambda call: _reason(call, now) is not None)
            for call in calls:
                self._count(call.client, -1, -call.cost)
        for call in calls:
            canceled = call.canceled
            call.on_done(InterruptedError(CANCELED.message) if canceled else TimeoutError(DEADLINE.message))
        for waiting in late:
            self._end(waiting, _reason(waiting.job, now) or CANCELED)
        for batch in self._batches.values():
            gone: list[BatchRow] = [row for row in batch.rows if _reason(row.job, now)]
            batch.remove(gone)
            for row in gone:
                self._end(Waiting(row.row, row.place, row.job), _reason(row.job, now) or CANCELED)
        for alone in [a for a in self._alone if _reason(a.waiting.job, now)]:
            self._alone.remove(alone)
            self._end(alone.waiting, _reason(alone.waiting.job, now) or CANCELED)

    def _enter(self, waiting: Waiting) -> None:
        """Give a row a slot."""
        row, place, job = waiting
        try:
            if is_shared(row.run.sampler):
                length, longest = len(row.given), self.loaded.config.model.seq_len
                width = width_bucket(length, longest)
                key = width, length < width
                if key not in self._batches:
                    rows_per_text = 2 if self.loaded.labels else 1
                    least = self.limits.slots * rows_per_text if self.limits.same_shape else 1
                    self._batches[key] = SharedBatch(self.loaded, *key, least)
                start = self._batches[key].add(row, place, job)
                if job.streams and start.edits:
                    self._report(waiting, start)
            else:
                prompt = Prompt(torch.tensor([row.given], device=self.loaded.device))
                run = copy.copy(row.run)
                run.stats, run.requires_finite = SamplingStats(), True
                states = run.states(prompt, row.index)
                self._alone.append(RowAlone(waiting, run, states, list(row.given)))
        except Exception as error:
            self._end(waiting, failure_of(error))

    def _advance_alone(self, alone: RowAlone) -> None:
        """Make a step of a row that runs by itself."""
        waiting, run = alone.waiting, alone.run
        try:
            state = next(alone.states, None)
        except Exception as error:
            event: Event = failure_of(error)
        else:
            if state is None:
                event = finish_ids(alone.x[waiting.row.text], run.stats.row_calls, self.loaded.process.vocab_size)
            else:
                x = alone.show(state)
                edits = [Edit(i, new) for i, (old, new) in enumerate(zip(alone.x, x, strict=True)) if new != old]
                alone.x, left = x, sum(id < 0 and open < 0 for id, open in zip(x, waiting.row.given, strict=True))
                calls, total = state.step * run.sampler.calls_per_step, waiting.row.total_calls
                edits = waiting.row.in_text(edits)
                event = Step(state.step, left / waiting.row.blanks, calls, max(calls, total), edits)
        if isinstance(event, Step):
            if waiting.job.streams:
                self._report(waiting, event)
            return
        self._alone.remove(alone)
        self._end(waiting, event)

    def _make_call(self, call: Call) -> None:
        """Run a function that needs the model; rows go on in between."""

        def proceed() -> None:
            if call.canceled or self._stopping:
                raise InterruptedError(CANCELED.message)
            if time.monotonic() > call.deadline:
                raise TimeoutError(DEADLINE.message)
            self._advance()

        try:
            proceed()
            result: object = call.function(proceed)
        except Exception as error:
            result = error
        with self._condition:
            self._count(call.client, -1, -call.cost)
        call.on_done(result)

    def _report(self, waiting: Waiting, event: Event) -> None:
        if isinstance(event, Step):
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                waiting.job.on_event(waiting.place, event)
        else:
            self._end(waiting, event)

    def _end(self, waiting: Waiting, event: Finished | Failed) -> None:
        """Report the last event of a row."""
        with self._condition:
            self._count(waiting.client, -1, -waiting.row.cost)
        self.metrics.count_end(event, waiting.row.given[waiting.row.text].count(-1))
        with contextlib.suppress(RuntimeError):
            waiting.job.on_event(waiting.place, event)


def _reason(job: Job | Call, now: float) -> Failed | None:
    """Return why a job's rows are to be dropped; None: they are not."""
    return CANCELED if job.canceled else DEADLINE if now > job.deadline else None
