"""Audits: whether a loss bounds −log p, decided on distributions and models that are small enough to enumerate."""

from sedd.evaluation.audit.verdict import AuditResult, CounterExample, audit_function, audit_objective, is_defined

__all__ = ["AuditResult", "CounterExample", "audit_function", "audit_objective", "is_defined"]
