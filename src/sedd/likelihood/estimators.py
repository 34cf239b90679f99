"""Estimators: −log p(x_0), or a bound on it, as the mean of looks at x_0.  [§6, §8]

A look shows the model something and asks what that costs. What it shows is a function of numbers of its own, so it may
be made anywhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.diffusion import check, objective
from sedd.diffusion.objective import DenoisingScoreEntropy
from sedd.diffusion.process import Absorbing, Process, at_token
from sedd.diffusion.rng import CounterRNG
from sedd.diffusion.schedule import Schedule, Times, lost
from sedd.likelihood.bound import Terms, early_noise, early_times, terms


class Estimator(ABC):
    """−log p(x_0), or a bound on it, as a mean over looks at x_0."""

    is_exact: ClassVar[bool]
    """Whether the mean over all looks is the value itself; else each look is a draw, and there may be any number."""

    included: ClassVar[tuple[str, ...]]
    """The terms of §8 that are in it."""

    @abstractmethod
    def looks(self, length: int, draws: int) -> int:
        """How many looks at a sequence there are."""

    @abstractmethod
    def show(
        self, x_0: Int[Tensor, "b L"], looks: Int[Tensor, " b"], u: Float[Tensor, " b"], chance: CounterRNG
    ) -> tuple[Tensor, ...]:
        """What looks of these numbers show: times are made of ``u`` in (0, 1), noise of the chance of each row."""

    @abstractmethod
    def cost(self, model: Any, x_0: Int[Tensor, "b L"], *shown: Tensor) -> Terms:
        """Nats for every row: a sequence, and what was made for a look at it."""


class Drawn(Estimator, ABC):
    """An estimate: every look is at a time and a noise of its own."""

    is_exact: ClassVar[bool] = False

    def looks(self, length: int, draws: int) -> int:
        """As many as are asked for."""
        return draws

    @abstractmethod
    def trend(self, u: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """How cost changes with u if every token that noise takes costs the same, up to a factor."""

    @abstractmethod
    def luck(self, x_0: Int[Tensor, "b L"], *shown: Tensor) -> Float[Tensor, "b 2"]:
        """By how much noise took more than was to be expected: twice, up to factors, and 0 in expectation at any u."""


def _noised(process: Process, x_0: Tensor, sigma: Tensor, u: Float[Tensor, "b L 2"]) -> Int[Tensor, "b L"]:
    """x_t given x_0, as `Process.corrupt` draws it: the first uniform says whether, the second what."""
    check.clean(x_0, process.vocab_size)
    return torch.where(u[..., 0] < lost(sigma)[:, None], process.limit(u[..., 1]), x_0)


def _taken(times: Times, schedule: Schedule) -> Float[Tensor, " n"]:
    sigma, rate = schedule(times.t)
    return times.weight * rate * torch.exp(-sigma)


def _excess(process: Process, schedule: Schedule, x_0: Tensor, x_t: Tensor, times: Times) -> Float[Tensor, "b 2"]:
    """With m the chance that a token changes: changed/m − L, and −log m times it; in proportion to what is taken.

    A changed token costs about 1/m under absorbing noise, and about −log m/m under uniform noise, whose ratios are so
    large. Both sums are 0 in expectation, whatever the model.
    """
    one = torch.zeros_like(times.t, dtype=torch.long)
    m = 1 - process.transition(one, one, schedule.sigma(times.t))  # the same for every token
    m = m.clamp_min(torch.finfo(m.dtype).tiny)  # at no noise nothing changes, and nothing is taken
    excess = _taken(times, schedule) * ((x_t != x_0).sum(-1) / m - x_0.shape[-1])
    return torch.stack([excess, -m.log() * excess], -1)


def _alone(nats: Float[Tensor, " b"]) -> Terms:
    return Terms(nats, torch.zeros_like(nats), torch.zeros_like(nats))


@final
@dataclass(frozen=True)
class Bound(Drawn):
    """The bound of §8, all of it, from t = 0 to 1."""

    included: ClassVar[tuple[str, ...]] = ("diffusion", "prior", "reconstruction")
    process: Process
    schedule: Schedule

    def trend(self, u: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """d(1 − e^−σ)/du."""
        return _taken(early_noise(u, self.schedule), self.schedule)

    def luck(self, x_0: Int[Tensor, "b L"], *shown: Tensor) -> Float[Tensor, "b 2"]:
        """Tokens changed."""
        x_t, _, t, weight = shown
        return _excess(self.process, self.schedule, x_0, x_t, Times(t, weight))

    def show(
        self, x_0: Int[Tensor, "b L"], looks: Int[Tensor, " b"], u: Float[Tensor, " b"], chance: CounterRNG
    ) -> tuple[Tensor, ...]:
        """x_t, x at the schedule's first noise, and the time."""
        times = early_noise(u, self.schedule)
        x_t, x_first = (
            _noised(self.process, x_0, self.schedule.sigma(t), chance(x_0.shape[-1], event=event))
            for event, t in enumerate((times.t, torch.zeros_like(times.t)))
        )
        return x_t, x_first, times.t, times.weight

    def cost(self, model: Any, x_0: Int[Tensor, "b L"], *shown: Tensor) -> Terms:
        """The three terms."""
        x_t, x_first, t, weight = shown
        valid = torch.ones_like(x_0, dtype=torch.bool)
        return terms(model, self.process, self.schedule, x_0, x_t, x_first, Times(t, weight), valid)


