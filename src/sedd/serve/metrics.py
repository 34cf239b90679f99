"""Metrics of the server, in the format of Prometheus."""

from collections.abc import Callable
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sedd.serve.jobs import Failed

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


@final
class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("sedd_requests", "Requests", ["route", "status"], registry=own)
        self.seconds = Histogram(
            "sedd_request_seconds", "Time until a reply is complete", ["route"], buckets=_SECONDS, registry=own
        )
        self.first_edit = Histogram(
            "sedd_first_edit_seconds", "Time to the first edit of a stream", buckets=_SECONDS, registry=own
        )
        self.rows = Counter("sedd_rows", "Rows by how they ended", ["end"], registry=own)
        self.tokens = Counter("sedd_generated_tokens", "Tokens of filled rows", registry=own)
        self.forwards = Counter("sedd_forwards", "Forward passes", registry=own)
        self.forward_rows = Counter("sedd_forward_rows", "Rows of forward passes", registry=own)
        self.skipped = Counter("sedd_forward_rows_skipped", "Steps of rows that needed no forward pass", registry=own)
        self.occupancy = Histogram("sedd_batch_rows", "Rows that made a step together", buckets=_ROWS, registry=own)

    def watch(self, name: str, help: str, function: Callable[[], float]) -> None:
        Gauge(name, help, registry=self.registry).set_function(function)

    def count_end(self, event: object, tokens: int) -> None:
        self.rows.labels(event.code if isinstance(event, Failed) else "finished").inc()
        self.tokens.inc(0 if isinstance(event, Failed) else tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)
