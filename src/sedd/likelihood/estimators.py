"""Estimators of −log p(x_0), or of an upper bound on it, as a mean over draws.  [§6, §8]

A draw consists of inputs made from x_0 (a noisy or masked copy, a time, a position) and of the nats that the model
assigns to them. The inputs are a function of the draw's own random numbers, so any process can make them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd import tensors
from sedd.draws import CounterRNG
from sedd.likelihood.terms import BoundTerms, bound_terms, diffusion_nats, times_by_noise
from sedd.objectives import AnyOrder
from sedd.parameterization import CausalModel
from sedd.process import Process, at_token
from sedd.schedule import LowNoiseTimes, Schedule, Times


class Estimator(ABC):
    """−log p(x_0), or an upper bound on it, as a mean over draws."""

    is_exact: ClassVar[bool]
    """Whether the mean over all draws is the value itself; otherwise the draws are random, and more are better."""

    included: ClassVar[tuple[str, ...]]
    """The terms of the variational bound that it includes.  [§8]"""

    @abstractmethod
    def draws_of(self, length: int, draws: int) -> int:
        """Return how many draws a sequence of this length gets, where ``draws`` were requested."""

    def calls_per_draw(self, length: int) -> int:
        """Return how many sequences of this length the network evaluates for one draw."""
        return 1

    @abstractmethod
    def inputs(
        self, x_0: Int[Tensor, "b L"], index: Int[Tensor, " b"], u: Float[Tensor, " b"], rng: CounterRNG
    ) -> tuple[Tensor, ...]:
        """Make the inputs of one draw per row.

        Args:
            x_0: The sequences.
            index: The number of each draw among those of its sequence.
            u: Uniform numbers in (0, 1), from which times are made.
            rng: The random numbers of each row, from which noise is made.
        """

    @abstractmethod
    def nats(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> BoundTerms:
        """Evaluate one draw per row, in nats per sequence."""

    def control_variates(self, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> Float[Tensor, "b 2"]:
        """Return two measures of how many more tokens were changed than expected; at any u their expectation is 0.

        Both are 0 here, where nothing about a draw is known but its nats.
        """
        return torch.zeros(len(x_0), 2, dtype=torch.float64, device=x_0.device)

    @final
    def values(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> Float[Tensor, "b 5"]:
        """Return the three terms and the two control variates of one draw per row, in float64."""
        terms = torch.stack(self.nats(model, x_0, *inputs), -1)
        return torch.cat([terms.double(), self.control_variates(x_0, *inputs).double()], -1)


class MonteCarloEstimator(Estimator, ABC):
    """An estimator whose draws are random: each has its own time and noise."""

    is_exact: ClassVar[bool] = False

    def draws_of(self, length: int, draws: int) -> int:
        """Return the number of draws: as many as were requested."""
        return draws

    @abstractmethod
    def trend(self, u: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the expected nats as a function of u, up to a factor, if every changed token cost the same."""


def _change_rate(times: Times, schedule: Schedule) -> Float[Tensor, " n"]:
    """d(1 − e^−σ)/du: how fast tokens are replaced as u grows."""
    sigma, rate = schedule(times.t)
    return times.weight * rate * torch.exp(-sigma)


def _excess_changes(
    process: Process, schedule: Schedule, x_0: Tensor, x_t: Tensor, times: Times, count: int | Tensor
) -> Float[Tensor, "b 2"]:
    """changed/m − count, and −log m times it, both scaled by `_change_rate`; m is the probability that a token changes.

    A changed token costs about 1/m under absorbing noise and about −log m/m under uniform noise, whose ratios are that
    large. Both have expectation 0 for every model. Where m differs between tokens, the first is a sum over
    positions, and the second has the mean of m.
    """
    sigma, changed = schedule.sigma(times.t)[:, None], x_t != x_0
    token = x_0[:, :1] if process.has_fused_forms else x_0  # m is the same for every token
    m = 1 - process.transition(token, token, sigma)
    m = m.clamp_min(torch.finfo(m.dtype).tiny)  # without noise no token changes, and the rate is 0
    if process.has_fused_forms:
        changed = changed.sum(-1, keepdim=True)
    excess = _change_rate(times, schedule) * ((changed / m).sum(-1) - count)
    return torch.stack([excess, -m.mean(-1).log() * excess], -1)