@final
@dataclass(frozen=True)
class Published(Drawn):
    """What published tables hold: the diffusion term alone, as a mean over t in [t_min, 1]. Below the bound.  [§8]"""

    included: ClassVar[tuple[str, ...]] = ("diffusion",)
    process: Process
    schedule: Schedule
    t_min: float

    def __post_init__(self) -> None:
        check.t_min(self.t_min)

    def trend(self, u: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """d(1 − e^−σ)/du."""
        return _taken(early_noise(u, self.schedule, self.t_min), self.schedule)

    def luck(self, x_0: Int[Tensor, "b L"], *shown: Tensor) -> Float[Tensor, "b 2"]:
        """Tokens changed."""
        x_t, t, weight = shown
        return _excess(self.process, self.schedule, x_0, x_t, Times(t, weight))

    def show(
        self, x_0: Int[Tensor, "b L"], looks: Int[Tensor, " b"], u: Float[Tensor, " b"], chance: CounterRNG
    ) -> tuple[Tensor, ...]:
        """x_t and the time."""
        times = early_noise(u, self.schedule, self.t_min)
        x_t = _noised(self.process, x_0, self.schedule.sigma(times.t), chance(x_0.shape[-1]))
        return x_t, times.t, times.weight / (1 - self.t_min)

    def cost(self, model: Any, x_0: Int[Tensor, "b L"], *shown: Tensor) -> Terms:
        """Denoising score entropy."""
        x_t, t, weight = shown
        loss = DenoisingScoreEntropy(self.process, self.schedule).loss(model, x_t, x_0, t).sum(-1)
        return _alone(weight.to(loss.dtype) * loss)


@final
@dataclass(frozen=True)
class AnyOrder(Drawn):
    """The mean over all orders of the likelihood in one order: a bound, for a denoiser under absorbing noise.  [§6]"""

    included: ClassVar[tuple[str, ...]] = Bound.included
    process: Absorbing

    def trend(self, u: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """dt/du."""
        return early_times(u).weight

    def luck(self, x_0: Int[Tensor, "b L"], *shown: Tensor) -> Float[Tensor, "b 2"]:
        """None: exactly k tokens are masked."""
        return torch.zeros(len(x_0), 2, dtype=torch.float64, device=x_0.device)

    def show(
        self, x_0: Int[Tensor, "b L"], looks: Int[Tensor, " b"], u: Float[Tensor, " b"], chance: CounterRNG
    ) -> tuple[Tensor, ...]:
        """x with exactly k tokens masked, and the time that picked k."""
        times, length = early_times(u), x_0.shape[-1]
        k = 1 + torch.floor(times.t * length)
        rank = chance(length)[..., 0].argsort(-1).argsort(-1)
        return torch.where(rank < k[:, None], self.process.mask, x_0), times.t, times.weight

    def cost(self, model: Any, x_0: Int[Tensor, "b L"], *shown: Tensor) -> Terms:
        """L/k · −log p of the k masked tokens."""
        x_t, t, weight = shown
        loss = objective.AnyOrder(self.process).loss(model, x_t, x_0, t).sum(-1)
        return _alone(weight.to(loss.dtype) * loss)


@final
@dataclass(frozen=True)
class OneOrder(Estimator):
    """−Σ_j log p(x at o_j | x at o_1 … o_{j−1}): exact, by a look for each token of a sequence.  [§6]

    A denoiser that reads masks is an autoregressive model in every order o, each with a likelihood of its own.
    """

    is_exact: ClassVar[bool] = True
    included: ClassVar[tuple[str, ...]] = Bound.included
    process: Absorbing
    order: Callable[[int], Int[Tensor, " L"]]
    """Which position comes first, second … in a sequence of this length."""

    def looks(self, length: int, draws: int) -> int:
        """One a token."""
        return length

    def show(
        self, x_0: Int[Tensor, "b L"], looks: Int[Tensor, " b"], u: Float[Tensor, " b"], chance: CounterRNG
    ) -> tuple[Tensor, ...]:
        """x with what comes after masked, and the position that comes now."""
        order = self.order(x_0.shape[-1])
        hidden = order.argsort() >= looks[:, None]
        return torch.where(hidden, self.process.mask, x_0), order[looks]

    def cost(self, model: Any, x_0: Int[Tensor, "b L"], *shown: Tensor) -> Terms:
        """L · −log p of one token: the mean over the looks is then their sum."""
        x_t, position = shown
        length = x_0.shape[-1]
        masked = self.process.unknown(x_t).sum(-1)
        log_p = at_token(model.log_mean(x_t, -torch.log1p(-masked / (length + 1))), x_0)  # σ as in `objective.AnyOrder`
        return _alone(-length * log_p.gather(-1, position[:, None]).squeeze(-1))


@final
@dataclass(frozen=True)
class LeftToRight(Estimator):
    """−Σ_i log p(x_i | x_1 … x_{i−1}) of an autoregressive model: exact, in one look."""

    is_exact: ClassVar[bool] = True
    included: ClassVar[tuple[str, ...]] = Bound.included

    def looks(self, length: int, draws: int) -> int:
        """One."""
        return 1

    def show(
        self, x_0: Int[Tensor, "b L"], looks: Int[Tensor, " b"], u: Float[Tensor, " b"], chance: CounterRNG
    ) -> tuple[Tensor, ...]:
        """Nothing: the model reads x_0."""
        return ()

    def cost(self, model: Any, x_0: Int[Tensor, "b L"], *shown: Tensor) -> Terms:
        """−log p of every token given those before it."""
        return _alone(-at_token(model.log_next(x_0), x_0).sum(-1))
