"""What all samplers share: a canvas with blanks, a model that is asked about them, and the states on the way."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.diffusion import categorical
from sedd.diffusion.categorical import AffineWeights
from sedd.diffusion.parameterization import HiddenStateModel, LogScoreModel
from sedd.diffusion.process import Absorbing, Process
from sedd.diffusion.rng import CounterRNG
from sedd.diffusion.schedule import Schedule
from sedd.ops.categorical import counter_uniforms
from sedd.sampling import enumeration
from sedd.sampling.caching import Asked, Sites, Spoken, per_position, show, to_show

START, STEP, MIDDLE, SITE = range(4)
"""What uniforms are drawn for: the first noise, a step's moves, those of its first half, the choice of a site."""


class Prompt(NamedTuple):
    """What is given and what is to be filled, row by row."""

    given: Int[Tensor, "b L"]
    """−1 is a blank; the rest comes back as it is."""
    valid: Bool[Tensor, "b L"] | None = None
    """False behind the end of a row; None: every row is as long as the others."""

    @property
    def blank(self) -> Bool[Tensor, "b L"]:
        """Where there is something to fill."""
        return self.given < 0

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        """How long each row is."""
        whole = torch.ones_like(self.blank) if self.valid is None else self.valid
        return whole.sum(-1)

    def to(self, device: torch.device | str) -> "Prompt":
        """The same on a device."""
        return Prompt(self.given.to(device), None if self.valid is None else self.valid.to(device))

    def rows(self, index: slice | Tensor) -> "Prompt":
        """Some of the rows."""
        return Prompt(self.given[index], None if self.valid is None else self.valid[index])


def empty(count: int, length: int, device: torch.device | str = "cpu") -> Prompt:
    """Nothing given."""
    return Prompt(torch.full((count, length), -1, device=device))


class State(NamedTuple):
    """Where a sampler stands."""

    x: Int[Tensor, "b L"]
    when: Int[Tensor, "b L"]
    """The step at which a position took its value; 0: at the start."""
    step: int


def check_absorbing(process: Process) -> None:
    """Refuse noise without masks."""
    if not isinstance(process, Absorbing):
        raise ValueError(
            "this sampler reveals masks, and the model's noise is uniform; use ancestral, tweedie, euler, theta, gibbs"
        )


def noise_of(masks: Float[Tensor, "*s"], schedule: Schedule) -> Float[Tensor, "*s"]:
    """The noise at which so large a share of positions is masked, as far as the schedule goes."""
    ends = schedule.sigma(torch.tensor([0.0, 1.0], dtype=torch.float64, device=masks.device))
    sigma = -torch.log1p(-masks.double().clamp(0, 1 - 1e-12))
    return torch.minimum(torch.maximum(sigma, ends[0]), ends[1])


class StepContext(NamedTuple):
    """What a step needs besides its state."""

    free: Bool[Tensor, "b L"]
    """Where tokens may change."""
    valid: Bool[Tensor, "b L"] | None
    chance: CounterRNG
    asked: Asked
    step: int


@dataclass(frozen=True)
class Sampler(ABC):
    """A way from noise to data.

    `order` says how the law of its samples approaches that of the model: the total variation between them falls like
    steps^−order; ∞ means that they are equal at any number of steps, 0 that they never are. `assumes` says of which
    models.
    """

    assumes: ClassVar[str]
    endless: ClassVar[bool] = False
    """Whether it can do without a grid, one position after another: then its samples have the model's law."""
    model: LogScoreModel
    process: Process
    schedule: Schedule

    @property
    @abstractmethod
    def order(self) -> float:
        """How fast the law of the samples approaches the model's."""

    @abstractmethod
    def run(self, prompt: Prompt, times: Float[Tensor, " n"], chance: CounterRNG, asked: Asked) -> Iterator[State]:
        """The states from noise to data; the last one holds tokens only."""

    @abstractmethod
    def law(self, given: Int[Tensor, " L"], times: Float[Tensor, " n"]) -> Float[Tensor, " states"]:
        """The law that `run` draws from, by enumeration; −1 in ``given`` is a blank."""

    @abstractmethod
    def expected_calls(self, times: Float[Tensor, " n"], blanks: int) -> float:
        """How often the network runs on a row with so many blanks, in the mean; NaN: nobody knows beforehand."""

    def start(self, prompt: Prompt, chance: CounterRNG) -> State:
        """Noise around what is given."""
        noise = self.process.limit(chance(prompt.given.shape[-1], event=START)[..., 0])
        x = torch.where(prompt.blank, noise, prompt.given)
        return State(x, torch.zeros_like(x), 0)


