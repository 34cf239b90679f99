"""Samplers: prompts, states, the loop over a time grid and draws of clean tokens.  [§9]"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd.draws import CounterRNG
from sedd.ops.categorical import counter_uniforms
from sedd.parameterization import HasNoise
from sedd.process import Process
from sedd.runtime.offload import OffloadedNetwork
from sedd.samplers.model import SamplingModel, gather_rows
from sedd.schedule import Schedule

START, STEP, MIDPOINT, POSITION = range(4)
"""Events of `CounterRNG`: the initial noise, a step's draws, those of its first half, and the choice of positions."""


Steps = int | Tensor | list[float] | None
"""A time grid: a number of equal steps, or times that fall from 1 to 0, or None for no grid."""


class Prompt(NamedTuple):
    """Given tokens and positions to be filled, row by row."""

    given: Int[Tensor, "b L"]
    """−1: to be filled; all other tokens stay as they are."""
    valid: Bool[Tensor, "b L"] | None = None
    """False at padding after the end of a row; None: all rows have the same length."""
    kept: Int[Tensor, " b"] | None = None
    """How many positions of each row, from the first, are its text; None: all. A mask may be given at the others."""

    @property
    def blank(self) -> Bool[Tensor, "b L"]:
        """True at positions to be filled."""
        return self.given < 0

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        """The length of each row."""
        valid = torch.ones_like(self.blank) if self.valid is None else self.valid
        return valid.sum(-1)

    @property
    def text_lengths(self) -> Int[Tensor, " b"]:
        """The length of each row's text."""
        return self.lengths if self.kept is None else self.kept

    def to(self, device: torch.device | str) -> "Prompt":
        """Move to a device."""
        return self._map(lambda tensor: tensor.to(device))

    def rows(self, index: slice | Tensor) -> "Prompt":
        """Select rows."""
        return self._map(lambda tensor: tensor[index])

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Prompt":
        return Prompt(function(self.given), *(None if tensor is None else function(tensor) for tensor in self[1:]))


def empty(count: int, length: int, device: torch.device | str = "cpu") -> Prompt:
    """Return a prompt in which nothing is given.

    Args:
        count: Number of rows.
        length: Tokens of a row.
        device: Where the prompt is.
    """
    return Prompt(torch.full((count, length), -1, device=device))


class State(NamedTuple):
    """A batch of sequences during a run."""

    x: Int[Tensor, "b L"]
    reveal_step: Int[Tensor, "b L"]
    """The step at which each position last changed; 0: at the start."""
    step: int


class Plan(NamedTuple):
    """The calls of the model for each row, drawn before the first one; rows may be at different calls."""

    sigma: Float[Tensor, "b n"]
    """The noise level of each call of a row."""
    t: Float[Tensor, "b n"]
    """The time at each call."""
    s: Float[Tensor, "b n"]
    """The time to which it goes."""
    step: Int[Tensor, "b n"]
    """The step of the time grid that stands for it, from 1."""
    event: Int[Tensor, "b L"] | None = None
    """The call, from 0, that reveals each position, −1 where it is given; None: each call may change all positions."""

    @property
    def calls(self) -> Int[Tensor, " b"]:
        """How often the model is called for each row."""
        if self.event is None:
            return torch.full((len(self.sigma),), self.sigma.shape[-1], device=self.sigma.device)
        return self.event.amax(-1) + 1


class StepContext(NamedTuple):
    """What a step needs besides its sequences and times."""

    free: Bool[Tensor, "b L"]
    """True at positions that may change: those the prompt leaves open."""
    valid: Bool[Tensor, "b L"] | None
    """False at padding; to be passed to the model."""
    rng: CounterRNG
    """The random numbers of these rows: ``rng(length, step, event)``; each (step, event) may be used once per run."""
    model: SamplingModel
    step: int | Int[Tensor, " b"]
    """The number of the step, from 1: that of all rows, or of each."""

    @property
    def process(self) -> Process:
        """The noise process of the model."""
        return self.model.process

    @property
    def schedule(self) -> Schedule:
        """The noise schedule of the model."""
        return self.model.schedule

    def rows(self, index: Tensor) -> "StepContext":
        """Select rows."""
        valid = None if self.valid is None else self.valid[index]
        step = self.step[index] if isinstance(self.step, Tensor) else self.step
        return StepContext(self.free[index], valid, self.rng[index], self.model, step)


