"""Samplers that go from event to event: who is revealed when is known before the network says anything."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd import exact
from sedd.diffusion.reverse import last_step
from sedd.diffusion.rng import CounterRNG
from sedd.diffusion.schedule import lost
from sedd.sampling import enumeration
from sedd.sampling.base import SITE, STEP, Prompt, Sampler, State, check_absorbing, noise_of
from sedd.sampling.caching import Asked, show, to_show


class Plan(NamedTuple):
    """Who is revealed when: everything about a run but the tokens."""

    event: Int[Tensor, "b L"]
    """The how-manieth event of its row reveals a position; −1: none, it is given."""
    sigma: Float[Tensor, "b events"]
    """What the network is told at each event of a row."""
    when: Int[Tensor, "b L"]
    """The step that stands for the event, for those who watch."""

    @property
    def calls(self) -> Int[Tensor, " b"]:
        """How often the network will run on each row."""
        return self.event.amax(-1) + 1

    def order(self) -> "Order":
        """Everything about the events that can be known beforehand."""
        event, calls = self.event.cpu(), self.calls.cpu()
        rows = calls.argsort(descending=True, stable=True)
        event = event[rows].flatten()
        at = (event >= 0).nonzero().squeeze(-1)
        at = at[event[at].argsort(stable=True)]
        ends = torch.bincount(event[at]).cumsum(0).tolist()
        busy = [int((calls > k).sum()) for k in range(len(ends))]
        parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        device = self.event.device
        return Order(rows.to(device), rows.argsort().to(device), at.to(device), list(zip(busy, parts, strict=True)))


class Order(NamedTuple):
    """Rows with the most events first, so that those in which something happens are always the first ones."""

    rows: Int[Tensor, " b"]
    back: Int[Tensor, " b"]
    """Where each row is now."""
    at: Int[Tensor, " n"]
    """Flat positions among these rows, in the order of their events."""
    events: list[tuple[int, slice]]
    """For each event in how many rows it happens, and which part of `at` it reveals."""


@dataclass(frozen=True)
class Planned(Sampler, ABC):
    """A sampler of absorbing noise whose plan is made in advance.

    Rows go from event to event side by side: each network call advances every row by one event of its own, so that no
    call is spent on a row in which nothing happens. The head runs at revealed positions alone.
    """

    def __post_init__(self) -> None:
        check_absorbing(self.process)

    @abstractmethod
    def plan(self, prompt: Prompt, times: Float[Tensor, " n"], chance: CounterRNG) -> Plan:
        """Who is revealed when."""

    @final
    def run(self, prompt: Prompt, times: Float[Tensor, " n"], chance: CounterRNG, asked: Asked) -> Iterator[State]:
        """A state for every event."""
        state, plan = self.start(prompt, chance), self.plan(prompt, times, chance)
        yield state
        # tokens are drawn with the uniforms of step 0, which nothing else uses: a position is revealed once
        u = chance(prompt.given.shape[-1], 0, STEP)
        when, order = torch.where(prompt.blank, plan.when, 0), plan.order()
        x, valid = state.x[order.rows], None if prompt.valid is None else prompt.valid[order.rows]
        flat, told = x.flatten(), plan.sigma[order.rows]
        event = plan.event[order.rows].flatten()[order.at]
        sigma = told.flatten()[order.at // x.shape[-1] * told.shape[-1] + event]
        sites = to_show(self.process, flat[order.at], sigma, u[order.rows].flatten(0, 1)[order.at], asked)
        most = asked.at_once(x.device, self.process.num_states)
        for step, (rows, part) in enumerate(order.events):  # from here on nothing is asked of the device
            hidden = asked.fresh(flat.view_as(x)[:rows], told[:rows, step], None if valid is None else valid[:rows])
            for start in range(part.start, part.stop, most):
                some = slice(start, min(start + most, part.stop))
                here = order.at[some]
                flat[here] = show(self.process, hidden.flatten(0, 1)[here], sites.part(some), asked)
            now = flat.view_as(x)[order.back]
            yield State(now, torch.where(plan.event <= step, when, 0), step + 1)


@final
@dataclass(frozen=True)
class FirstHitting(Planned):
    """The samples of Tweedie's sampler on a denoiser, without the steps in which nothing happens.

    A mask is revealed in the step from t to s with probability (α_s − α_t)/(1 − α_t), α = e^−σ, whatever the network
    says; so each position's step is drawn first. A grid without end (``times`` empty) is the first-hitting sampler:
    one position an event, and the law of the samples is the model's own.
    """

    assumes: ClassVar[str] = "absorbing noise; a score's law of a mask is normalised, which is part of the definition"
    endless: ClassVar[bool] = True

    @property
    def order(self) -> float:
        """The first, as positions of one step do not know of each other; without end, it is exact."""
        return 1.0

    def shares(self, times: Float[Tensor, " n"]) -> Float[Tensor, " steps"]:
        """P(a position is revealed in a step): the share of all noise that the step removes."""
        gone = lost(self.schedule.sigma(times))
        gone = torch.cat([gone[:-1], gone.new_zeros(1)])  # the last step removes what is left
        return -gone.diff() / gone[0]

    def plan(self, prompt: Prompt, times: Float[Tensor, " n"], chance: CounterRNG) -> Plan:
        """The step of each position by inversion, then the order of the steps in which something happens."""
        u = chance(prompt.given.shape[-1])[..., 0]
        if not len(times):
            return self._endless(prompt, u)
        sigma, ends = self.schedule.sigma(times), self.shares(times).cumsum(0)
        step = torch.searchsorted(ends, u.contiguous(), right=True).clamp_max(
            len(times) - 2
        )  # rounding may pass the end
        event, first = _ranked(torch.where(prompt.blank, step, len(times)), prompt.blank)
        return Plan(event, sigma[first.clamp_max(len(times) - 2)], step + 1)

    def law(self, given: Int[Tensor, " L"], times: Float[Tensor, " n"]) -> Float[Tensor, " states"]:
        """The law of the samples: each step reveals a mask with its probability, as p(x_0 | x) has it."""
        if not len(times):
            return Ordered(self.model, self.process, self.schedule).law(given, times)
        gone = self.shares(times).flip(0).cumsum(0).flip(0)  # the share of noise at the start of each step

        def after(law: Tensor, blank: Tensor, t: Tensor, s: Tensor) -> Tensor:
            x, k = enumeration.everything(self.process, law, len(blank)), int((times == t[0]).nonzero()[0])
            chance = 1 - gone[k + 1] / gone[k]
            table = last_step(self.model, self.process, x, self.schedule.sigma(t)) * chance
            table[..., -1] = 1 - chance
            return enumeration.step(law, table, x, blank & self.process.unknown(x))

        return enumeration.walk(self.model, self.process, self.schedule, after, given, times)

    def _endless(self, prompt: Prompt, u: Tensor) -> Plan:
        """Position i is revealed when the share of noise left falls below 1 − u_i."""
        top = lost(self.schedule.sigma(torch.ones((), dtype=torch.float64, device=u.device)))
        order = torch.where(prompt.blank, u, math.inf).sort(-1)
        event = torch.where(prompt.blank, order.indices.argsort(-1), -1)
        left = (1 - order.values.clamp_max(1)) * top
        return Plan(event, -torch.log1p(-left), event + 1)

    def expected_calls(self, times: Float[Tensor, " n"], blanks: int) -> float:
        """Σ_k 1 − (1 − w_k)^blanks, which for equal steps is n(1 − (1 − 1/n)^blanks)."""
        return float((1 - (1 - self.shares(times)) ** blanks).sum()) if len(times) else float(blanks)


def _ranked(step: Int[Tensor, "b L"], blank: Bool[Tensor, "b L"]) -> tuple[Tensor, Tensor]:
    """Each blank's step as a rank among those of its row, and the step of each rank."""
    order = step.sort(-1)
    fresh = torch.nn.functional.pad(order.values.diff(dim=-1) > 0, (1, 0)).cumsum(-1)
    rank = torch.zeros_like(step).scatter(-1, order.indices, fresh)
    steps = torch.zeros_like(step).scatter(-1, fresh, order.values)
    return torch.where(blank, rank, -1), steps


