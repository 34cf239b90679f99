"""Noise schedules, and the distribution of training times.

A schedule gives the total noise σ(t) and its rate σ'(t) for t in [0, 1]; t = 0 is data, t = 1 is noise.  [§2]
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from sedd import tensors
from sedd.draws import uniforms
from sedd.tensors import PerSequence


class NoiseLevel(NamedTuple):
    """Total noise and its rate at one time."""

    sigma: PerSequence
    rate: PerSequence


class Schedule(ABC):
    """Total noise σ(t), its derivative σ'(t), and the inverse t(σ)."""

    @abstractmethod
    def sigma(self, t: PerSequence) -> PerSequence: ...

    @abstractmethod
    def rate(self, t: PerSequence) -> PerSequence: ...

    @abstractmethod
    def _inverse(self, sigma: Tensor) -> Tensor: ...

    def t(self, sigma: PerSequence) -> PerSequence:
        """Return the time at which the total noise is ``sigma``."""
        first, last = self.sigma(torch.tensor([0.0, 1.0], dtype=sigma.dtype)).tolist()
        allowed = f"it must lie between {first:g} and {last:g}"
        tensors.check_range(sigma, first * (1 - 1e-5), last * (1 + 1e-5), "sigma is {}; " + allowed)
        return self._inverse(sigma).clamp(0, 1)  # rounding may pass an end

    def __call__(self, t: PerSequence) -> NoiseLevel:
        """Return total noise and rate at time ``t``."""
        tensors.check_times(t)
        return NoiseLevel(self.sigma(t), self.rate(t))


