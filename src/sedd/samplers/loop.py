"""Samplers: prompts, rows and the one loop that steps them, draws of clean tokens, and time grids.  [§9]"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sedd.draws import CounterRNG
from sedd.ops.categorical import counter_uniforms
from sedd.parameterization import HasNoise
from sedd.samplers.model import PerSample, Positions, RowStates, SamplingModel, Sequences, Uniforms
from sedd.schedule import Schedule
from sedd.schema import check_seed

START, STEP, MIDPOINT, POSITION = range(4)
"""Events of `CounterRNG`: the initial noise, a step's draws, those of its first half, and the choice of positions."""

Steps = int | Tensor | list[float] | None  # a number of equal steps, times that fall from 1 to 0, or None: no grid
Times = Float[Tensor, " n"]  # of a grid, from 1 down to 0; empty: no grid
Inputs = tuple[Sequences, PerSample, Positions | None]  # tokens, noise levels, where no padding is


class Prompt(NamedTuple):
    """Given tokens and positions to be filled, row by row."""

    given: Sequences  # −1: to be filled; all other tokens stay as they are
    valid: Positions | None = None  # False at padding after the end of a row; None: rows have the same length
    kept: Int[Tensor, " b"] | None = None
    """How many positions of each row, from the first, are its text; None: all. A mask may be given at the others."""

    @property
    def blank(self) -> Positions:
        """True at positions to be filled."""
        return self.given < 0

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        valid = torch.ones_like(self.blank) if self.valid is None else self.valid
        return valid.sum(-1)

    @property
    def text_lengths(self) -> Int[Tensor, " b"]:
        """The length of each row's text."""
        return self.lengths if self.kept is None else self.kept

    def to(self, device: torch.device | str) -> "Prompt":
        valid = None if self.valid is None else self.valid.to(device)
        return Prompt(self.given.to(device), valid, None if self.kept is None else self.kept.to(device))

    def rows(self, index: slice | Tensor) -> "Prompt":
        valid = None if self.valid is None else self.valid[index]
        return Prompt(self.given[index], valid, None if self.kept is None else self.kept[index])


def empty(count: int, length: int, device: torch.device | str = "cpu") -> Prompt:
    """Return a prompt of ``count`` rows of ``length`` tokens in which nothing is given."""
    return Prompt(torch.full((count, length), -1, device=device))


class State(NamedTuple):
    """A batch of sequences during a run."""

    x: Sequences
    reveal_step: Int[Tensor, "b L"]  # the step at which each position last changed; 0: at the start
    step: int


class Plan(NamedTuple):
    """The calls of the model for each row, drawn before the first one."""

    sigma: Float[Tensor, "b n"]  # the noise level of each call
    t: Float[Tensor, "b _"]  # the time at each call and, on a grid, after the last one
    step: Int[Tensor, "b n"]  # the step of the time grid that stands for it, from 1
    event: Int[Tensor, "b L"] | None = None
    """The call, from 0, that reveals each position, −1 where it is given; None: each call may change all positions."""
    u: Float[Tensor, "b L 2"] | None = None  # the uniforms by which positions are revealed, each of them once


