"""Samplers that plan when each position is revealed before the network is called: first-hitting, orders.  [§9]"""

import math
from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from sedd import draws
from sedd.draws import CounterRNG
from sedd.parameterization import HasNoise
from sedd.samplers.loop import POSITION, STEP, Plan, Prompt, Rows, Sampler, Times, sigma_of_masked_fraction
from sedd.samplers.model import Sequences
from sedd.schedule import corruption_probability


@dataclass(frozen=True)
class PlannedSampler(Sampler, ABC):
    """A sampler of absorbing noise whose reveal times do not depend on the network: a subclass writes `plan`.

    Each network call advances every row by one event of its own, so no call is spent on a row in which nothing happens,
    and the head runs at revealed positions only. A time grid would call the network in every step.
    """

    supports_infinite_steps: ClassVar[bool] = True
    reveals_masks: ClassVar[bool] = True

    def advance(self, rows: Rows) -> Sequences:
        """Draw the positions of each row's next event; the host does not wait for the device."""
        x, sigma = rows.x, rows.now(rows.sigmas)
        return rows.model.draw_clean(rows.hidden(x, sigma), x, sigma, rows.events, rows.u)


@final
@dataclass(frozen=True)
class FirstHitting(PlannedSampler):
    """The first-hitting sampler: Tweedie's samples without the steps in which nothing happens.

    A mask is revealed in the step from t to s with probability (α_s − α_t)/(1 − α_t), α = e^−σ, whatever the network
    returns, so the step of each position is drawn first. Without a grid (``times`` empty) one position is revealed per
    event, and the samples have the model's distribution.

    Reference: Zheng et al. 2024, "Masked Diffusion Models are Secretly Time-Agnostic Masked Models and Exploit
    Inaccurate Categorical Sampling", arXiv 2409.02908.
    """

    order: ClassVar[float] = 1.0  # positions of one step are drawn independently; without a grid it is exact
    assumes: ClassVar[str] = "absorbing noise; a score's distribution of a mask is normalised, by definition"

    def reveal_probabilities(self, model: HasNoise, times: Times) -> Float[Tensor, " steps"]:
        """Return the probability that a position is revealed in each step: its share of the noise."""
        masked = corruption_probability(model.schedule.sigma(times))
        masked = torch.cat([masked[:-1], masked.new_zeros(1)])  # the last step reveals all that is left
        return -masked.diff() / masked[0]

    def plan(self, model: HasNoise, prompt: Prompt, times: Times, rng: CounterRNG) -> Plan:
        """Draw the step of each position by inversion, then rank the steps of each row."""
        if not len(times):
            return self._plan_without_grid(model, prompt, rng)
        u = rng(prompt.given.shape[-1])[..., 0]
        ends, last = self.reveal_probabilities(model, times).cumsum(0), len(times) - 2
        step = torch.searchsorted(ends, u.contiguous(), right=True).clamp_max(last)  # rounding may pass the end
        order = torch.where(prompt.blank, step, len(times)).sort(-1)
        rank = torch.nn.functional.pad(order.values.diff(dim=-1) > 0, (1, 0)).cumsum(-1)
        event = torch.where(prompt.blank, torch.zeros_like(step).scatter(-1, order.indices, rank), -1)
        first = torch.zeros_like(step).scatter(-1, rank, order.values).clamp_max(last)  # the step of each rank
        return Plan(model.schedule.sigma(times)[first], times[first], first + 1, event, rng(step.shape[-1], 0, STEP))

    def _plan_without_grid(self, model: HasNoise, prompt: Prompt, rng: CounterRNG) -> Plan:
        """Reveal position i when the masked share falls below 1 − u_i."""
        u = rng(prompt.given.shape[-1])[..., 0]
        top = corruption_probability(model.schedule.sigma(torch.ones((), dtype=torch.float64, device=u.device)))
        order = torch.where(prompt.blank, u, math.inf).sort(-1)
        event = torch.where(prompt.blank, order.indices.argsort(-1), -1)
        sigma = -torch.log1p((order.values.clamp_max(1) - 1) * top)
        place, count = torch.arange(event.shape[-1], device=u.device), prompt.blank.sum(-1, keepdim=True)
        left = (count - place) / count
        return Plan(sigma, left, (place + 1).expand_as(event), event, rng(event.shape[-1], 0, STEP))

    def expected_calls(self, model: HasNoise, times: Times, blanks: int) -> float:
        """Return Σ_k 1 − (1 − w_k)^blanks, which for equal steps is n(1 − (1 − 1/n)^blanks)."""
        if not len(times):
            return float(blanks)
        return float((1 - (1 - self.reveal_probabilities(model, times)) ** blanks).sum())