@dataclass(frozen=True)
class Sampler(ABC):
    """Draw sequences from noise, step by step; a sampler holds nothing but its options.

    There are three kinds, by what decides when a token is drawn: a time grid (`GridSampler`, which third parties
    subclass), a plan made before the network is called (`first_hitting.PlannedSampler`), or the network's output
    (`confidence.EntropyBounded`, `autoregressive.LeftToRight`).

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
    calls_per_step: ClassVar[int] = 1
    """Calls of the model in each step but the last."""

    @final
    def sample(
        self,
        model: Any,
        prompt: int | Tensor | Prompt,
        length: int | None = None,
        *,
        seed: int = 0,
        steps: Steps = 64,
    ) -> Int[Tensor, "b L"]:
        """Draw sequences: ``sampler.sample(model, 16, 64)`` draws 16 of 64 tokens.

        The arguments are those of `trajectory`.
        """
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
        if not isinstance(model, SamplingModel):
            model = SamplingModel(check_model(model))
        self.check(model)
        prompt, times = as_prompt(prompt, length, device_of(model.model)), self.times(steps)
        device = prompt.given.device
        rng = CounterRNG(seed, torch.arange(len(prompt.given), device=device) if rows is None else rows)
        return self._run(model, prompt, times.to(device), rng)

    @torch.no_grad()
    def _run(
        self, model: SamplingModel, prompt: Prompt, times: Float[Tensor, " n"], rng: CounterRNG
    ) -> Iterator[State]:
        yield from self._states(model, prompt, times, rng)

    @abstractmethod
    def _states(
        self, model: SamplingModel, prompt: Prompt, times: Float[Tensor, " n"], rng: CounterRNG
    ) -> Iterator[State]:
        """Yield the states from noise to data."""

    def check(self, model: HasNoise) -> None:  # noqa: B027  (most samplers take every model)
        """Raise ValueError for a model that this sampler cannot sample."""

    def plan(self, model: HasNoise, prompt: Prompt, times: Float[Tensor, " n"], rng: CounterRNG) -> Plan | None:
        """Plan the calls of the model; None: the output of the network decides."""
        return None

    @final
    def times(self, steps: Steps) -> Float[Tensor, " n"]:
        """Return the grid of `time_grid`; raise ValueError for None where a grid is needed."""
        times = time_grid(steps)
        if not len(times) and not self.supports_infinite_steps:
            raise ValueError(
                "steps is inf, which only the samplers first-hitting, ordered, entropy support; give a number, or "
                "choose one of them"
            )
        return times

    def expected_calls(self, model: HasNoise, times: Float[Tensor, " n"], blanks: int) -> float:
        """Return the expected calls of the model for a row with so many open positions; NaN: unknown in advance.

        By default `calls_per_step` in each step and one in the last. Cached rows need fewer.
        """
        return float(self.calls_per_step * (len(times) - 2) + 1) if blanks else 0.0


class GridSampler(Sampler, ABC):
    """A sampler that goes down a grid of times, by one `step` from each to the next.

    The last step is the same for all: it draws every position that may still be noise from p(x_0 | x). To write a
    sampler, subclass this, write `step`, and declare `order` and `assumes`; the options are dataclass fields.
    """

    @abstractmethod
    def step(
        self, x: Int[Tensor, "b L"], t: Float[Tensor, " b"], s: Float[Tensor, " b"], context: StepContext
    ) -> Int[Tensor, "b L"]:
        """Draw the sequences at time s, given those at time t > s; only positions in ``context.free`` may change.

        Args:
            x: Sequences at time t.
            t: The time of each row.
            s: The earlier time to go to, of each row.
            context: What may change, the random numbers, and the model.
        """

    @final
    def plan(self, model: HasNoise, prompt: Prompt, times: Float[Tensor, " n"], rng: CounterRNG) -> Plan:
        """Call the model in every step of the grid."""
        grid, rows = self.grid(times), len(prompt.given)
        step = torch.arange(1, len(grid), device=grid.device)
        levels = model.schedule.sigma(grid[:-1]), grid[:-1], grid[1:], step
        return Plan(*(level.expand(rows, -1) for level in levels))

    def grid(self, times: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the times at which the noise level is read: by default the grid itself."""
        return times

    def needs_model(
        self, x: Int[Tensor, "b L"], t: Float[Tensor, " b"], s: Float[Tensor, " b"], context: StepContext
    ) -> Bool[Tensor, " b"]:
        """Return the rows that `step` cannot draw without calling the model: by default those with noisy positions."""
        return (context.free & context.process.is_noisy(x)).any(-1)

    @final
    def _states(
        self, model: SamplingModel, prompt: Prompt, times: Float[Tensor, " n"], rng: CounterRNG
    ) -> Iterator[State]:
        """Yield a state for every time of the grid."""
        state, plan = initial_state(model, prompt, rng), self.plan(model, prompt, times, rng)
        yield state
        for step, (sigma, t, s) in enumerate(zip(plan.sigma.T, plan.t.T, plan.s.T, strict=True), 1):
            context = StepContext(prompt.blank, prompt.valid, rng, model, step)
            if step < len(times) - 1:
                x = self.step(state.x, t, s, context)
            else:
                noisy = context.free & model.process.is_noisy(state.x)
                x = draw_clean_tokens(state.x, sigma, noisy, context)
            state = State(x, torch.where(x != state.x, step, state.reveal_step), step)
            yield state


