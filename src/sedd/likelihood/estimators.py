"""Estimators of −log p(x_0), or of an upper bound on it, as a mean over draws.  [§6, §8]

The variational bound (ELBO) is −log p(x_0) ≤ diffusion + prior + reconstruction, each an expectation over noise (Lou et
al. 2024, arXiv 2310.16834).

A draw consists of inputs made from x_0 (a noisy or masked copy, a time, a position) and of the nats that the model
assigns to them. The inputs are a function of the draw's own random numbers, so any process can make them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.divergence import score_entropy
from sedd.draws import CounterRNG
from sedd.objectives import AnyOrder, weighted
from sedd.parameterization import CausalModel
from sedd.process import Process, at_token
from sedd.reverse import denoising_table
from sedd.schedule import LowNoiseTimes, Schedule, Times


def times_by_noise(u: Float[Tensor, "*b"], schedule: Schedule, t_min: float = 0.0) -> Times:
    """Map uniform u to times at which σ/(1 + σ) grows as u³, from t_min to 1; the weights are 1/density.

    The noise levels are then the same for every schedule, low noise being the most frequent. At low noise one changed
    token has a loss of about 1/σ. With u² the variance would be smallest, but so much of it would lie in rare large
    losses that a small number of draws misses it. At high noise a wrong score costs the same at every σ, and 1 − e^−σ
    instead of σ/(1 + σ) would hardly ever draw a time there.
    """
    ends = schedule.sigma(torch.tensor([t_min, 1.0], dtype=u.dtype, device=u.device))
    first, last = ends / (1 + ends)
    share = first + (last - first) * u**3
    sigma = (share / (1 - share)).clamp(*ends)  # rounding may pass an end
    t = schedule.t(sigma)
    return Times(t=t, weight=3 * (last - first) * u**2 * (1 + sigma) ** 2 / schedule.rate(t))


class BoundTerms(NamedTuple):
    """The terms of the variational bound, in nats per sequence; their sum estimates an upper bound on −log p(x_0)."""

    diffusion: Float[Tensor, "*b"]
    prior: Float[Tensor, "*b"]
    reconstruction: Float[Tensor, "*b"]

    @property
    def total(self) -> Float[Tensor, "*b"]:
        """The bound itself: the sum of the terms."""
        return self.diffusion + self.prior + self.reconstruction


def diffusion_only(nats: Float[Tensor, " b"]) -> BoundTerms:
    """Return a likelihood as terms of a bound: all of it is the first term."""
    return BoundTerms(nats, torch.zeros_like(nats), torch.zeros_like(nats))


Inputs = tuple[Tensor, ...]


class Draw(NamedTuple):
    """What the inputs of one draw per row are made from."""

    x_0: Int[Tensor, "b L"]
    number: Int[Tensor, " b"]  # of each draw among those of its sequence
    u: Float[Tensor, " b"]  # uniform numbers in (0, 1), from which times are made
    rng: CounterRNG  # from which noise is made
    valid: Bool[Tensor, "b L"] | None = None  # False at padding, which has no noise and does not count; None: none


class Estimator(ABC):
    """−log p(x_0), or an upper bound on it, as a mean over draws; by default of a random time and noise each."""

    is_exact: ClassVar[bool] = False
    """Whether the mean over all draws is the value itself; otherwise the draws are random, and more are better."""
    included: ClassVar[tuple[str, ...]] = BoundTerms._fields
    """The terms of the variational bound that it includes.  [§8]"""

    def draws_of(self, length: int, draws: int) -> int:
        """Return how many draws a sequence of this length gets, where ``draws`` were requested."""
        return draws

    def calls_per_draw(self, length: int) -> int:
        """Return how many sequences of this length the network evaluates for one draw."""
        return 1

    @abstractmethod
    def inputs(self, draw: Draw) -> Inputs:
        """Make the inputs of one draw per row."""

    @abstractmethod
    def nats(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> BoundTerms:
        """Evaluate one draw per row, in nats per sequence."""

    def trend(self, u: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Return the expected nats as a function of u, up to a factor, if every changed token cost the same."""
        return torch.zeros_like(u)

    def control_variates(self, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> Float[Tensor, "b 2"]:
        """Return two measures of how many more tokens were changed than expected; at any u their expectation is 0."""
        return torch.zeros(len(x_0), 2, dtype=torch.float64, device=x_0.device)


def _change_rate(times: Times, schedule: Schedule) -> Float[Tensor, "*n"]:
    """d(1 − e^−σ)/du: how fast tokens are replaced as u grows."""
    sigma, rate = schedule(times.t)
    return times.weight * rate * torch.exp(-sigma)


@dataclass(frozen=True)
class BoundEstimator(Estimator):
    """The variational bound (negative ELBO) with all three terms, integrated over t from 0 to 1.  [§8]"""

    process: Process
    schedule: Schedule
    t_min: float = field(default=0.0, init=False)

    def trend(self, u: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """d(1 − e^−σ)/du."""
        return _change_rate(times_by_noise(u, self.schedule, self.t_min), self.schedule)

    def inputs(self, draw: Draw) -> Inputs:
        """x_t, the sequence with the noise at t = 0 where it is used, the time, its weight, and ``valid``."""
        x_0, _, u, rng, valid = draw
        valid = torch.ones_like(x_0, dtype=torch.bool) if valid is None else valid
        times, length, x_first = times_by_noise(u, self.schedule, self.t_min), x_0.shape[-1], x_0
        x_t = self.process.corrupt_by(x_0, self.schedule.sigma(times.t), rng(length))
        if "reconstruction" in self.included:
            first = self.schedule.sigma(torch.zeros_like(times.t))
            x_first = self.process.corrupt_by(x_0, first, rng(length, event=1))
        weight = times.weight / (1 - self.t_min)  # published numbers are means over t
        return torch.where(valid, x_t, x_0), torch.where(valid, x_first, x_0), times.t, weight, valid

    def _diffusion(self, model: Any, x_0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """σ'·(score entropy) at every position."""
        sigma, rate = self.schedule(t)
        return weighted(rate, self.process.denoising(score_entropy, model(x_t, sigma), x_t, x_0, sigma))

    def nats(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> BoundTerms:
        """Return the terms from one noisy copy of each sequence."""
        x_t, x_first, t, weight, valid = inputs
        ends = self.schedule.sigma(torch.tensor([0.0, 1.0], dtype=torch.float64, device=x_0.device))
        diffusion = weighted(weight, self._diffusion(model, x_0, x_t, t))
        prior = self.process.prior_kl(x_0, ends[1].expand(len(x_0)))
        reconstruction = torch.zeros_like(diffusion)
        if ends[0] > 0:
            first = ends[0].to(diffusion.dtype).expand(len(x_0))
            table = denoising_table(model, self.process, x_first, first)
            reconstruction = -at_token(table, x_0).clamp_min(1e-30).log()
        terms = (torch.where(valid, term, 0).sum(-1) for term in (diffusion, prior, reconstruction))
        return BoundTerms(*(term.to(diffusion.dtype) for term in terms))

    def control_variates(self, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> Float[Tensor, "b 2"]:
        """changed/m − count, and −log m times it, both scaled by `_change_rate`; m: the probability of a change.

        A changed token costs about 1/m under absorbing noise and about −log m/m under uniform noise, whose ratios are
        that large. Both have expectation 0 for every model. Where m differs between tokens, the first is a sum over
        positions, and the second has the mean of m.
        """
        x_t, _, t, weight, valid = inputs
        sigma, changed = self.schedule.sigma(t)[:, None], x_t != x_0
        token = x_0[:, :1] if self.process.has_fused_forms else x_0  # m is the same for every token
        m = 1 - self.process.transition(token, token, sigma)
        m = m.clamp_min(torch.finfo(m.dtype).tiny)  # without noise no token changes, and the rate is 0
        if self.process.has_fused_forms:
            changed = changed.sum(-1, keepdim=True)
        excess = _change_rate(Times(t, weight), self.schedule) * ((changed / m).sum(-1) - valid.sum(-1))
        return torch.stack([excess, -m.mean(-1).log() * excess], -1)


@final
@dataclass(frozen=True)
class DiffusionTermEstimator(BoundEstimator):
    """The diffusion term alone, as a mean over t in [t_min, 1]: what published tables report, below the bound.  [§8]"""

    included: ClassVar[tuple[str, ...]] = ("diffusion",)
    t_min: float = 0.0

    def nats(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> BoundTerms:
        x_t, _, t, weight, _ = inputs
        loss = self._diffusion(model, x_0, x_t, t).sum(-1)
        return diffusion_only(weight.to(loss.dtype) * loss)


@final
@dataclass(frozen=True)
class AnyOrderEstimator(Estimator):
    """The mean of −log p over all orders, a bound for a denoiser of masks (Ou et al. 2024, arXiv 2406.03736).  [§6]"""

    process: Process

    def trend(self, u: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """dt/du."""
        return LowNoiseTimes()(u).weight

    def inputs(self, draw: Draw) -> Inputs:
        times, length = LowNoiseTimes()(draw.u), draw.x_0.shape[-1]
        k = 1 + torch.floor(times.t * length)
        rank = draw.rng(length)[..., 0].argsort(-1).argsort(-1)
        return torch.where(rank < k[:, None], self.process.mask, draw.x_0), times.t, times.weight

    def nats(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> BoundTerms:
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
    process: Process
    order: Callable[[int], Int[Tensor, " L"]]
    """The positions of a sequence of this length, in the order in which they are revealed."""

    def draws_of(self, length: int, draws: int) -> int:
        return length

    def inputs(self, draw: Draw) -> Inputs:
        order = self.order(draw.x_0.shape[-1]).to(draw.x_0.device)
        masked = order.argsort() >= draw.number[:, None]
        return torch.where(masked, self.process.mask, draw.x_0), order[draw.number]

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

    def draws_of(self, length: int, draws: int) -> int:
        return 1

    def inputs(self, draw: Draw) -> Inputs:
        """``valid``: False at padding, which does not count."""
        return (torch.ones_like(draw.x_0, dtype=torch.bool) if draw.valid is None else draw.valid,)

    def nats(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> BoundTerms:
        return diffusion_only(-torch.where(inputs[-1], at_token(model.log_next(x_0), x_0), 0).sum(-1))


def default_estimator(model: Any) -> BoundEstimator | AutoregressiveEstimator:
    """Return the estimator of all terms: the exact value of an autoregressive model, else the bound."""
    if isinstance(model, CausalModel):
        return AutoregressiveEstimator()
    return BoundEstimator(model.process, model.schedule)
