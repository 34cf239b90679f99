"""The expected value of a loss on every sequence of a small space: exactly where its noise can be enumerated.

An objective of this package is audited with the prior and reconstruction terms of the bound (§8); a function of a user
as it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from math import comb
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd import objectives, registry
from sedd.evaluation.audit.function import describe_error, taken_parameters
from sedd.evaluation.audit.models import AuditModel, build_audited_process
from sedd.exact import all_sequences, reverse_distribution, sample_distribution, transition_matrix
from sedd.likelihood import times_by_noise
from sedd.process import Process, at_token
from sedd.reverse import denoising_table
from sedd.samplers import Ancestral, LeftToRight
from sedd.schedule import Geometric, LogLinear, Schedule

FULL_NOISE = LogLinear(eps=1e-9)
"""At t = 1 nothing of the data is left, so that the model alone determines what is generated."""
SCHEDULES: Sequence[Schedule] = (FULL_NOISE, LogLinear(eps=0.5), Geometric(0.2, 6.0))
"""The second leaves half of all tokens clean, so that the prior term counts; the third begins with noise."""
NODES = ((32, 48), (256, 384))
"""Nodes of two quadratures, whose difference estimates the error, and of finer ones where it is above 1e-5 nats."""
MAX_ERROR = 0.01
"""Nats to which the mean of a function over t must be known for a verdict."""
METHODS = ("log_mean", "log_next", "log_conditional")


class Expected(NamedTuple):
    """The expected loss of every sequence of a space, in nats."""

    nats: Float[Tensor, " sequences"]
    error: Float[Tensor, " sequences"]
    """The error of the quadrature or, of random draws, one standard error."""
    second: Float[Tensor, " sequences"] | None = None
    """The same from independent draws; None: ``nats`` is exact."""


class AuditedLoss(ABC):
    """A loss that claims to bound −log p(x_0)."""

    name: str
    is_claimed: bool = True
    """Whether it claims to be a bound."""
    schedules: Sequence[Schedule]
    """The schedules that it is evaluated with."""

    @abstractmethod
    def accepts(self, audited: AuditModel) -> bool:
        """Return whether the model has the methods that the loss calls, and the loss is meant for such models."""

    @abstractmethod
    def expected(self, audited: AuditModel, schedule: Schedule) -> Expected:
        """Return the expected loss of every sequence."""

    @abstractmethod
    def log_p(self, audited: AuditModel) -> Float[Tensor, " sequences"] | None:
        """Return the log-probability with which the model generates each sequence, which the loss claims to bound."""


# Noise -----------------------------------------------------------------------------------------------------


class _Noise(NamedTuple):
    """Every pair of a clean and a noisy sequence at every time, with its probability."""

    x_0: Int[Tensor, "n L"]
    x_t: Int[Tensor, "n L"]
    t: Float[Tensor, " n"]
    weight: Float[Tensor, " n"]
    sequence: Int[Tensor, " n"]
    """The index of x_0."""

    def mean(self, values: Float[Tensor, " n"], count: int) -> Float[Tensor, " sequences"]:
        """Return the expectation of ``values`` for every clean sequence."""
        return torch.zeros(count, dtype=torch.float64).index_add(0, self.sequence, self.weight * values.double())


def _enumerate(process: Process, length: int, t: Tensor, weight: Tensor, p: "_Corruption") -> _Noise:
    """Enumerate noise at times t of these weights; ``p(x_t, x_0, t)`` is p(x_t | x_0) at every time."""
    x_t, x_0 = all_sequences(process.num_states, length), all_sequences(process.vocab_size, length)
    joint = weight[:, None, None] * p(x_t[:, None], x_0, t)
    time, noisy, clean = torch.nonzero(joint, as_tuple=True)
    return _Noise(x_0[clean], x_t[noisy], t[time], joint[time, noisy, clean], clean)


_Corruption = Callable[[Tensor, Tensor, Tensor], Tensor]


def _by_process(process: Process, sigma: Callable[[Tensor], Tensor]) -> _Corruption:
    """Return p(x_t | x_0) of the process at noise σ(t)."""
    return lambda x_t, x_0, t: transition_matrix(process, sigma(t))[:, x_t, x_0].prod(-1)


def _exactly_k(x_t: Tensor, x_0: Tensor, t: Tensor) -> Tensor:
    """Return p(x_t | x_0) where k = 1 + ⌊tL⌋ positions are masked, all subsets being equally likely."""
    length, masked = x_0.shape[-1], x_t > x_0.max()
    k = 1 + (t * length).long()[:, None, None]
    subsets = torch.tensor([float(comb(length, int(n))) for n in k]).double()[:, None, None]
    return ((masked | (x_t == x_0)).all(-1) & (masked.sum(-1) == k)).double() / subsets


def _by_schedule(audited: AuditModel, schedule: Schedule, nodes: int) -> _Noise:
    """Enumerate the noise of a schedule at the times of a quadrature."""
    return _cached_noise(audited.process, audited.length, schedule, nodes)


@cache
def _cached_noise(process: Process, length: int, schedule: Schedule, nodes: int) -> _Noise:
    return _enumerate(process, length, *_quadrature(nodes, schedule), _by_process(process, schedule.sigma))


@cache
def _quadrature(nodes: int, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Return times in (0, 1) and the weights of ∫ f dt, with more nodes at both ends of the noise."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    times = times_by_noise(torch.as_tensor((points + 1) / 2), schedule)
    return times.t, times.weight * torch.as_tensor(weights / 2)


def _integrate(noise: Callable[[int], _Noise], value: Callable[[_Noise], Tensor], count: int) -> Expected:
    """Return the mean of ``value``; its error is the difference of two quadratures."""
    for coarse, fine in NODES:
        with torch.no_grad():
            found, nats = (made.mean(value(made), count) for made in map(noise, (coarse, fine)))
        if (error := (nats - found).abs()).max() < 1e-5:
            break
    return Expected(nats, error)


# Objectives ------------------------------------------------------------------------------------------------


_ENUMERABLE = (
    objectives.Integral,
    objectives.LambdaDCE,
    objectives.AnyOrder,
    objectives.D3PM,
    objectives.Autoregressive,
)
"""Objectives whose times and noise `ObjectiveLoss` enumerates."""


@final
class ObjectiveLoss(AuditedLoss):
    """An objective by its name, with the prior and reconstruction terms that make a bound of it."""

    def __init__(self, name: str, process_name: str) -> None:
        self.name = name
        options = {"steps": 4} if name == "d3pm" else {}  # few, so that the chain is far from continuous time
        self.objective: objectives.Objective[Any] = registry.OBJECTIVES.build(name, **options)
        self.objective.check_process(build_audited_process(process_name, 2))
        if not isinstance(self.objective, _ENUMERABLE):
            raise ValueError(f"objective {name} has noise of its own; audit it as a function, FILE.py:FUNCTION")
        self.is_claimed, self.has_schedule = self.objective.is_bound, self.objective.has_schedule
        self.schedules = SCHEDULES if self.has_schedule else SCHEDULES[:1]

    def accepts(self, audited: AuditModel) -> bool:
        """Return whether the model has what the objective needs; one without a schedule needs a time-free model."""
        needs = self.objective.needs
        fits = needs is None or isinstance(audited.model, needs)
        return fits and (self.has_schedule or audited.is_time_free or self.name == "autoregressive")

    def expected(self, audited: AuditModel, schedule: Schedule) -> Expected:
        """Return the mean of the loss over its times and noise, plus prior and reconstruction."""
        count, model = audited.process.vocab_size**audited.length, audited.with_schedule(schedule)

        def loss(noise: _Noise) -> Tensor:
            return self.objective.loss(model, noise.x_t, noise.x_0, noise.t).sum(-1)

        diffusion = _integrate(lambda nodes: self._noise(audited, schedule, nodes), loss, count)
        return diffusion._replace(nats=diffusion.nats + self._other_terms(audited, schedule))

    def _noise(self, audited: AuditModel, schedule: Schedule, nodes: int) -> _Noise:
        """Enumerate the times and the noise of the objective; λ-DCE has those of the schedule with full noise."""
        built, process, length = self.objective, audited.process, audited.length
        if isinstance(built, objectives.Autoregressive):
            x_0 = all_sequences(process.vocab_size, length)
            return _Noise(x_0, x_0, torch.zeros(len(x_0)), torch.ones(len(x_0)).double(), torch.arange(len(x_0)))
        if isinstance(built, objectives.AnyOrder | objectives.D3PM):  # a finite number of times
            number, corruption = (
                (built.steps, _by_process(process, schedule.sigma))
                if isinstance(built, objectives.D3PM)
                else (length, _exactly_k)
            )
            t, weight = built.times((torch.arange(number, dtype=torch.float64) + 0.5) / number)
            return _enumerate(process, length, t, weight / number, corruption)
        return _by_schedule(audited, schedule, nodes)

    def _other_terms(self, audited: AuditModel, schedule: Schedule) -> Tensor:
        """Return the prior and reconstruction terms of every sequence.  [§8]"""
        process, length = audited.process, audited.length
        count = process.vocab_size**length
        if not self.has_schedule:
            return torch.zeros(count, dtype=torch.float64)
        first, last = schedule.sigma(torch.tensor([0.0, 1.0], dtype=torch.float64))
        x_0 = all_sequences(process.vocab_size, length)
        prior = process.prior_kl(x_0, last.expand(count)).sum(-1)
        if not first > 0:
            return prior
        once = torch.ones(1, dtype=torch.float64)
        noise = _enumerate(process, audited.length, 0 * once, once, _by_process(process, schedule.sigma))
        table = denoising_table(audited.model, process, noise.x_t, first.expand(len(noise.x_t)))
        return prior + noise.mean(-at_token(table, noise.x_0).log().sum(-1), count)

    def log_p(self, audited: AuditModel) -> Float[Tensor, " sequences"]:
        """Return log p of what the objective trains: a chain of steps, left to right, or the reverse process."""
        built, process, length = self.objective, audited.process, audited.length
        blank = torch.full((length,), -1)
        if isinstance(built, objectives.Autoregressive):
            return sample_distribution(LeftToRight(), audited.model, blank, None).log()
        if isinstance(built, objectives.D3PM):
            p = sample_distribution(Ancestral(), audited.with_schedule(FULL_NOISE), blank, built.steps)
            x = all_sequences(process.num_states, length)
            return p[(x < process.vocab_size).all(-1)].log()
        return reverse_distribution(audited.model, process, length).log()


# Functions -------------------------------------------------------------------------------------------------


@final
class FunctionLoss(AuditedLoss):
    """A function of a user: see `function.PARAMETERS` for what it may take.

    Args:
        draws: Random draws per sequence, for a function that takes ``generator``.
        entropy_only: Compare with the entropy alone, and not with the probabilities of the reverse process.
    """

    def __init__(
        self, function: Callable[..., Any], draws: int = 4000, entropy_only: bool = False, seed: int = 0
    ) -> None:
        if draws < 100:
            raise ValueError(f"draws is {draws}; a standard error needs at least 100 draws per sequence")
        self.function, self.draws, self.entropy_only, self.seed = function, draws, entropy_only, seed
        self.name, self.takes = function.__name__, taken_parameters(function)
        self.schedules = SCHEDULES[:2] if "schedule" in self.takes else SCHEDULES[:1]

    def _call(self, audited: AuditModel, schedule: Schedule, **noise: Any) -> Tensor:
        """Return nats per sequence; raise AttributeError if the model lacks a method that the function calls."""
        available = {"model": audited.model, "process": audited.process, "schedule": schedule, **noise}
        x_0, path = noise["x_0"], Path(self.function.__code__.co_filename)
        try:
            with torch.no_grad():
                found = self.function(**{name: available[name] for name in self.takes})
        except Exception as error:
            if any(f"no attribute '{name}'" in str(error) and not hasattr(audited.model, name) for name in METHODS):
                raise
            raise ValueError(f"{self.name} failed on {audited.name}: {describe_error(error, path)}") from error
        if not isinstance(found, Tensor) or found.shape != x_0.shape[:1]:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise ValueError(
                f"{self.name} returned {got} for x_0 of shape {tuple(x_0.shape)}; it must return nats per sequence, "
                f"shape ({len(x_0)},): sum over positions"
            )
        if found.isnan().any() or found.isneginf().any():
            value = "NaN" if found.isnan().any() else "−∞"
            raise ValueError(f"{self.name} returned {value} for {audited.name}; a bound is a number for every model")
        return found.double()

    def accepts(self, audited: AuditModel) -> bool:
        """Try one sequence, and return whether the model has the methods that the function calls.

        Raises:
            ValueError: The function draws random numbers, and not from ``generator``: its mean is not its value.
        """
        x_0 = torch.zeros(64, audited.length, dtype=torch.long)
        x_t = x_0 if audited.process.vocab_size == audited.process.num_states else x_0 + audited.process.vocab_size
        t = torch.full((64,), 0.5, dtype=torch.float64)
        try:
            first, second = (
                self._call(audited, FULL_NOISE, x_0=x_0, x_t=x_t, t=t, generator=torch.Generator()) for _ in range(2)
            )
        except AttributeError:
            return False
        if not torch.equal(first, second):
            raise ValueError(
                f"{self.name} returned other values when it was called again; take generator and draw all random "
                "numbers from it, or take x_t and t"
            )
        return True

    def expected(self, audited: AuditModel, schedule: Schedule) -> Expected:
        """Return the mean over times and noise, over draws, or the value itself where there is no noise."""
        x_0 = all_sequences(audited.process.vocab_size, audited.length)
        if "generator" in self.takes:
            return self._draw(audited, schedule, x_0)
        if not {"x_t", "t"} & {*self.takes}:
            nats = self._call(audited, schedule, x_0=x_0)
            return Expected(nats, torch.zeros_like(nats))

        found = _integrate(
            lambda nodes: _by_schedule(audited, schedule, nodes),
            lambda noise: self._call(audited, schedule, x_0=noise.x_0, x_t=noise.x_t, t=noise.t),
            len(x_0),
        )
        if (found.error > MAX_ERROR).any():
            raise ValueError(
                f"the mean of {self.name} over t is known to {found.error.max():.2g} nats only ({audited.name}): it "
                "varies too fast in t; take generator instead of x_t and t"
            )
        return found

    def _draw(self, audited: AuditModel, schedule: Schedule, x_0: Tensor) -> Expected:
        """Return the means of two halves of the draws, and the standard error of the second.

        The function is called for each half: whatever it does with the rows of a call, the halves are independent.
        """
        generator = torch.Generator().manual_seed(self.seed)
        half = self.draws // 2
        rows = (row.expand(half, -1) for row in x_0)
        halves = ([self._call(audited, schedule, x_0=row, generator=generator) for _ in range(2)] for row in rows)
        found = torch.stack([torch.stack(pair) for pair in halves])
        mean, error = found.mean(-1), found[:, 1].std(-1) / half**0.5
        return Expected(mean[:, 0], error, mean[:, 1])

    def log_p(self, audited: AuditModel) -> Float[Tensor, " sequences"] | None:
        """Return log p of the reverse process in continuous time."""
        return None if self.entropy_only else reverse_distribution(audited.model, audited.process, audited.length).log()