def initial_state(model: HasNoise, prompt: Prompt, rng: CounterRNG) -> State:
    """Return the given tokens with noise at all other positions."""
    noise = model.process.prior_sample(rng(prompt.given.shape[-1], event=START)[..., 0])
    x = torch.where(prompt.blank, noise, prompt.given)
    return State(x, torch.zeros_like(x), 0)


def draw_clean_tokens(
    x: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], where: Bool[Tensor, "b L"], context: StepContext
) -> Int[Tensor, "b L"]:
    """Draw the positions in ``where`` from p(x_0 | x); the model is not called for rows without any.

    Args:
        x: Sequences.
        sigma: Total noise of each row.
        where: True at the positions to draw.
        context: The random numbers, and the model.
    """
    rows = where.any(-1).nonzero().squeeze(-1)
    if not len(rows):
        return x
    row_context = context.rows(rows)
    hidden = context.model.hidden_of_rows(rows, x, sigma, context.valid)
    return x.index_put((rows,), draw_from_hidden(hidden, x[rows], sigma[rows], where[rows], row_context))


def draw_from_hidden(
    hidden: Float[Tensor, "b L h"],
    x: Int[Tensor, "b L"],
    sigma: Float[Tensor, " b"],
    where: Bool[Tensor, "b L"],
    context: StepContext,
) -> Int[Tensor, "b L"]:
    """Draw the positions in ``where`` from p(x_0 | x), given the hidden states. It never takes the argmax."""
    model, length = context.model, x.shape[-1]
    u = counter_uniforms(context.rng, length, context.step, STEP).flatten(0, 1)
    y, states = x.flatten().clone(), hidden.flatten(0, 1)
    for at in model.chunks(where):
        plan = model.plan_clean_draw(y[at], gather_rows(sigma, length, at), u[at])
        y[at] = model.draw_clean(states[at], plan)
    return y.view_as(x)