class Stepper(Sampler, ABC):
    """A sampler that goes down a grid of times; its last step removes all noise that is left."""

    @property
    @abstractmethod
    def stages(self) -> int:
        """Network calls a step."""

    @abstractmethod
    def draw(
        self, x: Int[Tensor, "b L"], t: Float[Tensor, " b"], s: Float[Tensor, " b"], context: StepContext
    ) -> Tensor:
        """The state at time s, given that at time t."""

    @abstractmethod
    def after(
        self, law: Float[Tensor, " n"], blank: Bool[Tensor, " L"], t: Float[Tensor, " n"], s: Float[Tensor, " n"]
    ) -> Float[Tensor, " n"]:
        """The law that `draw` makes of a law, by enumeration."""

    @final
    def run(self, prompt: Prompt, times: Float[Tensor, " n"], chance: CounterRNG, asked: Asked) -> Iterator[State]:
        """A state for every time of the grid."""
        yield from walk(self, self.draw, prompt, times, chance, asked)

    @final
    def law(self, given: Int[Tensor, " L"], times: Float[Tensor, " n"]) -> Float[Tensor, " states"]:
        """The law of the samples."""
        return enumeration.walk(self.model, self.process, self.schedule, self.after, given, times)

    @final
    def expected_calls(self, times: Float[Tensor, " n"], blanks: int) -> float:
        """As many as there are stages; fewer, if rows that have not changed need not be asked."""
        return float(self.stages * (len(times) - 2) + 1) if blanks else 0.0


Draw = Callable[[Tensor, Tensor, Tensor, StepContext], Tensor]


def walk(
    sampler: Sampler, draw: Draw, prompt: Prompt, times: Float[Tensor, " n"], chance: CounterRNG, asked: Asked
) -> Iterator[State]:
    """A state for every time of the grid; the last step draws whatever is still noise from p(x_0 | x)."""
    state = sampler.start(prompt, chance)
    yield state
    for step, (t, s) in enumerate(pairwise(times), 1):
        context = StepContext(prompt.blank, prompt.valid, chance, asked, step)
        rows = len(state.x)
        if step < len(times) - 1:
            x = draw(state.x, t.expand(rows), s.expand(rows), context)
        else:
            noise = context.free & sampler.process.unknown(state.x)
            x = reveal(sampler.process, state.x, sampler.schedule.sigma(t).expand(rows), noise, context)
        state = State(x, torch.where(x != state.x, step, state.when), step)
        yield state


def reveal(
    process: Process,
    x: Int[Tensor, "b L"],
    sigma: Float[Tensor, " b"],
    where: Bool[Tensor, "b L"],
    context: StepContext,
) -> Int[Tensor, "b L"]:
    """Draw the chosen positions from p(x_0 | x). Rows without any are not asked about."""
    rows = where.any(-1).nonzero().squeeze(-1)
    if not len(rows):
        return x
    some = StepContext(
        context.free[rows], None if context.valid is None else context.valid[rows], context.chance[rows], *context[3:]
    )
    hidden = context.asked.fresh(x[rows], sigma[rows], some.valid)
    return x.index_put((rows,), fill(process, hidden, x[rows], sigma[rows], where[rows], some))


def fill(
    process: Process,
    hidden: Float[Tensor, "b L h"],
    x: Int[Tensor, "b L"],
    sigma: Float[Tensor, " b"],
    where: Bool[Tensor, "b L"],
    context: StepContext,
) -> Int[Tensor, "b L"]:
    """Draw the chosen positions from p(x_0 | x), of which the head reads ``hidden``: drawn, never the likeliest."""
    u = counter_uniforms(context.chance, x.shape[-1], context.step, STEP).flatten(0, 1)
    y, rows = x.flatten().clone(), hidden.flatten(0, 1)
    for at in context.asked.pieces(where, process.num_states):
        sites = to_show(process, y[at], per_position(sigma, x.shape[-1], at), u[at], context.asked)
        y[at] = show(process, rows[at], sites, context.asked)
    return y.view_as(x)


