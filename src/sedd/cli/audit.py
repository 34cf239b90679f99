"""``sedd audit``: whether a loss bounds −log p, on distributions small enough to enumerate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sedd.cli import root
from sedd.training.config import OBJECTIVES, PROCESSES
from sedd.training.progress import progress_on_stderr

if TYPE_CHECKING:
    from sedd.evaluation.audit import AuditResult

EXPLICIT = ("explicit-score-entropy", "explicit-concrete-score")
"""Objectives that need a distribution, and so are no losses of a model and data alone."""
LOSSES = [name for name in OBJECTIVES.names if name not in EXPLICIT]


@root.command("audit")
def audit(
    loss: Annotated[str | None, LOSSES] = None,
    *,
    every: bool = False,
    process: Annotated[str, PROCESSES.names] = "absorbing",
    draws: int = 4000,
    entropy_only: bool = False,
    as_json: bool = False,
) -> None:
    """Test whether a loss is an upper bound on −log p(x_0); print a counter-example if it is not.

    The loss is evaluated on exact, perturbed and random models of two or three tokens, some of which depend on σ or are
    not normalised. Its expectation must not be below the entropy of any distribution of data, nor below −log p of any
    sequence under the model's own reverse process. One violation refutes it. That there is none is evidence, not
    proof. Exit code: 0 bound, 1 not a bound (with --all: an objective that claims to be one), 2 bad input.

    A function returns nats per sequence, shape (b,), and takes what it needs of these, by name:

    - `model`: `model(x_t, sigma)` is the log-score (b, L, states); `model.log_mean(x_t, sigma)` is log p(x_0 | x_t)
      (b, L, N); `model.log_next(x_0)` is log p of each token given those before it
    - `x_0`: clean sequences (b, L); `process`, `schedule`: as in `sedd.diffusion`
    - `x_t`, `t`: noisy sequences and their times in (0, 1); the claim is on the mean over both, which is exact
    - `generator`: in place of `x_t` and `t`, to draw all noise, row by row; the claim is on their mean, tested
      with a false-alarm probability of 1e-6 if their variance is finite

    With `schedule` it must include the prior term; without, noise is log-linear: a token is masked with probability t.
    For example, in `my_loss.py`:

        import torch

        def cross_entropy(model, x_0, x_t, t):
            log_p = model.log_mean(x_t, -torch.log1p(-t))
            log_p = log_p.gather(-1, x_0[..., None]).squeeze(-1)
            return -torch.where(x_t != x_0, log_p, 0).sum(-1) / t

    Type:

    - `sedd audit my_loss.py:cross_entropy`
    - `sedd audit score-entropy --process uniform`
    - `sedd audit --all`

    Args:
        loss: Objective ({names}), or FILE.py:FUNCTION. The file is run: name only files that you trust.
        every (--all): Audit all objectives, under every noise process.
        draws: Random draws per sequence, for a function that takes generator; at least 100.
        entropy_only: Compare with the entropy alone: for a function that bounds the likelihood of another way to
            generate than the model's reverse process, such as left to right or a chain of few steps.
    """
    if (loss is None) != every:
        raise ValueError("name one loss, an objective or FILE.py:FUNCTION, or give --all; see sedd audit --help")
    if loss is not None:
        result = _audit_one(loss, process, draws, entropy_only)
        (_print_json if as_json else _describe)(result)
        raise typer.Exit(not result.is_bound)
    from sedd.evaluation.audit import audit_objective

    pairs = [
        (name, process)
        for name in OBJECTIVES.built_in
        if name not in EXPLICIT
        for process in PROCESSES.built_in
        if process == "absorbing" or not OBJECTIVES.load(name).needs_mask
    ]
    results = []
    with progress_on_stderr("auditing", shown=not as_json) as on_progress:
        for name, process in pairs:
            results.append(audit_objective(name, process))
            on_progress(len(results), len(pairs))
    (_print_json if as_json else _print_table)(*results)
    raise typer.Exit(any(result.is_claimed and not result.is_bound for result in results))


def _audit_one(loss: str, process: str, draws: int, entropy_only: bool) -> "AuditResult":
    """Audit one loss: an objective by its name, or a function as FILE.py:FUNCTION."""
    from sedd.evaluation import audit

    path, colon, name = loss.rpartition(":")
    if colon and path.endswith(".py"):
        function = audit.load_function(Path(path), name)
        return audit.audit_function(function, process, draws=draws, entropy_only=entropy_only)
    if loss in EXPLICIT:
        raise ValueError(f"{loss} needs the true ratios of a distribution, so it is no loss of a model and data alone")
    if loss not in LOSSES:
        raise ValueError(f"loss is {loss!r}; name a function as FILE.py:FUNCTION, or choose one of {', '.join(LOSSES)}")
    return audit.audit_objective(loss, process)


def _print_json(*results: "AuditResult") -> None:
    for result in results:
        found = result.counter_example
        root.print_records([result._asdict() | {"counter_example": None if found is None else found._asdict()}])


def _rounded(nats: float | None) -> str:
    return "unknown" if nats is None else f"{round(nats, 5) + 0.0:.5f}"  # + 0: no −0


def _print_table(*results: "AuditResult") -> None:
    """Print a line per audit: the difference of a counter-example, or the gap of exact scores."""
    print(f"{'objective':24s} {'process':10s} {'claims':8s} {'verdict':20s} nats")
    for result in results:
        found = result.counter_example
        nats = f"difference {found.difference:+.3f}" if found else f"gap {_rounded(result.gap_nats)}"
        claim = "a bound" if result.is_claimed else "nothing"
        print(f"{result.loss:24s} {result.process:10s} {claim:8s} {result.verdict:20s} {nats}")


def _describe(result: "AuditResult") -> None:
    found = result.counter_example
    how = "exact expectations" if result.expectations == "exact" else "means of random draws"
    rows = {"loss": f"{result.loss}, {result.process} noise", "cases": f"{result.cases}, {how}"}
    if result.failures:
        rows["not evaluated"] = f"{len(result.failures)} more; the first: {result.failures[0]}"
    if found is None:
        rows["counter-example"] = f"none; the smallest margin is {_rounded(result.smallest_margin_nats)} nats"
        rows["gap of exact scores"] = f"{_rounded(result.gap_nats)} nats above the entropy, at most"
    else:
        error = f" ± {found.stderr:.5f}" if found.stderr else ""
        rows |= {"counter-example": found.model, "noise": f"{found.process}, {found.schedule}"}
        rows["data"] = ", ".join(f"{x}: {p:.3g}" for x, p in found.distribution.items())
        rows["entropy of the data"] = f"{found.entropy:.5f} nats"
        if found.minus_log_p is not None:
            rows["−log p of the model"] = f"{found.minus_log_p:.5f} nats"
        rows["expected loss"] = f"{found.expected_loss:.5f}{error} nats"
        rows["difference"] = f"{found.difference:+.5f} nats"
    print(result.verdict)
    root.print_rows(rows, 22)