def check_absorbing(process: Process) -> None:
    """Raise ValueError unless only masks are noise."""
    if not process.only_masks:
        raise ValueError(
            "this sampler reveals masks, and under the model's noise tokens change too; use ancestral, tweedie, euler, "
            "theta, gibbs"
        )


def sigma_of_masked_fraction(masked: Float[Tensor, "*s"], schedule: Schedule) -> Float[Tensor, "*s"]:
    """Return the noise level at which this fraction of positions is masked, within the range of the schedule."""
    ends = schedule.sigma(torch.tensor([0.0, 1.0], dtype=torch.float64, device=masked.device))
    sigma = -torch.log1p(-masked.double().clamp(0, 1 - 1e-12))
    return torch.minimum(torch.maximum(sigma, ends[0]), ends[1])


def uniform_grid(steps: int) -> Float[Tensor, " n"]:
    """Return equal steps from t = 1 to t = 0."""
    return torch.linspace(1, 0, _steps(steps) + 1, dtype=torch.float64)


def cosine_grid(steps: int) -> Float[Tensor, " n"]:
    """Return t = cos(πk/2n): short steps at first, when all tokens are unknown, and long ones at the end."""
    return torch.sin(math.pi / 2 * uniform_grid(steps))


def given_grid(times: list[float]) -> Float[Tensor, " n"]:
    """Return the given times, which must fall from 1 to 0."""
    grid = torch.tensor(times, dtype=torch.float64)
    if len(times) < 2 or times[0] != 1 or times[-1] != 0 or not (grid.diff() < 0).all():
        raise ValueError(f"the grid is {times}; it must fall from 1 to 0, as in 1,0.7,0.3,0")
    return grid


def _steps(steps: int) -> int:
    if steps < 1:
        raise ValueError(f"steps is {steps}; sampling needs at least 1")
    return steps


def time_grid(steps: Steps) -> Float[Tensor, " n"]:
    """Return the times of a run: ``steps`` equal steps, or the given times; empty for None."""
    if steps is None:
        return torch.zeros(0, dtype=torch.float64)
    if isinstance(steps, int):
        return uniform_grid(steps)
    if not isinstance(steps, Tensor):
        return given_grid(steps)
    if steps.device.type == "cpu" and len(steps):
        given_grid(steps.tolist())
    return steps


def as_prompt(given: int | Tensor | Prompt, length: int | None, device: torch.device) -> Prompt:
    """Return a number of sequences, or their tokens with −1 at open positions, as a prompt on a device."""
    if isinstance(given, int):
        if length is None or given < 1 or length < 1:
            raise ValueError(f"the prompt is {given} sequences of length {length}; both must be 1 or more")
        return empty(given, length, device)
    prompt = given if isinstance(given, Prompt) else Prompt(given)
    if length is not None:
        raise ValueError(f"length is {length}, and the prompt has a length of its own; leave length out")
    if prompt.given.dim() != 2 or prompt.given.dtype != torch.long:
        raise ValueError(
            f"the prompt has shape {tuple(prompt.given.shape)} and dtype {prompt.given.dtype}; pass int64 tokens of "
            "shape (sequences, length), with −1 where a token is to be drawn"
        )
    return prompt.to(device)


def check_model(model: Any) -> Any:
    """Return the model; raise TypeError for a network, or for anything else that lacks a part of a model."""
    if lacks := [name for name in ("process", "schedule", "hidden") if not hasattr(model, name)]:
        raise TypeError(
            f"{type(model).__name__} is not a model, it has no {', '.join(lacks)}; pass MeanModel(network, process) or "
            "ScoreModel(network, process), not the network"
        )
    return model


def device_of(model: Any) -> torch.device:
    """Return the device of a model's tokens: that of its weights, or the CPU where it has none or is offloaded."""
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(isinstance(part, OffloadedNetwork) for part in parts):
        return torch.device("cpu")
    weights = (weight for part in parts for weight in part.parameters(recurse=False))
    return next((weight.device for weight in weights), torch.device("cpu"))
