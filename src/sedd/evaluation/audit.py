"""Test whether a loss bounds −log p, by comparison with entropies and likelihoods found by enumeration.  [§8]

Let ℓ(x) be the expected loss of the sequence x under one model. Two things are necessary for a bound:

- ℓ is above the entropy: E_q ℓ ≥ H(q) for every distribution q of sequences. Since Σ_x p(x) ≤ 1 for any model, all of
  these inequalities hold if and only if Σ_x e^−ℓ(x) ≤ 1 (the Kraft inequality). The worst case is q ∝ e^−ℓ, whose
  margin is −log Σ_x e^−ℓ(x).
- ℓ(x) ≥ −log p(x) for every x, where p is the distribution that the model itself generates.

A violation of either is a counter-example. Finding none among these models does not prove the bound in general.
"""

import inspect
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sedd.evaluation.audit_losses import (
    FULL_NOISE,
    Expected,
    FunctionLoss,
    ObjectiveLoss,
    Subject,
    audit_models,
    describe_error,
)
from sedd.exact import all_sequences
from sedd.schedule import Schedule

TOLERANCE = 1e-3
"""Nats by which an exact expectation must fall short; quadrature and rounding are far below."""
FALSE_ALARM = 1e-6
"""The probability that any of the comparisons of random draws fails for a bound, if their means are normal."""


class CounterExample(NamedTuple):
    """A model and a distribution of data for which a loss falls short, in nats per sequence."""

    process: str
    schedule: str
    model: str
    distribution: dict[str, float]  # the probabilities of sequences, written as their token ids
    entropy: float  # of the distribution
    minus_log_p: float | None  # −log p of the model, averaged over the distribution; None: the entropy alone counts
    expected_loss: float
    difference: float  # the expected loss minus the larger of the two, below 0
    stderr: float  # of the expected loss; 0 where it is an exact sum


class AuditResult(NamedTuple):
    """The verdict on a loss: a record of `sedd audit --json`."""

    loss: str
    process: str
    verdict: str  # ``bound``, ``not a bound`` or, of an objective that claims nothing, ``no counter-example``
    is_bound: bool  # whether no counter-example was found
    is_claimed: bool  # whether it claims to be a bound, as every function does and not every objective
    cases: int  # combinations of a model and a schedule that were evaluated
    failures: tuple[str, ...]  # why others could not be; without a counter-example the first of these is raised instead
    expectations: str  # ``exact``: sums over all noise; or means of ``random draws``
    smallest_margin_nats: float  # the least E_q ℓ − H(q) and ℓ(x) + log p(x) of all cases
    gap_nats: float | None  # the largest E ℓ − H of exact scores without a prior term: 0 if tight; None: not evaluated
    counter_example: CounterExample | None


def audit_objective(name: str, process: str = "absorbing") -> AuditResult:
    """Audit an objective of this package, or of a plugin, with the prior and reconstruction terms of the bound."""
    return _audit(ObjectiveLoss(name, process), process)


