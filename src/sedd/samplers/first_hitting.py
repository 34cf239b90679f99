"""Samplers of absorbing noise that plan when each position is revealed before the network is called.  [§9]"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.draws import CounterRNG
from sedd.parameterization import HasNoise
from sedd.samplers.loop import (
    POSITION,
    STEP,
    Plan,
    Prompt,
    Sampler,
    State,
    check_absorbing,
    initial_state,
    sigma_of_masked_fraction,
)
from sedd.samplers.model import SamplingModel
from sedd.schedule import corruption_probability


class RowOrder(NamedTuple):
    """Rows with the most events first, so that the rows with an event are always the first ones."""

    rows: Int[Tensor, " b"]
    inverse: Int[Tensor, " b"]
    """Where each row of the batch is in this order."""
    at: Int[Tensor, " n"]
    """Flat positions among these rows, in the order of their events."""
    events: list[tuple[int, slice]]
    """For each event the number of rows it happens in, and the part of `at` that it reveals."""

    @staticmethod
    def of(event: Int[Tensor, "b L"], calls: Int[Tensor, " b"]) -> "RowOrder":
        """Order rows by their number of calls, and positions by their events."""
        device, event, calls = event.device, event.cpu(), calls.cpu()
        rows = calls.argsort(descending=True, stable=True)
        event = event[rows].flatten()
        at = (event >= 0).nonzero().squeeze(-1)
        at = at[event[at].argsort(stable=True)]
        ends = torch.bincount(event[at]).cumsum(0).tolist()
        busy = [int((calls > k).sum()) for k in range(len(ends))]
        parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        return RowOrder(rows.to(device), rows.argsort().to(device), at.to(device), list(zip(busy, parts, strict=True)))


@dataclass(frozen=True)
class PlannedSampler(Sampler, ABC):
    """A sampler of absorbing noise whose reveal times do not depend on the network: a subclass writes `plan`.

    Each network call advances every row by one event of its own, so no call is spent on a row in which nothing happens,
    and the head runs at revealed positions only. A time grid would call the network in every step; that is why these
    samplers have a plan in place of a step.
    """

    def check(self, model: HasNoise) -> None:
        """Require masks."""
        check_absorbing(model.process)

    @abstractmethod
    def plan(self, model: HasNoise, prompt: Prompt, times: Float[Tensor, " n"], rng: CounterRNG) -> Plan:
        """Draw when each position is revealed."""

    @final
    def _states(
        self, model: SamplingModel, prompt: Prompt, times: Float[Tensor, " n"], rng: CounterRNG
    ) -> Iterator[State]:
        """Yield a state for every event."""
        state, plan = initial_state(model, prompt, rng), self.plan(model, prompt, times, rng)
        assert plan.event is not None
        yield state
        # tokens are drawn with the uniforms of step 0, which are not used otherwise: a position is revealed once
        u = rng(prompt.given.shape[-1], 0, STEP)
        reveal_step = torch.where(prompt.blank, plan.step.gather(-1, plan.event.clamp_min(0)), 0)
        order = RowOrder.of(plan.event, plan.calls)
        x, valid = state.x[order.rows], None if prompt.valid is None else prompt.valid[order.rows]
        flat, levels = x.flatten(), plan.sigma[order.rows]
        event = plan.event[order.rows].flatten()[order.at]
        sigma = levels.flatten()[order.at // x.shape[-1] * levels.shape[-1] + event]
        draws = model.plan_clean_draw(flat[order.at], sigma, u[order.rows].flatten(0, 1)[order.at])
        most = model.chunk_size(x.device)
        for step, (rows, part) in enumerate(order.events):  # from here on the host does not wait for the device
            hidden = model.compute_hidden(
                flat.view_as(x)[:rows], levels[:rows, step], None if valid is None else valid[:rows]
            )
            for start in range(part.start, part.stop, most):
                some = slice(start, min(start + most, part.stop))
                at = order.at[some]
                flat[at] = model.draw_clean(hidden.flatten(0, 1)[at], draws.part(some))
            yield State(flat.view_as(x)[order.inverse], torch.where(plan.event <= step, reveal_step, 0), step + 1)


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
    supports_infinite_steps: ClassVar[bool] = True

    def reveal_probabilities(self, model: HasNoise, times: Float[Tensor, " n"]) -> Float[Tensor, " steps"]:
        """Return the probability that a position is revealed in each step: its share of the noise."""
        masked = corruption_probability(model.schedule.sigma(times))
        masked = torch.cat([masked[:-1], masked.new_zeros(1)])  # the last step reveals all that is left
        return -masked.diff() / masked[0]

    def plan(self, model: HasNoise, prompt: Prompt, times: Float[Tensor, " n"], rng: CounterRNG) -> Plan:
        """Draw the step of each position by inversion, then rank the steps of each row."""
        u = rng(prompt.given.shape[-1])[..., 0]
        if not len(times):
            return self._plan_without_grid(model, prompt, u)
        sigma, ends = model.schedule.sigma(times), self.reveal_probabilities(model, times).cumsum(0)
        last = len(times) - 2
        step = torch.searchsorted(ends, u.contiguous(), right=True).clamp_max(last)  # rounding may pass the end
        event, first = _rank_steps(torch.where(prompt.blank, step, len(times)), prompt.blank)
        first = first.clamp_max(last)
        return Plan(sigma[first], times[first], torch.zeros_like(times[first]), first + 1, event)

    def _plan_without_grid(self, model: HasNoise, prompt: Prompt, u: Tensor) -> Plan:
        """Reveal position i when the masked share falls below 1 − u_i."""
        top = corruption_probability(model.schedule.sigma(torch.ones((), dtype=torch.float64, device=u.device)))
        order = torch.where(prompt.blank, u, math.inf).sort(-1)
        event = torch.where(prompt.blank, order.indices.argsort(-1), -1)
        sigma = -torch.log1p((order.values.clamp_max(1) - 1) * top)
        place, count = torch.arange(event.shape[-1], device=u.device), prompt.blank.sum(-1, keepdim=True)
        left = (count - place) / count
        return Plan(sigma, left, torch.zeros_like(left), (place + 1).expand_as(event), event)

    def expected_calls(self, model: HasNoise, times: Float[Tensor, " n"], blanks: int) -> float:
        """Return Σ_k 1 − (1 − w_k)^blanks, which for equal steps is n(1 − (1 − 1/n)^blanks)."""
        if not len(times):
            return float(blanks)
        return float((1 - (1 - self.reveal_probabilities(model, times)) ** blanks).sum())


def _rank_steps(step: Int[Tensor, "b L"], blank: Bool[Tensor, "b L"]) -> tuple[Tensor, Tensor]:
    """Return each open position's rank of its step among the steps of its row, and the step of each rank."""
    order = step.sort(-1)
    fresh = torch.nn.functional.pad(order.values.diff(dim=-1) > 0, (1, 0)).cumsum(-1)
    rank = torch.zeros_like(step).scatter(-1, order.indices, fresh)
    steps = torch.zeros_like(step).scatter(-1, fresh, order.values)
    return torch.where(blank, rank, -1), steps


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
    supports_infinite_steps: ClassVar[bool] = True
    direction: str = "random"
    """Order in which positions are revealed."""

    def __post_init__(self) -> None:
        if self.direction not in ("random", "forward", "backward"):
            raise ValueError(f"direction is {self.direction!r}; choose one of random, forward, backward")

    def plan(self, model: HasNoise, prompt: Prompt, times: Float[Tensor, " n"], rng: CounterRNG) -> Plan:
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
        return Plan(sigma, t, torch.zeros_like(t), (group + 1).expand_as(sigma), event)

    def expected_calls(self, model: HasNoise, times: Float[Tensor, " n"], blanks: int) -> float:
        """Return one call per group."""
        return float(min(blanks, len(times) - 1) if len(times) else blanks)
