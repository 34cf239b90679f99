"""Wall-clock time of a run: training, evaluation and saving, each counted apart."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sedd.training.state import TrainingState


class Clock:
    """Divides all time since it was started between ``seconds``, ``eval_seconds`` and ``save_seconds`` of a run.

    What is not evaluation or saving is training: also the wait for data, for the device and for log files. On a GPU the
    host queues at most one step ahead, so its clock is the device's up to one step.
    """

    def __init__(self, state: TrainingState, now: Callable[[], float] = time.perf_counter) -> None:
        self.state, self._now, self._since = state, now, now()

    def _elapsed(self) -> float:
        """Return the seconds since this was last called."""
        before, self._since = self._since, self._now()
        return self._since - before

    def training(self) -> float:
        """Count the time until now as training, and return the seconds of training so far."""
        self.state.seconds += self._elapsed()
        return self.state.seconds

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Count the time inside as evaluation; queued training steps must have ended before."""
        self.training()
        try:
            yield
        finally:
            self.state.eval_seconds += self._elapsed()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count the time inside as saving; queued training steps must have ended before."""
        self.training()
        try:
            yield
        finally:
            self.state.save_seconds += self._elapsed()
