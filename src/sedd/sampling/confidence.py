"""Samplers that let the network choose whom to reveal, labelled for what they are."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd import exact
from sedd.diffusion.reverse import last_step
from sedd.diffusion.rng import CounterRNG
from sedd.diffusion.schedule import lost
from sedd.sampling import enumeration
from sedd.sampling.base import Prompt, Sampler, State, StepContext, check_absorbing, fill, noise_of, walk
from sedd.sampling.caching import Asked, per_position


class Chosen(Sampler, ABC):
    """A sampler that lets the network choose whom to reveal. **Its samples do not have the model's law.**

    Sure positions come first, so what is likely becomes likelier still. The tokens themselves are drawn.
    """

    def __post_init__(self) -> None:
        check_absorbing(self.process)

    @property
    def order(self) -> float:
        """None: the law is another, at any number of steps."""
        return 0.0

    @abstractmethod
    def doubt(self, p: Float[Tensor, "*s N"]) -> Float[Tensor, "*s"]:
        """How unsure the network is of a position."""

    @final
    def doubts(
        self, hidden: Float[Tensor, "b L h"], x: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], context: StepContext
    ) -> Float[Tensor, "b L"]:
        """The doubt at masks; ∞ elsewhere."""
        length, asked, rows = x.shape[-1], context.asked, hidden.flatten(0, 1)
        doubts = torch.full((x.numel(),), math.inf, dtype=torch.float64, device=x.device)
        for at in asked.pieces(context.free & self.process.unknown(x), self.process.num_states):
            p = asked.clean(rows[at], x.flatten()[at], per_position(sigma, length, at), self.process)
            doubts[at] = self.doubt(p).double()
        return doubts.view_as(x)

    @final
    def dense_doubts(
        self, table: Float[Tensor, "n L states"], x: Int[Tensor, "n L"], blank: Bool[Tensor, " L"]
    ) -> Float[Tensor, "n L"]:
        """The doubt at the masks of every sequence, from the table of p(x_0 | x)."""
        doubts = self.doubt(table[..., : self.process.vocab_size])
        return torch.where(blank & self.process.unknown(x), doubts, math.inf)


@final
@dataclass(frozen=True)
class Confident(Chosen):
    """The positions of whose likeliest token the network is surest, as many a step as the noise says."""

    assumes: ClassVar[str] = "absorbing noise; not a sampler of the model's law"

    def doubt(self, p: Float[Tensor, "*s N"]) -> Float[Tensor, "*s"]:
        """1 − the largest probability."""
        return 1 - p.amax(-1)

    def left(self, blanks: Int[Tensor, " b"], s: Float[Tensor, " b"]) -> Int[Tensor, " b"]:
        """How many masks are left at time s: the share that noise would leave."""
        ends = lost(self.schedule.sigma(torch.stack([s, torch.ones_like(s)])))
        return (blanks * ends[0] / ends[1] + 1e-9).long()

    def choose(self, doubts: Float[Tensor, "b L"], left: Int[Tensor, " b"]) -> Bool[Tensor, "b L"]:
        """The least doubtful masks, all but ``left``."""
        masks = doubts.isfinite()
        rank = doubts.argsort(dim=-1, stable=True).argsort(-1)
        return masks & (rank < (masks.sum(-1) - left)[:, None])

    def law(self, given: Int[Tensor, " L"], times: Float[Tensor, " n"]) -> Float[Tensor, " states"]:
        """The law of the samples: every sequence has its own choice."""
        count = (given < 0).sum()

        def after(law: Tensor, blank: Tensor, t: Tensor, s: Tensor) -> Tensor:
            x = enumeration.everything(self.process, law, len(blank))
            table = last_step(self.model, self.process, x, self.schedule.sigma(t))
            chosen = self.choose(self.dense_doubts(table, x, blank), self.left(count.expand(len(x)), s))
            return enumeration.step(law, table, x, chosen)

        return enumeration.walk(self.model, self.process, self.schedule, after, given, times)

    def run(self, prompt: Prompt, times: Float[Tensor, " n"], chance: CounterRNG, asked: Asked) -> Iterator[State]:
        """A state for every time of the grid."""

        def draw(x: Tensor, t: Tensor, s: Tensor, context: StepContext) -> Tensor:
            sigma, left = self.schedule.sigma(t), self.left(prompt.blank.sum(-1), s)
            if ((prompt.blank & self.process.unknown(x)).sum(-1) <= left).all():
                return x
            hidden = asked.hidden(x, sigma, context.valid)
            chosen = self.choose(self.doubts(hidden, x, sigma, context), left)
            return fill(self.process, hidden, x, sigma, chosen, context)

        yield from walk(self, draw, prompt, times, chance, asked)

    def expected_calls(self, times: Float[Tensor, " n"], blanks: int) -> float:
        """One a step; fewer, if rows that have not changed need not be asked."""
        return float(len(times) - 1) if blanks else 0.0


@final
@dataclass(frozen=True)
class EntropyBounded(Chosen):
    """As many positions a call as can be drawn side by side at an error of at most ``bound`` nats.

    Positions by growing entropy, as long as the sum of the entropies without the largest stays below the bound, which
    is above what drawing them independently can cost in KL. How many calls that makes depends on the text.
    """

    assumes: ClassVar[str] = "absorbing noise; not a sampler of the model's law"
    endless: ClassVar[bool] = True
    bound: float = 0.1

    def __post_init__(self) -> None:
        check_absorbing(self.process)
        if not self.bound >= 0:
            raise ValueError(f"bound is {self.bound}; it is an entropy and must be 0 or more")

    def doubt(self, p: Float[Tensor, "*s N"]) -> Float[Tensor, "*s"]:
        """The entropy, in nats."""
        return -torch.xlogy(p, p).sum(-1)

    def choose(self, doubts: Float[Tensor, "b L"]) -> Bool[Tensor, "b L"]:
        """The longest prefix by doubt whose sum, without its last, is within the bound."""
        ordered = doubts.sort(dim=-1, stable=True)
        before = torch.nn.functional.pad(ordered.values[:, :-1].cumsum(-1), (1, 0))
        taken = ordered.values.isfinite() & (before <= self.bound)
        return torch.zeros_like(taken).scatter(-1, ordered.indices, taken)

    def law(self, given: Int[Tensor, " L"], times: Float[Tensor, " n"]) -> Float[Tensor, " states"]:
        """The law of the samples: as many calls as there are blanks are always enough."""
        law, x, blank = (
            enumeration.start(self.process, given),
            exact.every(self.process.num_states, len(given)),
            given < 0,
        )
        masks = blank & self.process.unknown(x)
        sigma = noise_of(masks.sum(-1) / len(given), self.schedule)
        table = last_step(self.model, self.process, x, sigma)
        chosen = self.choose(self.dense_doubts(table, x, blank))
        for _ in range(int(blank.sum())):
            law = enumeration.step(law, table, x, chosen)
        return law

    def run(self, prompt: Prompt, times: Float[Tensor, " n"], chance: CounterRNG, asked: Asked) -> Iterator[State]:
        """A state for every call; the grid is not used."""
        state = self.start(prompt, chance)
        yield state
        while (masks := prompt.blank & self.process.unknown(state.x)).any():
            context = StepContext(masks, prompt.valid, chance, asked, 0)
            sigma = noise_of(masks.sum(-1) / prompt.lengths, self.schedule)
            hidden = asked.hidden(state.x, sigma, prompt.valid)
            chosen = self.choose(self.doubts(hidden, state.x, sigma, context))
            x = fill(self.process, hidden, state.x, sigma, chosen, context)
            state = State(x, torch.where(chosen, state.step + 1, state.when), state.step + 1)
            yield state

    def expected_calls(self, times: Float[Tensor, " n"], blanks: int) -> float:
        """Not known beforehand."""
        return math.nan if blanks else 0.0
