"""`sedd audit`: verdicts, counter-examples, exit codes and refusals."""

import inspect
import json
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from sedd.cli.audit import audit

Sedd = Callable[..., subprocess.CompletedProcess[str]]
EXAMPLES = Path(__file__).parents[2] / "examples/audited_losses.py"


def test_the_example_of_the_help_is_complete_and_a_bound(sedd: Sedd, tmp_path: Path) -> None:
    lines = inspect.cleandoc(audit.__doc__ or "").split("\n\n")
    code = "\n\n".join(part for part in lines if part.startswith("    "))
    (tmp_path / "my_loss.py").write_text(textwrap.dedent(code))
    done = sedd("audit", f"{tmp_path}/my_loss.py:cross_entropy")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bound\n")
    assert "10, exact expectations" in done.stdout


@pytest.mark.parametrize(
    ("name", "compared"),
    [
        ("softmax_formula", "entropy"),
        ("unweighted_cross_entropy", "entropy"),
        ("dependent_model_substitution", "minus_log_p"),
        ("pseudo_likelihood", "entropy"),
    ],
)
def test_losses_that_are_no_bounds_have_a_counter_example(sedd: Sedd, name: str, compared: str) -> None:
    done = sedd("audit", f"{EXAMPLES}:{name}", "--json")
    assert done.returncode == 1, done.stderr
    record = json.loads(done.stdout)
    found = record["counter_example"]
    assert (record["loss"], record["verdict"]) == (name, "not a bound")
    assert found["expected_loss"] == pytest.approx(found[compared] + found["difference"])
    assert found["difference"] < -0.3
    assert sum(found["distribution"].values()) == pytest.approx(1)


def test_an_objective_is_audited_by_its_name(sedd: Sedd) -> None:
    done = sedd("audit", "any-order")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "bound"), done.stderr
    refuted = sedd("audit", "mean")
    assert (refuted.returncode, refuted.stdout.splitlines()[0]) == (1, "not a bound")
    for word in ("the exact score of", "entropy of the data", "expected loss", "difference"):
        assert word in refuted.stdout


ONE_MODEL = """
from sedd.evaluation import audit
every = audit.audit_models
audit.audit_models = lambda process: list(every(process))[:1]
"""
WITHOUT_PRIOR = """
from sedd.process import Absorbing
Absorbing.prior_kl = lambda self, x_0, sigma: 0.0 * x_0
"""


@pytest.mark.parametrize("mutant", ["", WITHOUT_PRIOR], ids=["none", "without prior"])
def test_all_objectives_have_the_verdict_that_they_claim(sedd: Sedd, mutant: str) -> None:
    """The exit code is that of the claims alone, and a bound without its prior term has 1. One model, to be fast."""
    done = sedd("audit", "--all", before=ONE_MODEL + mutant)
    assert done.returncode == bool(mutant), done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert len(rows) == 35
    refuted = {row[0] for row in rows if "a bound not a bound" in " ".join(row[2:])}
    assert refuted == ({"score-entropy", "t-dce", "d3pm"} if mutant else set())


MISTAKES = """
import torch


def entropy(model, x_0, x_t, t, process, schedule, transposed=False, cut=0.0):
    noise = schedule(t)
    log_s, p = model(x_t, noise.sigma).double(), process.transition_matrix(noise.sigma)
    rows = torch.arange(len(x_0))[:, None]
    a = p[rows, :, x_0] / p[rows, x_t, x_0][..., None]
    Q = process.rate_matrix()
    rates = (Q.T if transposed else Q)[x_t]
    terms = log_s.exp() - a * log_s + torch.where(a > 0, a * (a.log() - 1), 0)
    diffusion = torch.where(rates > 0, rates * terms, 0).sum((-1, -2)) * noise.rate
    return torch.where(t > cut, diffusion, 0) + process.prior_kl(x_0, schedule.sigma(torch.ones_like(t))).sum(-1)


def right(model, x_0, x_t, t, process, schedule):
    return entropy(model, x_0, x_t, t, process, schedule)


def cut(model, x_0, x_t, t, process, schedule):
    return entropy(model, x_0, x_t, t, process, schedule, cut=1e-3)


def transposed(model, x_0, x_t, t, process, schedule):
    return entropy(model, x_0, x_t, t, process, schedule, transposed=True)


def late(model, x_0, x_t, t):
    if not hasattr(model, "log_mean"):
        raise RuntimeError("no denoiser")
    return 0 * t
"""


