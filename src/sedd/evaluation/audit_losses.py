"""The expected value of a loss on every sequence of small models: exactly where its noise can be enumerated.

An objective of this package is audited with the prior and reconstruction terms of the bound (§8); a user's function
as it is.
"""

import copy
import inspect
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from math import comb
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from sedd import objectives
from sedd.exact import (
    Distribution,
    Score,
    Table,
    all_sequences,
    reverse_distribution,
    sample_distribution,
    transition_matrix,
)
from sedd.likelihood.estimators import times_by_noise
from sedd.parameterization import MeanModel, ScoreModel
from sedd.process import Process, at_token
from sedd.reverse import denoising_table
from sedd.samplers import Ancestral, LeftToRight
from sedd.schedule import Geometric, LogLinear, Schedule
from sedd.training.config import OBJECTIVES, PROCESSES

FULL_NOISE = LogLinear(eps=1e-9)
"""At t = 1 nothing of the data is left, so that the model alone determines what is generated."""
SCHEDULES: tuple[Schedule, ...] = (FULL_NOISE, LogLinear(eps=0.5), Geometric(0.2, 6.0))
"""The second leaves half of all tokens clean, so that the prior term counts; the third begins with noise."""
NODES = ((32, 48), (256, 384))
"""Nodes of two quadratures, whose difference estimates the error, and of finer ones where it is above 1e-5 nats."""
MAX_ERROR = 0.01
"""Nats to which the mean of a function over t must be known for a verdict."""
PARAMETERS = ("model", "x_0", "x_t", "t", "process", "schedule", "generator")
"""What a loss function may take, by name."""


# Models ----------------------------------------------------------------------------------------------------


class Subject(NamedTuple):
    """A model of all sequences of ``length`` tokens, on which losses are evaluated."""

    name: str
    model: Any
    length: int
    is_time_free: bool  # whether p(x_0 | x_t) does not depend on σ, which objectives without a schedule need
    distribution: Distribution | None = None  # the distribution whose exact score it is, if it is one