class Rows:
    """Sequences that one sampler draws with one model, each at a call of its own: rows may come and go between calls.

    Every tensor among the attributes has an entry for each row. Plans are on the CPU and tokens on the model's device,
    so that the host knows what comes next and does not wait for the device.

    Of a model that does not depend on the noise level, hidden states are computed again only for rows that have
    changed. Reference: Ou et al. 2024, arXiv 2406.03736.
    """

    event: Tensor
    u: Tensor  # both as in the plan, if it has events
    place: Tensor  # where each row of an offline run is in its state

    def __init__(self, sampler: "Sampler", model: SamplingModel, prompt: Prompt, times: Times, rng: CounterRNG) -> None:
        self.sampler, self.model, device = sampler, model, model.device
        self.process, self.schedule = model.process, model.schedule
        plan = sampler.plan(model, prompt, times, rng)
        noise = model.process.prior_sample(rng(prompt.given.shape[-1], event=START)[..., 0])
        self.sigmas, self.times = plan.sigma.cpu(), plan.t.cpu()
        last = torch.full_like(plan.step[:, 0], plan.step.shape[-1] - 1) if plan.event is None else plan.event.amax(-1)
        self.steps, self.calls = plan.step.cpu(), last.cpu() + 1
        self.done = torch.zeros_like(self.calls)  # the next call of each row: its place in the plan
        self.x = torch.where(prompt.blank, noise, prompt.given).to(device)
        self.free = prompt.blank.to(device)  # positions that may change: those the prompt leaves open
        self.valid = None if prompt.valid is None or sampler.is_causal else prompt.valid.to(device)
        self.seed, self.number = torch.as_tensor(rng.seed).expand(len(self.x)).to(device), rng.rows.to(device)
        if plan.event is not None and plan.u is not None:
            self.event, self.u = plan.event.cpu(), plan.u.to(device)
        self.seen = torch.full_like(self.x, -1)
        self.states: Tensor | None = None  # of ``seen``, whose rows are −1 where they are not known
        self.is_next = False  # whether the next call of `hidden` returns them

    def take(self, index: Int[Tensor, " r"]) -> "Rows":
        """Return the rows at these indices, which are on the CPU."""
        rows = copy.copy(self)
        for name, column in vars(self).items():
            if isinstance(column, Tensor):
                setattr(rows, name, column[index.to(column.device, non_blocking=True)])
        return rows

    def extend(self, more: "Rows") -> None:
        """Add the rows of another run of the same sampler, model and width; shorter plans are padded."""
        more.seen = torch.full_like(more.x, -1)
        more.states = None if self.states is None else self.states.new_zeros(len(more.x), *self.states.shape[1:])
        for name, a in vars(self).items():
            if isinstance(a, Tensor):
                b = getattr(more, name)
                wider = b.shape[-1] - a.shape[-1] if a.dim() == 2 else 0
                setattr(self, name, torch.cat([pad(a, (0, max(0, wider))), pad(b, (0, max(0, -wider)))]))

    def now(self, plan: Tensor, later: int = 0) -> Tensor:
        """Return the plan at each row's next call, or so many calls later, on the model's device."""
        return plan.gather(1, self.done[:, None] + later)[:, 0].to(self.x.device, non_blocking=True)

    @property
    def step(self) -> Int[Tensor, " b"]:
        """The number of each row's step, from 1."""
        return self.now(self.steps)

    @property
    def is_last(self) -> Bool[Tensor, " b"]:
        """Whether each row's next call is its last, on the CPU."""
        return self.done == self.calls - 1

    @property
    def events(self) -> Positions:
        """The positions that each row's next call reveals, on the CPU."""
        return self.event == self.done[:, None]

    @property
    def rng(self) -> CounterRNG:
        """The random numbers: ``rng(length, step, event)``; each (step, event) may be used once per run."""
        return CounterRNG(self.seed, self.number)

    def uniforms(self, event: int) -> Uniforms:
        """Return ``rng(length, step, event)``, on CUDA by one kernel."""
        return counter_uniforms(self.rng, self.x.shape[-1], self.step, event)

    def noisy(self, x: Sequences) -> Positions:
        """Return the positions that may change and may be noise."""
        return self.free & self.process.is_noisy(x)

    def hidden(self, x: Sequences, sigma: PerSample) -> RowStates:
        """Return the hidden states of sequences, for the first call of a step those of `inputs`.

        Rows for which a sampler does not need the model may hold anything.
        """
        if not self.is_next:
            index, inputs = self._unknown(x, sigma, torch.ones_like(x[:, 0], dtype=torch.bool))
            self.provide(x, index, self.model.hidden(*inputs))
        self.is_next = False
        return sigma.new_zeros(*x.shape, 1) if self.states is None else self.states  # None: no row needs any

    def inputs(self) -> tuple[Int[Tensor, " r"] | None, Inputs]:
        """Return the rows of which the next call needs hidden states, None for all, and what the network reads."""
        x, sigma, needed = self.x, self.now(self.sigmas), self.sampler.needed(self)
        if self.sampler.is_causal:  # what follows is not read
            x = x[:, : int(self.events.nonzero()[:, 1].amax()) + 1]
        return (None, (x, sigma, self.valid)) if needed is None else self._unknown(x, sigma, needed)

    def _unknown(self, x: Tensor, sigma: Tensor, needed: Tensor) -> tuple[Tensor | None, Inputs]:
        """Return the inputs of the needed rows whose hidden states are not known."""
        if self.model.cached and self.states is not None:
            changed = (x != self.seen).any(-1)
            self.seen, needed = torch.where(changed[:, None], -1, x), needed & changed
        else:
            self.seen, self.states = torch.full_like(x, -1), None
        if needed.all():
            return None, (x, sigma, self.valid)
        index = needed.nonzero().squeeze(-1)
        return index, (x[index], sigma[index], None if self.valid is None else self.valid[index])

    def provide(self, x: Sequences, index: Int[Tensor, " r"] | None, hidden: RowStates) -> None:
        """Set the hidden states of some rows, None for all; the next call of `hidden` returns them."""
        if index is None:
            self.seen, self.states = x, hidden
        elif len(index):
            if self.states is None:
                self.states = hidden.new_zeros(len(x), *hidden.shape[1:])
            self.seen = self.seen.index_copy(0, index, x[index])
            self.states = self.states.index_copy(0, index, hidden)
        self.is_next = True

    def advance(self) -> None:
        """Make each row's next call; the model has been given the hidden states of `inputs`."""
        self.x = self.sampler.advance(self)
        self.done = self.done + 1