@pytest.mark.parametrize(
    ("name", "process", "failed"),
    [("right", "uniform", 0), ("cut", "uniform", 2), ("transposed", "absorbing", 8), ("late", "absorbing", 4)],
)
def test_a_counter_example_is_final_whatever_other_models_do(
    sedd: Sedd, tmp_path: Path, name: str, process: str, failed: int
) -> None:
    """A model on which the loss fails, or cannot be integrated, cannot save it."""
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    done = sedd("audit", f"{tmp_path}/mistakes.py:{name}", "--process", process, "--json")
    assert done.returncode == (name != "right"), done.stderr
    record = json.loads(done.stdout)
    assert (len(record["failures"]), record["counter_example"] is None) == (failed, name == "right")
    assert record["cases"] + failed == (14 if name == "late" else 28)


LOSSES = """
import torch
def sizes(model, x_0): return model.log_next(x_0)
def fails(model, x_0): return 1 / 0
def unknown(model, weights): return 0
def both(model, x_0, x_t, generator): return 0
def constant(x_0): return 0
def empty(model, x_0): return torch.full((len(x_0),), float("nan"))
def below(model, x_0): return torch.full((len(x_0),), -float("inf"))
def drawing(model, x_0): return torch.rand(len(x_0))
def drawing_too(model, x_0, x_t, t): return torch.rand(len(x_0))
def wild(model, x_0, x_t, t): return 100 * torch.sin(1e6 * t)
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name one loss"),
        (["mean", "--all"], "name one loss"),
        (["explicit-score-entropy"], "needs the true ratios"),
        (["t-dce", "--process", "uniform"], "needs Absorbing"),
        (["mean", "--process", "foggy"], "process is 'foggy'; choose one of"),
        (["LOSSES:loss"], "does not define the function 'loss'; it defines sizes, fails"),
        (["LOSSES:sizes", "--draws", "10"], "draws is 10"),
        (["LOSSES:sizes"], "it must return nats per sequence, shape (64,)"),
        (["LOSSES:fails"], "ZeroDivisionError (line 4): division by zero"),
        (["LOSSES:unknown"], "takes 'weights'; a loss is called with some of model, x_0"),
        (["LOSSES:both"], "takes generator and x_t or t"),
        (["LOSSES:constant"], "does not take 'model'"),
        (["LOSSES:empty"], "returned NaN"),
        (["LOSSES:below", "--entropy-only"], "returned −∞"),
        (["LOSSES:drawing"], "different values when it was called again; take generator"),
        (["LOSSES:drawing_too"], "different values when it was called again; take generator"),
        (["LOSSES:wild"], "varies too fast in t"),
        (["ENDING:f"], "cannot be run: SystemExit"),
        (["a" * 300 + ".py:f"], "does not exist"),
        (["BROKEN:f"], "cannot be run: SyntaxError"),
        (["RAISING:f"], "cannot be run: RuntimeError (line 1): no"),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_bad_input_is_a_sentence_and_exit_code_2(sedd: Sedd, tmp_path: Path, words: list[str], message: str) -> None:
    files = {"LOSSES": LOSSES, "BROKEN": "def f(:", "RAISING": "raise RuntimeError('no')\ndef f(model): ..."}
    files["ENDING"] = "import sys\nsys.exit(0)\ndef f(model): ..."
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    given = [f"{tmp_path}/{word.replace(':', '.py:')}" if word.partition(":")[0] in files else word for word in words]
    done = sedd("audit", *given)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