@final
@dataclass(frozen=True)
class Ordered(Planned):
    """Positions in an order, ``random`` (any-order), ``forward`` or ``backward``: one a call, or more if steps are few.

    One a call is exact: for a consistent model every order has the same law. The network is told the noise at which the
    share of masks would be what it is.
    """

    assumes: ClassVar[str] = "absorbing noise; a score's law of a mask is normalised"
    endless: ClassVar[bool] = True
    direction: str = "random"

    def __post_init__(self) -> None:
        check_absorbing(self.process)
        if self.direction not in ("random", "forward", "backward"):
            raise ValueError(f"direction is {self.direction!r}; choose one of random, forward, backward")

    @property
    def order(self) -> float:
        """Exact where a call reveals one position; of the first order in the number of calls else."""
        return 1.0

    def plan(self, prompt: Prompt, times: Float[Tensor, " n"], chance: CounterRNG) -> Plan:
        """The rank of each blank among those of its row, in as many groups as there are steps."""
        length = prompt.given.shape[-1]
        place = torch.arange(length, device=prompt.given.device, dtype=torch.float64).expand(prompt.given.shape)
        key = {"random": chance(length, event=SITE)[..., 0], "forward": place, "backward": -place}[self.direction]
        rank = torch.where(prompt.blank, key, math.inf).argsort(-1).argsort(-1)
        count = prompt.blank.sum(-1, keepdim=True)
        groups = count.clamp_max(len(times) - 1) if len(times) else count
        event = torch.where(prompt.blank, rank * groups // count.clamp_min(1), -1)
        # the first rank of group g is ⌈g·count/groups⌉
        group = torch.arange(int(groups.max()), device=rank.device)
        done = (group * count + groups - 1) // groups.clamp_min(1)
        masks = (count - done).clamp_min(0) / prompt.lengths[:, None]
        return Plan(event, noise_of(masks, self.schedule), event + 1)

    def law(self, given: Int[Tensor, " L"], times: Float[Tensor, " n"]) -> Float[Tensor, " states"]:
        """The mean over all orders of the law of each."""
        blanks = (given < 0).nonzero().squeeze(-1).tolist()
        x, groups = exact.every(self.process.num_states, len(given)), min(len(times) - 1, len(blanks))
        groups = groups if len(times) else len(blanks)
        orders = {"random": list(permutations(blanks)), "forward": [tuple(blanks)], "backward": [tuple(blanks[::-1])]}
        laws = []
        for order in orders[self.direction]:
            law = enumeration.start(self.process, given)
            for group in range(groups):
                now = [i for rank, i in enumerate(order) if rank * groups // len(order) == group]
                left = sum(rank * groups // len(order) >= group for rank in range(len(order)))
                told = noise_of(torch.tensor(left / len(given), dtype=torch.float64), self.schedule)
                table = last_step(self.model, self.process, x, told.expand(len(x)))
                free = torch.zeros(x.shape, dtype=torch.bool).index_fill(1, torch.tensor(now), True)
                law = enumeration.step(law, table, x, free & self.process.unknown(x))
            laws.append(law)
        return torch.stack(laws).mean(0)

    def expected_calls(self, times: Float[Tensor, " n"], blanks: int) -> float:
        """One a group."""
        return float(min(blanks, len(times) - 1) if len(times) else blanks)