@final
@dataclass(frozen=True)
class Ordered(PlannedSampler):
    """Positions in an order, ``random`` (any-order), ``forward`` or ``backward``: one per call, or groups of them.

    One position per call is exact: for a consistent model every order gives the same distribution. There are as many
    groups as steps, if fewer than positions. The noise level is the one at which that fraction is masked on average.

    Reference: Hoogeboom et al. 2021, "Autoregressive Diffusion Models", arXiv 2110.02037.
    """

    order: ClassVar[float] = 1.0  # in the number of calls; exact where each call reveals one position
    assumes: ClassVar[str] = "absorbing noise; a score's distribution of a mask is normalised"
    direction: str = "random"
    """Order in which positions are revealed."""

    def __post_init__(self) -> None:
        if self.direction not in ("random", "forward", "backward"):
            raise ValueError(f"direction is {self.direction!r}; choose one of random, forward, backward")

    def plan(self, model: HasNoise, prompt: Prompt, times: Times, rng: CounterRNG) -> Plan:
        """Rank the open positions of each row, and divide them into as many groups as there are steps."""
        length = prompt.given.shape[-1]
        place = torch.arange(length, device=prompt.given.device, dtype=torch.float64).expand(prompt.given.shape)
        key = {"random": rng(length, event=POSITION)[..., 0], "forward": place, "backward": -place}[self.direction]
        rank = torch.where(prompt.blank, key, math.inf).argsort(-1).argsort(-1)
        count = prompt.blank.sum(-1, keepdim=True)
        groups = count.clamp_max(len(times) - 1) if len(times) else count
        event = torch.where(prompt.blank, rank * groups // count.clamp_min(1), -1)
        # the first rank of group g is ⌈g·count/groups⌉
        group = torch.arange(int(groups.max()), device=rank.device)
        done = (group * count + groups - 1) // groups.clamp_min(1)
        left = (count - done).clamp_min(0)
        sigma = sigma_of_masked_fraction(left / prompt.lengths[:, None], model.schedule)
        t = times[group].expand_as(sigma) if len(times) else left / count
        return Plan(sigma, t, (group + 1).expand_as(sigma), event, rng(length, 0, STEP))

    def expected_calls(self, model: HasNoise, times: Times, blanks: int) -> float:
        return float(min(blanks, len(times) - 1) if len(times) else blanks)


@final
@dataclass(frozen=True)
class LeftToRight(PlannedSampler):
    """One token after another from an autoregressive model, each given those before it; the beginning may be given."""

    order: ClassVar[float] = torch.inf
    assumes: ClassVar[str] = "an autoregressive model"
    reveals_masks: ClassVar[bool] = False
    is_causal: ClassVar[bool] = True

    def plan(self, model: HasNoise, prompt: Prompt, times: Times, rng: CounterRNG) -> Plan:
        """Draw the open positions of each row one by one; the grid is not used."""
        blank, length = prompt.blank, prompt.given.shape[-1]
        before_text = blank[:, :-1] & ~blank[:, 1:]
        if (before_text if prompt.valid is None else before_text & prompt.valid[:, 1:]).any():
            raise ValueError("an autoregressive model goes on from a beginning; it cannot fill a gap before a text")
        count, place = blank.sum(-1, keepdim=True), torch.arange(length, device=blank.device)
        event, left = torch.where(blank, blank.cumsum(-1) - 1, -1), (count - place) / count
        step = (blank.int().argmax(-1, keepdim=True) + place + 1).expand_as(event)
        return Plan(torch.zeros_like(left), left, step, event, rng(length))

    def advance(self, rows: Rows) -> Sequences:
        x, hidden = rows.x.clone(), rows.hidden(rows.x, rows.now(rows.sigmas))
        for at, _ in rows.model.chunks(rows.events):
            p = rows.model.model.log_next_at(hidden[at]).exp()
            x[at] = draws.sample_inverse_cdf(p, rows.u[at][:, 0])
        return x

    def expected_calls(self, model: HasNoise, times: Times, blanks: int) -> float:
        return float(blanks)
