"""The engine: one thread that owns the model and advances all rows, step by step.

Waiting rows enter and finished ones leave between any two steps. Jobs are admitted by their cost, which is known in
advance: network calls times length.
"""

import contextlib
import math
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass

from sedd.loading import LoadedModel
from sedd.serve.batch import BatchRow, SharedBatch, failure_of, width_bucket
from sedd.serve.jobs import Call, Event, Failed, FairQueue, Finished, Item, Job, Step
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


@dataclass
class Share:
    """What a client's accepted work that is not done amounts to."""

    rows: int = 0
    cost: int = 0


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
        self._waiting, self._calls = FairQueue[BatchRow](), FairQueue[Call]()
        self._shares: dict[str, Share] = {}
        self._batches: dict[tuple[int, bool], SharedBatch] = {}
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
        rows = [BatchRow(row, place, work) for place, row in enumerate(work.rows)] if isinstance(work, Job) else []
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
        return sum(len(batch.members) for batch in list(self._batches.values()))

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

    def _admit_next(self) -> BatchRow | None:
        """Return the next row to enter; a client, and a request, leave some slots to others: see `RESERVED`."""
        jobs = [row.job for batch in self._batches.values() for row in batch.members]
        of_client, of_job = Counter(job.client for job in jobs), Counter(jobs)
        slots, left = self.limits.slots, self.limits.slots // RESERVED

        def may_enter(waiting: BatchRow) -> bool:
            return of_client[waiting.client] < slots - left and of_job[waiting.job] < slots - 2 * left

        with self._condition:
            return self._waiting.pop(may_enter)

    def _clear(self, event: Failed) -> None:
        """End all rows in slots."""
        rows = [row for batch in self._batches.values() for row in batch.members]
        self._batches.clear()
        for row in rows:
            self._end(row, event)

    def _advance(self) -> None:
        """Let waiting rows enter, then make a step of every row."""
        self._drop()
        while self.running < self.limits.slots and (waiting := self._admit_next()):
            self._enter(waiting)
        started, tokens, rows = time.perf_counter(), 0, self.running
        for key, batch in list(self._batches.items()):
            if not (before := batch.members):
                del self._batches[key]
                continue
            try:
                events = batch.advance()
            except Exception as error:  # the forward pass itself failed
                traceback.print_exc(file=sys.stderr)
                events = [(row, failure_of(error)) for row in before]
                batch.remove(before)
            tokens += len(before) * batch.width
            self.metrics.count_step(batch.counts, len(before))
            for row, event in events:
                self._report(row, event)
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
            gone = [row for row in batch.members if _reason(row.job, now)]
            batch.remove(gone)
            for row in gone:
                self._end(row, _reason(row.job, now) or CANCELED)

    def _enter(self, row: BatchRow) -> None:
        """Give a row a slot."""
        try:
            length, longest = len(row.row.given), self.loaded.config.model.seq_len
            width = width_bucket(length, longest)
            key = width, length < width
            if key not in self._batches:
                rows_per_text = 2 if self.loaded.labels else 1
                least = self.limits.slots * rows_per_text if self.limits.same_shape else 1
                self._batches[key] = SharedBatch(self.loaded, *key, least)
            noise = self._batches[key].add(row)
            if row.job.streams and noise:
                self._report(row, Step(0, 1.0, 0, row.row.total_calls, noise))
        except Exception as error:
            self._end(row, failure_of(error))

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

    def _report(self, row: BatchRow, event: Event) -> None:
        if isinstance(event, Step):
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                row.job.on_event(row.place, event)
        else:
            self._end(row, event)

    def _end(self, row: BatchRow, event: Finished | Failed) -> None:
        """Report the last event of a row."""
        with self._condition:
            self._count(row.client, -1, -row.row.cost)
        self.metrics.count_end(event, row.row.given[row.row.text].count(-1))
        with contextlib.suppress(RuntimeError):
            row.job.on_event(row.place, event)


def _reason(job: Job | Call, now: float) -> Failed | None:
    """Return why a job's rows are to be dropped; None: they are not."""
    return CANCELED if job.canceled else DEADLINE if now > job.deadline else None