def diffusion_only(nats: Float[Tensor, " b"]) -> BoundTerms:
    """Return a likelihood as terms of a bound: all of it is the first term."""
    return BoundTerms(nats, torch.zeros_like(nats), torch.zeros_like(nats))


@final
@dataclass(frozen=True)
class BoundEstimator(MonteCarloEstimator):
    """The variational bound (negative ELBO) with all three terms, integrated over t from 0 to 1.  [§8]"""

    included: ClassVar[tuple[str, ...]] = ("diffusion", "prior", "reconstruction")
    process: Process
    schedule: Schedule

    def trend(self, u: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """d(1 − e^−σ)/du."""
        return _change_rate(times_by_noise(u, self.schedule), self.schedule)

    def control_variates(self, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> Float[Tensor, "b 2"]:
        """Return the number of changed tokens of x_t minus its expectation."""
        x_t, _, t, weight, valid = inputs
        return _excess_changes(self.process, self.schedule, x_0, x_t, Times(t, weight), valid.sum(-1))

    def inputs(
        self,
        x_0: Int[Tensor, "b L"],
        index: Int[Tensor, " b"],
        u: Float[Tensor, " b"],
        rng: CounterRNG,
        valid: Bool[Tensor, "b L"] | None = None,
    ) -> tuple[Tensor, ...]:
        """x_t, the sequence with the schedule's noise at t = 0, the time, its weight, and ``valid``.

        Padding, where ``valid`` is False, stays without noise and does not count.
        """
        valid = torch.ones_like(x_0, dtype=torch.bool) if valid is None else valid
        times = times_by_noise(u, self.schedule)
        x_t, x_first = (
            self.process.corrupt_by(x_0, self.schedule.sigma(t), rng(x_0.shape[-1], event=event))
            for event, t in enumerate((times.t, torch.zeros_like(times.t)))
        )
        return *(torch.where(valid, x, x_0) for x in (x_t, x_first)), times.t, times.weight, valid

    def nats(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> BoundTerms:
        """The three terms."""
        x_t, x_first, t, weight, valid = inputs
        return bound_terms(model, self.process, self.schedule, x_0, x_t, x_first, Times(t, weight), valid)


@final
@dataclass(frozen=True)
class DiffusionTermEstimator(MonteCarloEstimator):
    """The diffusion term alone, as a mean over t in [t_min, 1]: what published tables report, below the bound.  [§8]"""

    included: ClassVar[tuple[str, ...]] = ("diffusion",)
    process: Process
    schedule: Schedule
    t_min: float

    def __post_init__(self) -> None:
        tensors.check_t_min(self.t_min)

    def trend(self, u: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """d(1 − e^−σ)/du."""
        return _change_rate(times_by_noise(u, self.schedule, self.t_min), self.schedule)

    def control_variates(self, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> Float[Tensor, "b 2"]:
        """Return the number of changed tokens of x_t minus its expectation."""
        x_t, t, weight = inputs
        return _excess_changes(self.process, self.schedule, x_0, x_t, Times(t, weight), x_0.shape[-1])

    def inputs(
        self, x_0: Int[Tensor, "b L"], index: Int[Tensor, " b"], u: Float[Tensor, " b"], rng: CounterRNG
    ) -> tuple[Tensor, ...]:
        """x_t, the time and its weight."""
        times = times_by_noise(u, self.schedule, self.t_min)
        x_t = self.process.corrupt_by(x_0, self.schedule.sigma(times.t), rng(x_0.shape[-1]))
        return x_t, times.t, times.weight / (1 - self.t_min)

    def nats(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> BoundTerms:
        """Denoising score entropy."""
        x_t, t, weight = inputs
        loss = diffusion_nats(model, self.process, self.schedule, x_0, x_t, t).sum(-1)
        return diffusion_only(weight.to(loss.dtype) * loss)


@final
@dataclass(frozen=True)
class AnyOrderEstimator(MonteCarloEstimator):
    """The mean of −log p over all orders of the tokens: a bound, for a denoiser under absorbing noise.  [§6]

    Reference: Ou et al. 2024, "Your Absorbing Discrete Diffusion Secretly Models the Conditional Distributions of Clean
    Data", arXiv 2406.03736.
    """

    included: ClassVar[tuple[str, ...]] = BoundEstimator.included
    process: Process

    def trend(self, u: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """dt/du."""
        return LowNoiseTimes()(u).weight

    def inputs(
        self, x_0: Int[Tensor, "b L"], index: Int[Tensor, " b"], u: Float[Tensor, " b"], rng: CounterRNG
    ) -> tuple[Tensor, ...]:
        """The sequence with exactly k tokens masked, the time that chose k, and its weight."""
        times, length = LowNoiseTimes()(u), x_0.shape[-1]
        k = 1 + torch.floor(times.t * length)
        rank = rng(length)[..., 0].argsort(-1).argsort(-1)
        return torch.where(rank < k[:, None], self.process.mask, x_0), times.t, times.weight

    def nats(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> BoundTerms:
        """L/k · −log p of the k masked tokens."""
        x_t, t, weight = inputs
        loss = AnyOrder().loss(model, x_t, x_0, t).sum(-1)
        return diffusion_only(weight.to(loss.dtype) * loss)


@final
@dataclass(frozen=True)
class FixedOrderEstimator(Estimator):
    """−Σ_j log p(x at o_j | x at o_1 … o_{j−1}) in one order o: exact, with one draw per token.  [§6]

    A denoiser under absorbing noise is an autoregressive model in every order, each with a likelihood of its own.
    """

    is_exact: ClassVar[bool] = True
    included: ClassVar[tuple[str, ...]] = BoundEstimator.included
    process: Process
    order: Callable[[int], Int[Tensor, " L"]]
    """The positions of a sequence of this length, in the order in which they are revealed."""

    def draws_of(self, length: int, draws: int) -> int:
        """Return the number of draws: one per token."""
        return length

    def inputs(
        self, x_0: Int[Tensor, "b L"], index: Int[Tensor, " b"], u: Float[Tensor, " b"], rng: CounterRNG
    ) -> tuple[Tensor, ...]:
        """The sequence with the later tokens of the order masked, and the position to predict."""
        order = self.order(x_0.shape[-1]).to(x_0.device)
        masked = order.argsort() >= index[:, None]
        return torch.where(masked, self.process.mask, x_0), order[index]

    def nats(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> BoundTerms:
        """L · −log p of one token: the mean over the draws is then the sum over tokens."""
        x_t, position = inputs
        length = x_0.shape[-1]
        masked = self.process.is_noisy(x_t).sum(-1)
        log_p = at_token(model.log_mean(x_t, -torch.log1p(-masked / (length + 1))), x_0)  # σ as in `objective.AnyOrder`
        return diffusion_only(-length * log_p.gather(-1, position[:, None]).squeeze(-1))


@final
@dataclass(frozen=True)
class AutoregressiveEstimator(Estimator):
    """−Σ_i log p(x_i | x_1 … x_{i−1}) of an autoregressive model: exact, with one draw."""

    is_exact: ClassVar[bool] = True
    included: ClassVar[tuple[str, ...]] = BoundEstimator.included

    def draws_of(self, length: int, draws: int) -> int:
        """Return the number of draws: one."""
        return 1

    def inputs(
        self,
        x_0: Int[Tensor, "b L"],
        index: Int[Tensor, " b"],
        u: Float[Tensor, " b"],
        rng: CounterRNG,
        valid: Bool[Tensor, "b L"] | None = None,
    ) -> tuple[Tensor, ...]:
        """``valid``: False at padding, which does not count."""
        return (torch.ones_like(x_0, dtype=torch.bool) if valid is None else valid,)

    def nats(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> BoundTerms:
        """−log p of every token given those before it."""
        return diffusion_only(-torch.where(inputs[-1], at_token(model.log_next(x_0), x_0), 0).sum(-1))


def default_estimator(model: Any) -> BoundEstimator | AutoregressiveEstimator:
    """Return the estimator of all terms: the exact value of an autoregressive model, else the bound."""
    if isinstance(model, CausalModel):
        return AutoregressiveEstimator()
    return BoundEstimator(model.process, model.schedule)
