"""Whether a loss bounds −log p: a comparison with entropies and likelihoods that are known by enumeration.  [§8]

Let ℓ(x) be the expected loss of the sequence x under one model. Two things are necessary for a bound:

- ℓ is above the entropy: E_q ℓ ≥ H(q) for every distribution q of sequences. Since Σ_x p(x) ≤ 1 for any model, all of
  these inequalities hold if and only if Σ_x e^−ℓ(x) ≤ 1 (the Kraft inequality): the distribution for which the margin
  is least is q ∝ e^−ℓ, and its margin is −log Σ_x e^−ℓ(x).
- ℓ(x) ≥ −log p(x) for every x, where p is the distribution that the model itself generates.

A violation of either is a counter-example. That there is none among these models is no proof for others.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sedd import registry
from sedd.evaluation.audit.losses import FULL_NOISE, AuditedLoss, Expected, FunctionLoss, ObjectiveLoss
from sedd.evaluation.audit.models import AuditModel, audit_models
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
    distribution: dict[str, float]
    """The probabilities of sequences, written as their token ids."""
    entropy: float
    """The entropy of the distribution."""
    minus_log_p: float | None
    """−log p under the model, averaged over the distribution; None: it was not compared."""
    expected_loss: float
    difference: float
    """The expected loss minus the larger of the two, below 0."""
    stderr: float
    """Standard error of the expected loss; 0 where it is an exact sum."""


class AuditResult(NamedTuple):
    """The verdict on a loss."""

    loss: str
    process: str
    is_bound: bool
    """Whether no counter-example was found."""
    is_claimed: bool
    """Whether it claims to be a bound, as every function does and not every objective."""
    cases: int
    """Combinations of a model and a schedule that were evaluated."""
    failures: tuple[str, ...]
    """Why others could not be evaluated. Without a counter-example the first of these is raised instead."""
    is_exact: bool
    """Whether expectations are sums over all noise; otherwise they are means of random draws."""
    smallest_margin: float
    """The least E_q ℓ − H(q) and ℓ(x) + log p(x) of all cases, in nats."""
    gap: float | None
    """The largest E ℓ − H of exact scores on their own distributions without a prior term: 0 if it is tight.

    None: no exact score was evaluated.
    """
    counter_example: CounterExample | None

    @property
    def verdict(self) -> str:
        """``bound`` or ``not a bound``; ``no counter-example`` for an objective that does not claim to be a bound."""
        if not self.is_bound:
            return "not a bound"
        return "bound" if self.is_claimed else "no counter-example"


class _Margin(NamedTuple):
    """How far a loss is above what it must not be below."""

    value: float
    error: float
    """The error of the quadrature, or one standard error of the draws."""
    q: Tensor
    """The distribution of data."""


def audit_objective(name: str, process: str = "absorbing") -> AuditResult:
    """Audit an objective of this package, or of a plugin, with the prior and reconstruction terms of the bound."""
    registry.OBJECTIVES.check(name)
    registry.PROCESSES.check(process)
    return _audit(ObjectiveLoss(name, process), process)


def is_defined(name: str, process: str) -> bool:
    """Return whether an objective is defined for a process: some need masks."""
    try:
        ObjectiveLoss(name, process)
    except ValueError:
        return False
    return True


def audit_function(
    function: Callable[..., Any], process: str = "absorbing", *, draws: int = 4000, entropy_only: bool = False
) -> AuditResult:
    """Audit a function that claims to bound −log p(x_0).

    Args:
        function: Takes some of ``model``, ``x_0``, ``x_t``, ``t``, ``process``, ``schedule`` and ``generator`` by name,
            and returns nats per sequence. If it takes ``x_t`` or ``t``, the claim is on its mean over t in (0, 1) and
            x_t, which is computed exactly; if it takes ``generator``, on the mean of its draws.
        draws: Random draws per sequence, for a function that takes ``generator``.
        entropy_only: Compare with the entropy alone: for a loss that bounds the likelihood of another way to generate
            than the model's reverse process, such as a chain of few steps.
    """
    registry.PROCESSES.check(process)
    return _audit(FunctionLoss(function, draws, entropy_only), process)


def _cases(loss: AuditedLoss, process: str, failures: list[ValueError]) -> Iterator[tuple[AuditModel, Schedule]]:
    for audited in audit_models(process):
        try:
            is_accepted = loss.accepts(audited)
        except ValueError as error:
            failures.append(error)
        else:
            yield from ((audited, schedule) for schedule in loss.schedules if is_accepted)


def _audit(loss: AuditedLoss, process: str) -> AuditResult:
    failures: list[ValueError] = []  # raised only without a counter-example, which is final whatever other cases do
    cases = list(_cases(loss, process, failures))
    if not cases and not failures:
        raise ValueError(f"{loss.name} fits none of the audit's models; they have log_mean, log_next or scores")
    quantile = -torch.special.ndtri(torch.tensor(FALSE_ALARM / (2 * max(1, len(cases))), dtype=torch.float64)).item()
    evaluated, smallest, is_exact = 0, torch.inf, True
    gaps: list[float] = []
    found: list[CounterExample] = []
    for audited, schedule in cases:
        try:
            expected = loss.expected(audited, schedule)
        except ValueError as error:
            failures.append(error)
            continue
        evaluated += 1
        is_exact = is_exact and expected.second is None
        log_p = loss.log_p(audited) if schedule is FULL_NOISE else None
        if audited.distribution is not None and schedule is FULL_NOISE:
            p = audited.distribution.probabilities
            gaps.append(((p * _measured(expected)).sum() - audited.distribution.entropy()).item())
        for margin, compared in ((_entropy_margin(expected), None), (_likelihood_margin(expected, log_p), log_p)):
            smallest = min(smallest, margin.value)
            allowed = quantile * margin.error if expected.second is not None else TOLERANCE + 10 * margin.error
            if margin.value < -allowed:
                found.append(_counter_example(audited, schedule, expected, margin, compared))
    if failures and not found:
        raise failures[0]
    worst = min(found, key=lambda example: (example.minus_log_p is not None, example.difference), default=None)
    return AuditResult(
        loss=loss.name,
        process=process,
        is_bound=worst is None,
        is_claimed=loss.is_claimed,
        cases=evaluated,
        failures=tuple(map(str, failures)),
        is_exact=is_exact,
        smallest_margin=smallest,
        gap=max(gaps, default=None),
        counter_example=worst,
    )


def _measured(expected: Expected) -> Tensor:
    """Return the means to test: those of draws that did not choose what is tested."""
    return expected.nats if expected.second is None else expected.second


def _margin(expected: Expected, q: Tensor, least: float) -> _Margin:
    """Return E_q ℓ minus what it must not be below."""
    nats, error = (torch.where(q > 0, q * values, 0) for values in (_measured(expected), expected.error))
    total = error.sum() if expected.second is None else error.square().sum().sqrt()
    return _Margin((nats.sum() - least).item(), total.item(), q)


def _entropy(q: Tensor) -> float:
    return float(-torch.xlogy(q, q).sum()) + 0.0  # not −0


def _entropy_margin(expected: Expected) -> _Margin:
    """Return E_q ℓ − H(q) for the distribution q ∝ e^−ℓ, for which it is least."""
    q = (-expected.nats).softmax(-1)
    return _margin(expected, q, _entropy(q))


def _likelihood_margin(expected: Expected, log_p: Tensor | None) -> _Margin:
    """Return ℓ(x) + log p(x) for the sequence for which it is least."""
    if log_p is None:
        return _Margin(torch.inf, 0.0, torch.zeros_like(expected.nats))
    x = int((expected.nats + log_p).argmin())
    q = torch.zeros_like(expected.nats).index_fill(0, torch.tensor([x]), 1)
    return _margin(expected, q, -log_p[x].item())


def _counter_example(
    audited: AuditModel, schedule: Schedule, expected: Expected, margin: _Margin, log_p: Tensor | None
) -> CounterExample:
    sequences = all_sequences(audited.process.vocab_size, audited.length).tolist()
    named = {"".join(map(str, x)): float(p) for x, p in zip(sequences, margin.q, strict=True) if p > 0}
    entropy = _entropy(margin.q)
    minus_log_p = None if log_p is None else float(-torch.where(margin.q > 0, margin.q * log_p, 0).sum())
    least = entropy if minus_log_p is None else minus_log_p
    return CounterExample(
        process=str(audited.process),
        schedule=str(schedule),
        model=audited.name,
        distribution=named,
        entropy=entropy,
        minus_log_p=minus_log_p,
        expected_loss=least + margin.value,
        difference=margin.value,
        stderr=0.0 if expected.second is None else margin.error,
    )
