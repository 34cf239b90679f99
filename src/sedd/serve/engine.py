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
from typing import cast

from sedd.loading import LoadedModel
from sedd.serve.batch import SharedBatch, failure_of, width_bucket
from sedd.serve.errors import RequestError
from sedd.serve.jobs import Call, Failed, FairQueue, Item, Job, Row, Step, Waiting
from sedd.serve.limits import Limits
from sedd.serve.metrics import Metrics

DEADLINE = Failed("deadline_exceeded", "the request was not finished in time; give a longer timeout, or fewer steps")
CANCELED = Failed("canceled", "the request was canceled")
STOPPED = Failed("canceled", "the server has stopped")
RESERVED = 16
"""One in so many slots is not for the client that holds all others, and one more not for the request that does."""


class _Dropped(Exception):  # noqa: N818
    """A call ends early; its argument is the event that says why."""


class Engine:
    """Fills rows in its own thread, all of them one step at a time."""

    def __init__(self, loaded: LoadedModel, limits: Limits) -> None:
        self.loaded, self.limits, self.metrics = loaded, limits, Metrics()
        self.metrics.watch("sedd_rows_waiting", "Rows that wait for a slot", lambda: self.waiting)
        self.metrics.watch("sedd_rows_running", "Rows in slots", lambda: self.running)
        self.metrics.watch("sedd_outstanding_cost", "Tokens still to be read by the network", lambda: self.outstanding)
        self.tokens_per_second = math.inf  # the cost that is done per second while at least half of the slots are used
        self._queue = FairQueue()
        self._costs: dict[Waiting, int] = {}  # of every row or call that is accepted and not done
        self._batches: dict[tuple[int, bool], SharedBatch] = {}
        self._condition = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
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
        return self._thread.is_alive() and not self._stopping

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return sum(len(batch.members) for batch in list(self._batches.values()))

    @property
    def outstanding(self) -> int:
        """The cost of all accepted work that is not done."""
        with self._condition:
            return sum(self._costs.values())

    def submit(self, job: Job) -> None:
        items: list[Waiting] = [Item(row, place, job) for place, row in enumerate(job.rows)]
        with self._condition:
            if not self._stopping:
                costs = {item: item.row.cost for item in items}
                self._admit(job.client, list(costs.values()))
                self._costs |= costs
                for item in items:
                    self._queue.push(item)
                self._condition.notify()
                return
        for item in items:
            job.on_event(item.place, STOPPED)

    def _admit(self, client: str, costs: list[int]) -> None:
        """Raise `RequestError` if work has to wait too long: for all that was accepted, or for its client's turns.

        Clients take turns, so that n times a client's own work is done by the time when its last row is.
        """
        clients = len({item.job.client for item in self._costs} | {client})
        own = [cost for item, cost in self._costs.items() if item.job.client == client] + costs
        rows, waiting, outstanding = len(costs), self.waiting, self.outstanding
        seconds = min(outstanding + sum(costs), clients * sum(own)) / self.tokens_per_second
        places = self.limits.slots + self.limits.queue  # a burst may come while slots are empty
        taken = min(self.running + waiting + rows, clients * len(own))
        if outstanding and (taken > places or seconds > self.limits.timeout):
            rest = seconds - self.limits.timeout if math.isfinite(seconds) else 0.0
            left = outstanding / self.tokens_per_second * rows / max(1, waiting)
            retry_after = str(max(1, min(60, math.ceil(max(rest, left)))))
            message = f"the server is busy; try again in {retry_after} s"
            raise RequestError("overloaded", message, {"retry-after": retry_after})

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._stopping or self.waiting or self.running)
                if self._stopping:
                    break
                call = cast("Item[Call] | None", self._queue.pop(lambda item: isinstance(item.row, Call)))
            try:
                if call:
                    self._make_call(call)
                self._advance()
            except Exception as error:  # a bug: no request may wait forever because of it
                traceback.print_exc(file=sys.stderr)
                self._clear(failure_of(error))
        self._clear(STOPPED)
        for item in self._queue.remove(lambda job: True):
            self._end(item, STOPPED)

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
            self.metrics.forwards.inc(batch.stats.batch_calls)
            self.metrics.forward_rows.inc(batch.stats.row_calls)
            self.metrics.skipped.inc(batch.skipped)
            self.metrics.occupancy.observe(len(before))
            for row, event in events:
                if isinstance(event, Step):
                    self._report(row, event)
                else:
                    self._end(row, event)
        if 2 * rows >= self.limits.slots:
            rate, old = tokens / (time.perf_counter() - started), self.tokens_per_second
            self.tokens_per_second = rate if math.isinf(old) else 0.95 * old + 0.05 * rate

    def _drop(self) -> None:
        """Remove rows and calls whose client has gone or whose time is over."""
        now = time.monotonic()
        with self._condition:
            late: list[Waiting] = [*self._queue.remove(lambda job: _reason(job, now) is not None)]
        for batch in self._batches.values():
            gone = [row for row in batch.members if _reason(row.job, now)]
            batch.remove(gone)
            late += gone
        for item in late:
            self._end(item, _reason(item.job, now) or CANCELED)

    def _admit_next(self) -> Item[Row] | None:
        """Return the next row to enter; a client, and a request, leave some slots to others: see `RESERVED`."""
        jobs = [row.job for batch in self._batches.values() for row in batch.members]
        of_client, of_job = Counter(job.client for job in jobs), Counter(jobs)
        slots, left = self.limits.slots, self.limits.slots // RESERVED

        def may_enter(item: Waiting) -> bool:
            has_room = of_client[item.job.client] < slots - left and of_job[item.job] < slots - 2 * left
            return isinstance(item.row, Row) and has_room

        with self._condition:
            return cast("Item[Row] | None", self._queue.pop(may_enter))

    def _enter(self, row: Item[Row]) -> None:
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

    def _make_call(self, item: Item[Call]) -> None:
        """Run a function that needs the model; rows go on in between."""

        def proceed() -> None:
            if reason := CANCELED if self._stopping else _reason(item.job, time.monotonic()):
                raise _Dropped(reason)
            self._advance()

        try:
            proceed()
            event = item.row.function(proceed)
        except _Dropped as dropped:
            [event] = dropped.args
        except Exception as error:
            event = failure = failure_of(error)
            if failure.code == "internal_error":
                traceback.print_exc(file=sys.stderr)
        self._end(item, event)

    def _end(self, item: Waiting, event: object) -> None:
        """Report the last event of a row, or what a call has returned."""
        with self._condition:
            self._costs.pop(item, None)
        if isinstance(item.row, Row):
            self.metrics.count_end(event, item.row.given[item.row.text].count(-1))
        self._report(item, event)

    def _report(self, item: Waiting, event: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            item.job.on_event(item.place, event)


def _reason(job: Job, now: float) -> Failed | None:
    """Return why a job's rows are to be dropped; None: they are not."""
    return CANCELED if job.canceled else DEADLINE if now > job.deadline else None