def audit_function(
    function: Callable[..., Any], process: str = "absorbing", *, draws: int = 4000, entropy_only: bool = False
) -> AuditResult:
    """Audit a function that claims to bound −log p(x_0).

    Args:
        function: Takes some of ``model``, ``x_0``, ``x_t``, ``t``, ``process``, ``schedule`` and ``generator`` by name,
            and returns nats per sequence. If it takes ``x_t`` or ``t``, the claim is on its mean over t in (0, 1) and
            x_t, which is computed exactly; if it takes ``generator``, on the mean of ``draws`` draws per sequence.
        entropy_only: Compare with the entropy alone: for a loss that bounds the likelihood of another way to generate
            than the model's reverse process, such as a chain of few steps.
    """
    return _audit(FunctionLoss(function, draws, entropy_only), process)


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Run a Python file and return one of its functions."""
    if not os.path.isfile(path):  # False, too, for a name that is too long
        raise ValueError(f"{path} does not exist; name a Python file and a function in it: my_loss.py:name")
    sys.path.insert(0, str(path.resolve().parent))  # as for a script
    try:
        module = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} cannot be run: {describe_error(error, path)}") from error
    functions = {key: value for key, value in module.items() if inspect.isfunction(value)}
    if name not in functions:
        found = f"it defines {', '.join(functions)}" if functions else "it defines none"
        raise ValueError(f"{path} does not define the function {name!r}; {found}")
    return functions[name]


def _audit(loss: ObjectiveLoss | FunctionLoss, process: str) -> AuditResult:
    failures: list[ValueError] = []  # raised only without a counter-example, which is final whatever other cases do
    cases: list[tuple[Subject, Schedule]] = []
    for subject in audit_models(process):
        try:
            if loss.accepts(subject):
                cases += [(subject, schedule) for schedule in loss.schedules]
        except ValueError as error:
            failures.append(error)
    if not cases and not failures:
        raise ValueError(f"{loss.name} fits none of the audit's models; they have log_mean, log_next or scores")
    quantile = -torch.special.ndtri(torch.tensor(FALSE_ALARM / (2 * max(1, len(cases))), dtype=torch.float64)).item()
    are_exact, margins, gaps, found = list[bool](), [torch.inf], list[float](), list[CounterExample]()
    for subject, schedule in cases:
        try:
            expected = loss.expected(subject, schedule)
        except ValueError as error:
            failures.append(error)
            continue
        are_exact.append(expected.is_exact)
        log_p = None
        if schedule is FULL_NOISE:
            log_p, distribution = loss.log_p(subject), subject.distribution
            if distribution is not None:
                gaps.append(((distribution.probabilities * expected.measured).sum() - distribution.entropy()).item())
        for compared in (None,) if log_p is None else (None, log_p):
            example, spread = _least_margin(subject, schedule, expected, compared)
            margins.append(example.difference)
            if example.difference < -(TOLERANCE + 10 * spread if expected.is_exact else quantile * spread):
                found.append(example)
    if failures and not found:
        raise failures[0]
    return AuditResult(
        loss=loss.name,
        process=process,
        verdict="not a bound" if found else "bound" if loss.is_claimed else "no counter-example",
        is_bound=not found,
        is_claimed=loss.is_claimed,
        cases=len(are_exact),
        failures=tuple(map(str, failures)),
        expectations="exact" if all(are_exact) else "random draws",
        smallest_margin_nats=min(margins),
        gap_nats=max(gaps, default=None),
        counter_example=min(found, key=lambda one: (one.minus_log_p is not None, one.difference), default=None),
    )


def _least_margin(
    subject: Subject, schedule: Schedule, expected: Expected, log_p: Tensor | None
) -> tuple[CounterExample, float]:
    """Compare a loss with the entropy or, given log p, with the likelihood, where it exceeds it least.

    E_q ℓ − H(q) is least for the distribution q ∝ e^−ℓ, and ℓ(x) + log p(x) for some sequence x. The second value is
    the error of the difference: of the quadrature, or one standard error of the draws.
    """
    if log_p is None:
        q, minus_log_p = (-expected.nats).softmax(-1), None
    else:
        x = int((expected.nats + log_p).argmin())
        q, minus_log_p = torch.zeros_like(log_p).index_fill(0, torch.tensor([x]), 1), -log_p[x].item()
    nats, errors = (torch.where(q > 0, q * values, 0) for values in (expected.measured, expected.error))
    error = (errors.sum() if expected.is_exact else errors.square().sum().sqrt()).item()
    entropy = float(-torch.xlogy(q, q).sum()) + 0.0  # not −0
    least = entropy if minus_log_p is None else minus_log_p
    difference = (nats.sum() - least).item()
    sequences = all_sequences(subject.model.process.vocab_size, subject.length).tolist()
    example = CounterExample(
        process=str(subject.model.process),
        schedule=str(schedule),
        model=subject.name,
        distribution={"".join(map(str, x)): p for x, p in zip(sequences, q.tolist(), strict=True) if p > 0},
        entropy=entropy,
        minus_log_p=minus_log_p,
        expected_loss=least + difference,
        difference=difference,
        stderr=0.0 if expected.is_exact else error,
    )
    return example, error