def corruption_probability(sigma: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return 1 − e^−σ, the probability that noise has replaced a token."""
    return -torch.expm1(-sigma)


def _sigma(replaced: PerSequence, unchanged: PerSequence) -> PerSequence:
    """Return σ = −log(unchanged) from the more precise of two probabilities that sum to 1."""
    return torch.where(replaced < 0.5, -torch.log1p(-replaced), -torch.log(unchanged))


def _check_eps(eps: float) -> None:
    if not 0 < eps < 1:
        raise ValueError(f"eps is {eps}; it must lie between 0 and 1, or σ(1) is infinite or there is no noise")


@final
@dataclass(frozen=True)
class LogLinear(Schedule):
    """Log-linear noise: e^−σ = 1 − (1 − ε)t, the probability of no change (Lou et al. 2024, arXiv 2310.16834).  [§2]"""

    eps: float = 1e-3
    """Probability ε that a token is unchanged at t = 1."""

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def sigma(self, t: PerSequence) -> PerSequence:
        return _sigma((1 - self.eps) * t, self._unchanged(t))

    def rate(self, t: PerSequence) -> PerSequence:
        return (1 - self.eps) / self._unchanged(t)

    def _inverse(self, sigma: Tensor) -> Tensor:
        return corruption_probability(sigma) / (1 - self.eps)

    def _unchanged(self, t: Tensor) -> Tensor:
        return (1 - t) + self.eps * t  # 1 − t is exact near t = 1, where 1 − (1 − ε)t would cancel


@final
@dataclass(frozen=True)
class Geometric(Schedule):
    """Geometric noise: σ = lo^(1−t) · hi^t, not 0 at t = 0 (Lou et al. 2024, arXiv 2310.16834).  [§2]"""

    lo: float = 1e-4
    """Total noise at t = 0."""
    hi: float = 20.0
    """Total noise at t = 1."""

    def __post_init__(self) -> None:
        if not 0 < self.lo < self.hi < math.inf:
            raise ValueError(f"lo is {self.lo} and hi is {self.hi}; they must satisfy 0 < lo < hi")

    def sigma(self, t: PerSequence) -> PerSequence:
        return torch.exp((1 - t) * math.log(self.lo) + t * math.log(self.hi))

    def rate(self, t: PerSequence) -> PerSequence:
        return self.sigma(t) * math.log(self.hi / self.lo)

    def _inverse(self, sigma: Tensor) -> Tensor:
        return torch.log(sigma / self.lo) / math.log(self.hi / self.lo)


@final
@dataclass(frozen=True)
class Cosine(Schedule):
    """Cosine noise: a token is unchanged with probability e^−σ = ε + (1 − ε)·cos(πt/2).  [§2]"""

    eps: float = 1e-3
    """Probability ε that a token is unchanged at t = 1."""

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def sigma(self, t: PerSequence) -> PerSequence:
        """σ = −log(ε + (1 − ε)·cos(πt/2)), where 1 − cos(πt/2) = 2 sin²(πt/4)."""
        return _sigma((1 - self.eps) * 2 * torch.sin(math.pi / 4 * t) ** 2, self._unchanged(t))

    def rate(self, t: PerSequence) -> PerSequence:
        return (1 - self.eps) * (math.pi / 2) * torch.sin(math.pi / 2 * t) / self._unchanged(t)

    def _inverse(self, sigma: Tensor) -> Tensor:
        """t = (4/π)·asin √((1 − e^−σ) / (2(1 − ε)))."""
        return 4 / math.pi * torch.asin(torch.sqrt(corruption_probability(sigma) / (2 * (1 - self.eps))))

    def _unchanged(self, t: Tensor) -> Tensor:
        return self.eps + (1 - self.eps) * torch.sin(math.pi / 2 * (1 - t))  # cos(πt/2), precise near t = 1


@final
@dataclass(frozen=True)
class Polynomial(Schedule):
    """Polynomial noise: a token is unchanged with probability e^−σ = 1 − (1 − ε)·t^power; power 1 is `LogLinear`."""

    power: float = 2.0
    """Exponent of t; the larger it is, the later tokens are replaced."""
    eps: float = 1e-3
    """Probability ε that a token is unchanged at t = 1."""

    def __post_init__(self) -> None:
        _check_eps(self.eps)
        if not 1 <= self.power < math.inf:
            raise ValueError(f"power is {self.power}; it must be 1 or more, or the rate at t = 0 is infinite")

    def sigma(self, t: PerSequence) -> PerSequence:
        return _sigma((1 - self.eps) * t**self.power, self._unchanged(t))

    def rate(self, t: PerSequence) -> PerSequence:
        return (1 - self.eps) * self.power * t ** (self.power - 1) / self._unchanged(t)

    def _inverse(self, sigma: Tensor) -> Tensor:
        return (corruption_probability(sigma) / (1 - self.eps)) ** (1 / self.power)

    def _unchanged(self, t: Tensor) -> Tensor:
        return -torch.expm1(self.power * torch.log(t)) + self.eps * t**self.power  # 1 − t^power, precise at 1


class Times(NamedTuple):
    """Sampled times and their importance weights 1/density: E[weight · f(t)] = ∫ f(t) dt."""

    t: PerSequence
    weight: PerSequence


TimeSampler = Callable[..., Times]
"""A distribution of times on [t_min, 1]: called as ``(u, t_min=0.0)``, it maps uniforms to times and their weights."""


def stratified(count: int, generator: torch.Generator) -> Float[Tensor, " count"]:
    """Draw one point in each of ``count`` equal parts of (0, 1), in random order (stratified sampling).

    Each point alone is uniform; together they are evenly spread, which reduces the variance of their mean.
    """
    order = torch.randperm(count, generator=generator, device=generator.device)
    return (order + uniforms((count,), generator)) / count


@final
@dataclass(frozen=True)
class UniformTimes:
    """Times uniform on [t_min, 1]."""

    def __call__(self, u: PerSequence, t_min: float = 0.0) -> Times:
        return Times(t=t_min + (1 - t_min) * u, weight=torch.full_like(u, 1 - t_min))


@final
@dataclass(frozen=True)
class LowNoiseTimes:
    """Times of density 1/(2√t), more frequent at low noise, where the loss of one masked token is weighted by 1/t.

    With uniform times the variance of a sequence's loss diverges as t → 0; with these it is finite.
    """

    def __call__(self, u: PerSequence, t_min: float = 0.0) -> Times:
        return Times(t=t_min + (1 - t_min) * u**2, weight=(1 - t_min) * 2 * u)


@final
class ImportanceTimes:
    """Importance-sampled times: a density that is constant on equal parts of [t_min, 1].

    The weights keep the mean of a loss unchanged. Its variance is least when the masses of the parts are proportional
    to the root mean square of the loss in each, which `fit` measures. Reference: Nichol and Dhariwal 2021,
    arXiv 2102.09672.
    """

    def __init__(self, masses: Float[Tensor, " parts"]) -> None:
        if masses.numel() < 1 or not ((masses > 0) & masses.isfinite()).all():
            raise ValueError(f"the masses are {masses.tolist()}; each part of [0, 1] needs a finite mass above 0")
        self.masses = masses.double() / masses.double().sum()

    @classmethod
    def fit(
        cls, t: Float[Tensor, " n"], losses: Float[Tensor, " n"], parts: int = 32, t_min: float = 0.0
    ) -> "ImportanceTimes":
        """Fit the masses to unweighted losses at times t; no part gets less than a tenth of the average mass."""
        tensors.check_times(t)
        if parts < 1:
            raise ValueError(f"parts is {parts}; there must be at least 1")
        part = ((t - t_min) / (1 - t_min) * parts).long().clamp(0, parts - 1)
        count = torch.bincount(part, minlength=parts)
        square = torch.bincount(part, losses.detach().double() ** 2, minlength=parts)
        mean = square.sum() / count.sum()
        root = torch.where(count > 0, square / count.clamp_min(1), mean).sqrt()  # parts without samples get the mean
        return cls(root.clamp_min(root.mean() / 10) if mean > 0 else torch.ones_like(root))

    def __call__(self, u: PerSequence, t_min: float = 0.0) -> Times:
        masses = self.masses.to(u)
        ends = masses.cumsum(0)
        part = torch.searchsorted(ends, u.clamp_max(1 - 1e-12) * ends[-1], right=True).clamp_max(len(masses) - 1)
        inside = (u - (ends[part] - masses[part])) / masses[part]
        share = (part + inside.clamp(0, 1)) / len(masses)  # rounding may step over an end
        return Times(t=t_min + (1 - t_min) * share, weight=(1 - t_min) / (masses[part] * len(masses)))


def bell_times(parts: int = 64) -> ImportanceTimes:
    """Return times of density proportional to 0.3 + 4t(1 − t), constant on each of ``parts`` equal parts.

    Half-masked sequences, which teach most, are more frequent, and no weight is above 3.3.
    """
    t = (torch.arange(parts, dtype=torch.float64) + 0.5) / parts
    return ImportanceTimes(0.3 + 4 * t * (1 - t))