@final
class TimeDependentTable(nn.Module):
    """Mix two tables, one for no noise and one for much noise, with weights e^−σ and 1 − e^−σ."""

    def __init__(self, num_states: int, length: int) -> None:
        super().__init__()
        self.clean, self.noisy = Table(num_states, length), Table(num_states, length)

    def forward(self, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        weight = torch.exp(-sigma.double())[..., None, None]
        mixed: Tensor = weight * self.clean(x, sigma) + (1 - weight) * self.noisy(x, sigma)
        return mixed


@final
class Perturbed(nn.Module):
    """Add errors to the logits of an exact denoiser, one for every sequence, position and state."""

    def __init__(self, exact_score: Score, errors: nn.Module) -> None:
        super().__init__()
        self.exact_score, self.errors = exact_score, errors

    def forward(self, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        process = self.exact_score.process
        errors: Tensor = self.errors(x, sigma)
        logits = process.leave_one_out(self.exact_score.log_mean(x, sigma), x, sigma)  # `MeanModel` adds the likelihood
        return pad(logits, (0, process.num_states - process.vocab_size)) + errors


def _randomize(network: nn.Module, scale: float, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.requires_grad_(False).normal_(std=scale, generator=generator)
    return network


def build_audited_process(name: str, vocab_size: int) -> Process:
    """Build a noise process; tokens have the frequencies 1, 2, 3 … where it needs some."""
    options = {"frequencies": range(1, vocab_size + 1)} if name == "frequency" else {}
    process: Process = PROCESSES.build(name, vocab_size, **options)
    return process


def audit_models(process_name: str) -> Iterator[Subject]:
    """Yield exact scores, perturbed and random denoisers, and random scores, which imply no normalised denoiser."""
    generator = torch.Generator().manual_seed(0)
    likely = torch.full((3, 3), 0.03 / 8, dtype=torch.float64)
    likely[1, 2] = 0.97
    distributions = (  # dependent and independent tokens, low and high entropy
        ("a random distribution", Distribution.random(3, 2, generator)),
        ("two tokens that are nearly always equal", Distribution(0.02 / 9 + 0.98 / 3 * torch.eye(3).double())),
        ("one sequence of probability 0.97", Distribution(likely)),
        ("a random distribution of length 3", Distribution.random(2, 3, generator)),
    )
    is_time_free = process_name == "absorbing"
    for seed, (name, p) in enumerate(distributions):
        score = Score(p, build_audited_process(process_name, p.vocab_size))
        yield Subject(f"the exact score of {name}", score, p.length, is_time_free, p)
        if seed < 2:
            errors = _randomize(Table(score.process.num_states, p.length), 0.5, seed)
            denoiser = MeanModel(Perturbed(score, errors), score.process)
            yield Subject(f"the denoiser of {name}, perturbed", denoiser, p.length, is_time_free)
    for seed, (vocab_size, length) in enumerate([(3, 2), (2, 3)]):
        process = build_audited_process(process_name, vocab_size)
        for wrapper, name in ((MeanModel, "denoiser"), (ScoreModel, "score")):
            for network, words in ((Table, ""), (TimeDependentTable, " that depends on σ")):
                model = wrapper(_randomize(network(process.num_states, length), 1.5, seed), process)
                yield Subject(f"a random {name}{words}, number {seed}", model, length, network is Table)


# Noise -----------------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """The expected loss of every sequence of a space, in nats."""

    nats: Float[Tensor, " sequences"]
    error: Float[Tensor, " sequences"]  # of the quadrature or, of random draws, one standard error
    measured: Float[Tensor, " sequences"]  # the means to test: ``nats``, or those of draws that did not choose the test
    is_exact: bool  # whether they are sums over all noise, and no means of random draws


class _Noise(NamedTuple):
    """Every pair of a clean and a noisy sequence at every time, with its probability."""

    x_0: Int[Tensor, "n L"]
    x_t: Int[Tensor, "n L"]
    t: Float[Tensor, " n"]
    weight: Float[Tensor, " n"]
    sequence: Int[Tensor, " n"]  # the index of x_0

    def mean(self, values: Float[Tensor, " n"]) -> Float[Tensor, " sequences"]:
        """Return the expectation of ``values`` for every clean sequence."""
        return torch.bincount(self.sequence, self.weight * values.double())


def _enumerate(
    process: Process, length: int, t: Tensor, weight: Tensor, p: Callable[[Tensor, Tensor], Tensor]
) -> _Noise:
    """Enumerate noise at times t of these weights; ``p(x_t, x_0)`` is p(x_t | x_0) at each of them."""
    x_t, x_0 = all_sequences(process.num_states, length), all_sequences(process.vocab_size, length)
    joint = weight[:, None, None] * p(x_t[:, None], x_0)
    time, noisy, clean = torch.nonzero(joint, as_tuple=True)
    return _Noise(x_0[clean], x_t[noisy], t[time], joint[time, noisy, clean], clean)


def _at_times(process: Process, length: int, schedule: Schedule, t: Tensor, weight: Tensor) -> _Noise:
    """Enumerate the process's noise at σ(t)."""
    p = transition_matrix(process, schedule.sigma(t))
    return _enumerate(process, length, t, weight, lambda x_t, x_0: p[:, x_t, x_0].prod(-1))


def _at_start(process: Process, length: int, schedule: Schedule = FULL_NOISE) -> _Noise:
    """Enumerate the noise at t = 0: none, unless a schedule begins with noise."""
    return _at_times(process, length, schedule, torch.zeros(1).double(), torch.ones(1).double())


@cache
def _by_schedule(process: Process, length: int, schedule: Schedule, nodes: int) -> _Noise:
    """Enumerate the noise of a schedule at the times of a quadrature, with more nodes at both ends of the noise."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    times = times_by_noise(torch.as_tensor((points + 1) / 2), schedule)
    return _at_times(process, length, schedule, times.t, times.weight * torch.as_tensor(weights / 2))


def _exactly_k(x_t: Tensor, x_0: Tensor) -> Tensor:
    """Return p(x_t | x_0) for k = 1 … L masked positions, all subsets of k being equally likely."""
    length, masked = x_0.shape[-1], x_t > x_0.max()
    k = torch.arange(1, length + 1)[:, None, None]
    subsets = torch.tensor([[[comb(length, n)]] for n in range(1, length + 1)], dtype=torch.float64)
    return ((masked | (x_t == x_0)).all(-1) & (masked.sum(-1) == k)).double() / subsets


def _integrate(noise: Callable[[int], _Noise], value: Callable[[_Noise], Tensor]) -> Expected:
    """Return the mean of ``value``; its error is the difference of two quadratures."""
    for coarse, fine in NODES:
        with torch.no_grad():
            found, nats = (made.mean(value(made)) for made in map(noise, (coarse, fine)))
        if (error := (nats - found).abs()).max() < 1e-5:
            break
    return Expected(nats, error, nats, is_exact=True)


# Losses ----------------------------------------------------------------------------------------------------


@final
class ObjectiveLoss:
    """An objective by its name, with the prior and reconstruction terms that make a bound of it."""

    def __init__(self, name: str, process_name: str) -> None:
        self.name = name
        options = {"steps": 4} if name == "d3pm" else {}  # few, so that the chain is far from continuous time
        self.objective: objectives.Objective = OBJECTIVES.build(name, **options)
        self.objective.check_process(build_audited_process(process_name, 2))
        enumerable = (objectives.Integral, objectives.LambdaDCE, objectives.AnyOrder)
        if not isinstance(self.objective, (*enumerable, objectives.D3PM, objectives.Autoregressive)):
            raise ValueError(f"objective {name} draws noise in its own way; audit it as a function, FILE.py:FUNCTION")
        self.is_claimed = self.objective.is_bound
        self.schedules = SCHEDULES if self.objective.has_schedule else SCHEDULES[:1]

    def accepts(self, subject: Subject) -> bool:
        """Return whether the model has what the objective needs; one without a schedule needs a time-free model."""
        needs = self.objective.needs
        fits = needs is None or hasattr(subject.model, needs)
        return fits and (self.objective.has_schedule or subject.is_time_free or self.name == "autoregressive")

    def expected(self, subject: Subject, schedule: Schedule) -> Expected:
        """Return the mean of the loss over its times and noise, plus prior and reconstruction."""
        model = copy.copy(subject.model)
        model.schedule = schedule
        diffusion = _integrate(
            lambda nodes: self._noise(model.process, subject.length, schedule, nodes),
            lambda noise: self.objective.loss(model, noise.x_t, noise.x_0, noise.t).sum(-1),
        )
        if not self.objective.has_schedule:
            return diffusion
        nats = diffusion.nats + _prior_and_reconstruction(model, subject.length)
        return diffusion._replace(nats=nats, measured=nats)

    def _noise(self, process: Process, length: int, schedule: Schedule, nodes: int) -> _Noise:
        """Enumerate the times and the noise of the objective; λ-DCE has those of the schedule with full noise."""
        match self.objective:
            case objectives.Autoregressive():
                return _at_start(process, length)
            case objectives.AnyOrder():
                return _enumerate(process, length, *self._finite_times(length), _exactly_k)
            case objectives.D3PM(steps=steps):
                return _at_times(process, length, schedule, *self._finite_times(steps))
        return _by_schedule(process, length, schedule, nodes)

    def _finite_times(self, number: int) -> tuple[Tensor, Tensor]:
        t, weight = self.objective.times((torch.arange(number, dtype=torch.float64) + 0.5) / number)
        return t, weight / number

    def log_p(self, subject: Subject) -> Float[Tensor, " sequences"] | None:
        """Return log p of what the objective trains: a chain of steps, left to right, or the reverse process."""
        process, blank = subject.model.process, torch.full((subject.length,), -1)
        match self.objective:
            case objectives.Autoregressive():
                return sample_distribution(LeftToRight(), subject.model, blank, None).log()
            case objectives.D3PM(steps=steps):
                model = copy.copy(subject.model)
                model.schedule = FULL_NOISE
                x = all_sequences(process.num_states, subject.length)
                is_clean = (x < process.vocab_size).all(-1)
                return sample_distribution(Ancestral(), model, blank, steps)[is_clean].log()
        return reverse_distribution(subject.model, process, subject.length).log()


def _prior_and_reconstruction(model: Any, length: int) -> Tensor:
    """Return these two terms of the bound for every sequence.  [§8]"""
    process: Process = model.process
    x_0 = all_sequences(process.vocab_size, length)
    first, last = model.schedule.sigma(torch.tensor([0.0, 1.0], dtype=torch.float64))
    prior = process.prior_kl(x_0, last.expand(len(x_0))).sum(-1)
    if not first > 0:
        return prior
    noise = _at_start(process, length, model.schedule)
    table = denoising_table(model, process, noise.x_t, first.expand(len(noise.x_t)))
    return prior + noise.mean(-at_token(table, noise.x_0).log().sum(-1))


@final
class FunctionLoss:
    """A user's function of some of `PARAMETERS`; see `audit.audit_function`."""

    is_claimed = True

    def __init__(self, function: Callable[..., Any], draws: int, entropy_only: bool) -> None:
        if draws < 100:
            raise ValueError(f"draws is {draws}; a standard error needs at least 100 draws per sequence")
        self.function, self.draws, self.entropy_only = function, draws, entropy_only
        self.name, self.takes = function.__name__, taken_parameters(function)
        self.schedules = SCHEDULES[:2] if "schedule" in self.takes else SCHEDULES[:1]

    def _call(self, subject: Subject, schedule: Schedule, **noise: Any) -> Tensor:
        """Return nats per sequence; raise AttributeError if the model lacks a method that the function calls."""
        model, x_0 = subject.model, noise["x_0"]
        available = {"model": model, "process": model.process, "schedule": schedule, **noise}
        try:
            with torch.no_grad():
                found = self.function(**{name: available[name] for name in self.takes})
        except Exception as error:
            methods = ("log_mean", "log_next", "log_conditional")
            if any(f"no attribute '{name}'" in str(error) and not hasattr(model, name) for name in methods):
                raise
            reason = describe_error(error, Path(self.function.__code__.co_filename))
            raise ValueError(f"{self.name} failed on {subject.name}: {reason}") from error
        if not isinstance(found, Tensor) or found.shape != x_0.shape[:1]:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise ValueError(f"{self.name} returned {got}; it must return nats per sequence, shape ({len(x_0)},)")
        for value, where in (("NaN", found.isnan()), ("−∞", found.isneginf())):
            if where.any():
                raise ValueError(f"{self.name} returned {value} for {subject.name}; a bound is a number for all models")
        return found.double()

    def accepts(self, subject: Subject) -> bool:
        """Try one sequence, and return whether the model has the methods that the function calls.

        A function that draws random numbers, but not from ``generator``, is rejected: its mean is not its value.
        """
        process, x_0 = subject.model.process, torch.zeros(64, subject.length, dtype=torch.long)
        x_t = x_0 if process.vocab_size == process.num_states else x_0 + process.vocab_size
        t = torch.full((64,), 0.5, dtype=torch.float64)
        try:
            first, second = (
                self._call(subject, FULL_NOISE, x_0=x_0, x_t=x_t, t=t, generator=torch.Generator()) for _ in range(2)
            )
        except AttributeError:
            return False
        if not torch.equal(first, second):
            raise ValueError(f"{self.name} returned different values when it was called again; take generator")
        return True

    def expected(self, subject: Subject, schedule: Schedule) -> Expected:
        """Return the mean over times and noise, over draws, or the value itself where there is no noise."""
        process, length = subject.model.process, subject.length
        if "generator" in self.takes:
            return self._draw(subject, schedule)
        has_noise = bool({"x_t", "t"} & {*self.takes})
        found = _integrate(
            lambda nodes: _by_schedule(process, length, schedule, nodes) if has_noise else _at_start(process, length),
            lambda noise: self._call(subject, schedule, x_0=noise.x_0, x_t=noise.x_t, t=noise.t),
        )
        if (found.error > MAX_ERROR).any():
            raise ValueError(f"{self.name} varies too fast in t ({subject.name}); take generator instead of x_t and t")
        return found

    def _draw(self, subject: Subject, schedule: Schedule) -> Expected:
        """Return the means of two halves of the draws, and the standard error of the second.

        The function is called for each half: whatever it does with the rows of a call, the halves are independent.
        """
        generator, half = torch.Generator().manual_seed(0), self.draws // 2
        rows = (row.expand(half, -1) for row in all_sequences(subject.model.process.vocab_size, subject.length))
        halves = ([self._call(subject, schedule, x_0=row, generator=generator) for _ in range(2)] for row in rows)
        found = torch.stack([torch.stack(pair) for pair in halves])
        mean, error = found.mean(-1), found[:, 1].std(-1) / half**0.5
        return Expected(mean[:, 0], error, mean[:, 1], is_exact=False)

    def log_p(self, subject: Subject) -> Float[Tensor, " sequences"] | None:
        """Return log p of the reverse process in continuous time."""
        if self.entropy_only:
            return None
        return reverse_distribution(subject.model, subject.model.process, subject.length).log()


def taken_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return which of `PARAMETERS` a function takes; reject one that needs others, or both kinds of noise."""
    what, parameters = function.__name__, inspect.signature(function).parameters
    required = [p.name for p in parameters.values() if p.default is p.empty]
    for name in required:
        if name not in PARAMETERS:
            raise ValueError(f"{what} takes {name!r}; a loss is called with some of {', '.join(PARAMETERS)}, by name")
    if "model" not in required:
        raise ValueError(f"{what} does not take 'model'; a bound on −log p of a model depends on the model")
    if "generator" in required and {"x_t", "t"} & {*required}:
        raise ValueError(f"{what} takes generator and x_t or t; take generator to draw all noise, or x_t and t")
    return tuple(name for name in PARAMETERS if name in parameters)


def describe_error(error: BaseException, path: Path) -> str:
    """Return an error as one line, with the line of the user's file where it arose."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f"{type(error).__name__}{f' (line {lines[-1]})' if lines else ''}: {error}"
