"""Serving: in-flight batching of sampling, and an HTTP interface that OpenAI's clients can use."""

from typing import TYPE_CHECKING

from sedd.lazy import lazy_names

if TYPE_CHECKING:
    from sedd.serve.app import build_app
    from sedd.serve.checks import read_keys
    from sedd.serve.engine import Engine, Overloaded
    from sedd.serve.jobs import Call, Edit, Failed, Finished, Job, Row, Step
    from sedd.serve.limits import Limits
    from sedd.serve.metrics import Metrics

__all__ = [
    "Call",
    "Edit",
    "Engine",
    "Failed",
    "Finished",
    "Job",
    "Limits",
    "Metrics",
    "Overloaded",
    "Row",
    "Step",
    "build_app",
    "read_keys",
]

__getattr__ = lazy_names(
    __name__,
    {
        "app": ["build_app"],
        "checks": ["read_keys"],
        "engine": ["Engine", "Overloaded"],
        "jobs": ["Call", "Edit", "Failed", "Finished", "Job", "Row", "Step"],
        "limits": ["Limits"],
        "metrics": ["Metrics"],
    },
)