class Product(Stepper, ABC):
    """A stepper whose step moves every position by itself, given the sequence: it has a table."""

    @property
    def order(self) -> float:
        """The first: two positions that move in one step do not know of each other."""
        return 1.0

    @property
    def stages(self) -> int:
        """One."""
        return 1

    relative: ClassVar[bool]
    """Whether it works on scores, or on laws of the clean token."""

    @abstractmethod
    def look(self, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L _"]:
        """What the model says of every position."""

    @abstractmethod
    def read(
        self, model: HiddenStateModel, hidden: Float[Tensor, "k h"], x: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k _"]:
        """What the model says of some positions."""

    @abstractmethod
    def weights(
        self, said: Float[Tensor, "k _"], x: Int[Tensor, " k"], t: Float[Tensor, " k"], s: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n"]:
        """The law of the next token, unnormalised, at some positions; entries below 0 are the caller's to clamp."""

    @abstractmethod
    def affine(self, t: Float[Tensor, " k"], s: Float[Tensor, " k"]) -> AffineWeights:
        """The same law, in terms of what a `Speaker` says."""

    @final
    def table(self, x: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], s: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """The step from time t down to s as a law of every position: what proofs work on."""
        said = self.look(x, self.schedule.sigma(t)).flatten(0, -2)
        t, s = (a[..., None].expand(x.shape).reshape(-1) for a in (t, s))
        p = self.weights(said, x.reshape(-1), t, s).clamp_min(0).view(*x.shape, -1)
        stays = torch.nn.functional.one_hot(x, self.process.num_states).to(p.dtype)
        p = torch.where(self.process.unknown(x)[..., None], p, stays)
        return p / p.sum(-1, keepdim=True)

    @final
    def after(
        self, law: Float[Tensor, " n"], blank: Bool[Tensor, " L"], t: Float[Tensor, " n"], s: Float[Tensor, " n"]
    ) -> Float[Tensor, " n"]:
        """One step by its table."""
        x = enumeration.everything(self.process, law, len(blank))
        return enumeration.step(law, self.table(x, t, s), x, blank.expand(x.shape))

    @final
    def draw(
        self, x: Int[Tensor, "b L"], t: Float[Tensor, " b"], s: Float[Tensor, " b"], context: StepContext
    ) -> Tensor:
        """The step's draw: whether a position moves is decided first, where to only for those that do."""
        asked, length, y = context.asked, x.shape[-1], x.flatten().clone()
        sigma = self.schedule.sigma(t)
        hidden = asked.hidden(x, sigma, context.valid).flatten(0, 1)
        u = counter_uniforms(context.chance, length, context.step, STEP).flatten(0, 1)
        for at in asked.pieces(context.free & self.process.unknown(x), self.process.num_states):
            now, told, before, after = y[at], *(per_position(a, length, at) for a in (sigma, t, s))
            if (speaker := asked.speaker(x.device)) and speaker.logits_are_scores == self.relative:
                spoken = Spoken(self.affine(before, after), speaker.logit_shift(told).float())
                y[at] = asked.pick(hidden[at], Sites(now, told, u[at], spoken), self.process.vocab_size)
                continue
            said = self.read(asked.model, hidden[at], now, told)
            y[at] = categorical.step(now, asked.law(self.weights(said, now, before, after)), u[at])
        return y.view_as(x)


class Scored(Product, ABC):
    """A stepper that works on the score."""

    relative: ClassVar[bool] = True

    @final
    def look(self, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L _"]:
        """The log-score."""
        return self.model(x, sigma)

    @final
    def read(
        self, model: HiddenStateModel, hidden: Float[Tensor, "k h"], x: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k _"]:
        """The log-score."""
        return model.log_score_at(hidden, x, sigma)


def uniform_grid(steps: int) -> Float[Tensor, " n"]:
    """Equal steps from t = 1 to t = 0."""
    return torch.linspace(1, 0, _steps(steps) + 1, dtype=torch.float64)


def cosine_grid(steps: int) -> Float[Tensor, " n"]:
    """t = cos(πk/2n): small steps at first, when everything is unknown, and long ones at the end."""
    return torch.sin(math.pi / 2 * uniform_grid(steps))


def given_grid(times: list[float]) -> Float[Tensor, " n"]:
    """The user's own times, from 1 down to 0."""
    grid = torch.tensor(times, dtype=torch.float64)
    if len(times) < 2 or times[0] != 1 or times[-1] != 0 or not (grid.diff() < 0).all():
        raise ValueError(f"the grid is {times}; it must fall from 1 to 0, as in 1,0.7,0.3,0")
    return grid


def _steps(steps: int) -> int:
    if steps < 1:
        raise ValueError(f"steps is {steps}; sampling needs at least 1")
    return steps
