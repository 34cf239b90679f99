"""Wall-clock time of a run: training, evaluation and saving, each counted apart."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sedd.training.state import TrainingState


class Clock:
    """Divides wall-clock time between ``seconds``, ``eval_seconds`` and ``save_seconds`` of a run's state.

    What is not evaluation or saving is training: also the wait for data, for the device and for log files. On a GPU the
    host queues at most one step ahead, so its clock is the device's up to one step.
    """

    def __init__(self, state: TrainingState, now: Callable[[], float] = time.perf_counter) -> None:
        self.state, self._now, self._since = state, now, now()

    def _elapsed(self) -> float:
        """Return the seconds since this was last called."""
        before, self._since = self._since, self._now()
        return self._since - before

    def count_training(self) -> None:
        """Count the time until now as training."""
        self.state.seconds += self._elapsed()

    @contextmanager
    def count_apart(self, counter: str) -> Iterator[None]:
        """Count the time inside as ``eval_seconds`` or ``save_seconds``; queued steps must have ended before."""
        self.count_training()
        try:
            yield
        finally:
            setattr(self.state, counter, getattr(self.state, counter) + self._elapsed())