@dataclass(frozen=True)
class Sampler(ABC):
    """Draw sequences from noise, call by call of the model; a sampler holds nothing but its options.

    There are three kinds, by what decides when a token is drawn: a time grid (`GridSampler`, which third parties
    subclass), a plan made before the network is called (`first_hitting.PlannedSampler`), or the network's output
    (`confidence.EntropyBounded`).

    A ``model`` is a parameterized network such as `MeanModel`, or `exact.Score`, or a wrapper of one. Its noise process
    and schedule are those of the run.
    """

    order: ClassVar[float]
    """The order of convergence: total variation to the model's distribution falls like steps^−order.

    ∞: they are equal at any number of steps. 0: there is no such limit for the conditionals of a network.
    """
    assumes: ClassVar[str]
    """The models for which `order` holds."""
    supports_infinite_steps: ClassVar[bool] = False
    """Whether it can do without a grid: it draws one position at a time, or as many as the network's output allows."""
    reveals_masks: ClassVar[bool] = False  # whether only masks may be noise
    is_causal: ClassVar[bool] = False  # whether the model reads only what comes before a position

    @final
    def sample(
        self, model: Any, prompt: int | Tensor | Prompt, length: int | None = None, *, seed: int = 0, steps: Steps = 64
    ) -> Sequences:
        """Draw sequences: ``sampler.sample(model, 16, 64)`` draws 16 of 64 tokens; see `trajectory`."""
        *_, last = self.trajectory(model, prompt, length, seed=seed, steps=steps)
        return last.x

    @final
    def trajectory(
        self,
        model: Any,
        prompt: int | Tensor | Prompt,
        length: int | None = None,
        *,
        seed: int = 0,
        steps: Steps = 64,
        rows: Int[Tensor, " b"] | None = None,
    ) -> Iterator[State]:
        """Yield the states from noise to data, without gradients; the last holds tokens only.

        Args:
            model: The model. A new `SamplingModel` of it counts the calls of this run.
            prompt: A number of sequences, or the tokens of each, where −1 is to be filled.
            length: Tokens per sequence, where ``prompt`` is a number.
            seed: Decides the draws, with a row's number: a row does not depend on its batch.
            steps: Equal steps from t = 1 to 0; or a grid of times that fall from 1 to 0; or None, no grid, where
                `supports_infinite_steps`.
            rows: The number of each row; by default 0, 1, 2 …
        """
        model = model if isinstance(model, SamplingModel) else SamplingModel(model)
        self.check(model.model)
        prompt = as_prompt(prompt, length).to(model.device)
        times = self.times(steps).to(model.device)
        numbers = torch.arange(len(prompt.given)) if rows is None else rows
        return _run(Rows(self, model, prompt, times, CounterRNG(check_seed(seed), numbers.to(model.device))))

    def check(self, model: Any) -> None:
        """Raise ValueError for a model that this sampler cannot sample."""
        if self.reveals_masks and not model.process.only_masks:
            advice = "use ancestral, tweedie, euler, theta, gibbs"
            raise ValueError(f"this sampler reveals masks, and under the model's noise tokens change too; {advice}")

    @abstractmethod
    def plan(self, model: HasNoise, prompt: Prompt, times: Times, rng: CounterRNG) -> Plan:
        """Plan the calls of the model for each row."""

    def needed(self, rows: Rows) -> Bool[Tensor, " b"] | None:
        """Return the rows whose next call needs the model; None: all rows."""
        return None

    @abstractmethod
    def advance(self, rows: Rows) -> Sequences:
        """Return the tokens after the next call of every row."""

    @final
    def times(self, steps: Steps) -> Times:
        """Return the times of a run, empty for None; raise ValueError for None where a grid is needed."""
        if isinstance(steps, int):
            return uniform_grid(steps)
        if isinstance(steps, float | str):
            raise ValueError(f"steps is {steps!r}; pass a whole number, or a grid such as [1, 0.7, 0.3, 0]")
        if steps is not None and len(steps):
            grid = torch.as_tensor(steps, dtype=torch.float64)
            if len(grid) < 2 or grid[0] != 1 or grid[-1] != 0 or not (grid.diff() < 0).all():
                raise ValueError(f"the grid is {grid.tolist()}; it must fall from 1 to 0, as in 1,0.7,0.3,0")
            return grid
        if self.supports_infinite_steps:
            return torch.zeros(0, dtype=torch.float64)
        raise ValueError("steps is inf; give a number, or choose first-hitting, ordered or entropy, which support it")

    @abstractmethod
    def expected_calls(self, model: HasNoise, times: Times, blanks: int) -> float:
        """Return the expected calls of the model for a row with so many open positions, uncached; NaN: unknown."""


