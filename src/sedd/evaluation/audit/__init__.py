"""Audits: whether a loss bounds −log p, decided on distributions and models that are small enough to enumerate."""

from typing import TYPE_CHECKING

from sedd.lazy import lazy_names

if TYPE_CHECKING:
    from sedd.evaluation.audit.verdict import AuditResult, CounterExample, audit_function, audit_objective, is_defined

__all__ = ["AuditResult", "CounterExample", "audit_function", "audit_objective", "is_defined"]

__getattr__ = lazy_names(
    __name__, {"verdict": ["AuditResult", "CounterExample", "audit_function", "audit_objective", "is_defined"]}
)