@torch.no_grad()
def _run(rows: Rows) -> Iterator[State]:
    """Yield the state before and after each call, all rows being admitted at once."""
    state = State(rows.x, torch.zeros_like(rows.x), 0)
    yield state
    rows.place = torch.arange(len(rows.x), device=rows.x.device)
    while (left := rows.done < rows.calls).any():
        rows = rows if left.all() else rows.take(left.nonzero()[:, 0])
        index, inputs = rows.inputs()
        rows.provide(rows.x, index, rows.model.hidden(*inputs))
        before, step, place = rows.x, rows.now(rows.steps), rows.place
        rows.advance()
        reveal_step = torch.where(rows.x != before, step[:, None], state.reveal_step[place])
        x, reveal_step = state.x.index_copy(0, place, rows.x), state.reveal_step.index_copy(0, place, reveal_step)
        state = State(x, reveal_step, state.step + 1)
        yield state


class GridSampler(Sampler, ABC):
    """A sampler that goes down a grid of times, by one `step` from each to the next.

    The last step is the same for all: it draws every position that may still be noise from p(x_0 | x). To write a
    sampler, subclass this, write `step`, and declare `order` and `assumes`; the options are dataclass fields.
    """

    calls_per_step: ClassVar[int] = 1  # calls of the model in each step but the last

    @abstractmethod
    def step(self, x: Sequences, t: PerSample, s: PerSample, rows: Rows) -> Sequences:
        """Draw the sequences at time s, given ``x`` at time t > s; only positions in ``rows.free`` may change.

        Each row has times of its own; ``rows`` holds the random numbers and the model, too.
        """

    def grid(self, times: Times) -> Times:
        """Return the times at which the noise level is read: by default the grid itself."""
        return times

    def needs_model(self, rows: Rows, t: PerSample, s: PerSample) -> Bool[Tensor, " b"]:
        """Return the rows that `step` cannot draw without calling the model: by default those with open positions."""
        return rows.free.any(-1)

    @final
    def plan(self, model: HasNoise, prompt: Prompt, times: Times, rng: CounterRNG) -> Plan:
        grid, rows = self.grid(times), len(prompt.given)
        step = torch.arange(1, len(grid), device=grid.device)
        return Plan(model.schedule.sigma(grid[:-1]).expand(rows, -1), grid.expand(rows, -1), step.expand(rows, -1))

    @final
    def needed(self, rows: Rows) -> Bool[Tensor, " b"]:
        """Return the rows that `needs_model` names and, of those in their last step, the ones with noise."""
        needs = self.needs_model(rows, rows.now(rows.times), rows.now(rows.times, 1))
        return torch.where(rows.is_last.to(rows.x.device), rows.noisy(rows.x).any(-1), needs)

    @final
    def advance(self, rows: Rows) -> Sequences:
        x, last = rows.x, rows.is_last
        if not last.any():
            return self.step(x, rows.now(rows.times), rows.now(rows.times, 1), rows)
        if last.all():
            return draw_clean_tokens(x, rows.now(rows.sigmas), rows.noisy(x), rows)
        for some in (~last, last):
            index = some.nonzero()[:, 0]
            x = x.index_copy(0, index.to(x.device), self.advance(rows.take(index)))
        return x

    def expected_calls(self, model: HasNoise, times: Times, blanks: int) -> float:
        return float(self.calls_per_step * (len(times) - 2) + 1) if blanks else 0.0


def draw_clean_tokens(x: Sequences, sigma: PerSample, where: Positions, rows: Rows) -> Sequences:
    """Draw the positions in ``where`` from p(x_0 | x); without any, the model is not called."""
    if not where.any():
        return x
    return rows.model.draw_clean(rows.hidden(x, sigma), x, sigma, where, rows.uniforms(STEP))


def sigma_of_masked_fraction(masked: Float[Tensor, "*s"], schedule: Schedule) -> Float[Tensor, "*s"]:
    """Return the noise level at which this fraction of positions is masked, within the range of the schedule."""
    ends = schedule.sigma(torch.tensor([0.0, 1.0], dtype=torch.float64, device=masked.device))
    sigma = -torch.log1p(-masked.double().clamp(0, 1 - 1e-12))
    return torch.minimum(torch.maximum(sigma, ends[0]), ends[1])


def uniform_grid(steps: int) -> Times:
    """Return equal steps from t = 1 to t = 0."""
    if steps < 1:
        raise ValueError(f"steps is {steps}; sampling needs at least 1")
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64)


def cosine_grid(steps: int) -> Times:
    """Return t = cos(πk/2n): short steps at first, when all tokens are unknown, and long ones at the end."""
    return torch.sin(math.pi / 2 * uniform_grid(steps))


def as_prompt(given: int | Tensor | Prompt, length: int | None) -> Prompt:
    """Return a number of sequences, or their tokens with −1 at open positions, as a prompt."""
    if isinstance(given, int):
        if length is None or given < 1 or length < 1:
            raise ValueError(f"the prompt is {given} sequences of length {length}; both must be 1 or more")
        return empty(given, length)
    prompt = given if isinstance(given, Prompt) else Prompt(given)
    if length is not None:
        raise ValueError(f"length is {length}, and the prompt has a length of its own; leave length out")
    if prompt.given.dim() != 2 or prompt.given.dtype != torch.long:
        found = f"shape {tuple(prompt.given.shape)} and dtype {prompt.given.dtype}"
        raise ValueError(f"the prompt has {found}; pass int64 tokens of shape (sequences, length), with −1 to be drawn")
    return prompt
