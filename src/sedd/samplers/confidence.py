"""Samplers that reveal the positions of which the network is most certain first.  [§9]"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.draws import CounterRNG
from sedd.parameterization import HasNoise
from sedd.samplers.first_hitting import Ordered
from sedd.samplers.loop import STEP, GridSampler, Plan, Prompt, Rows, Sampler, Times
from sedd.samplers.model import NOT_FINITE, PerSample, Positions, RowStates, Sequences
from sedd.schedule import corruption_probability

LATER = 1e3  # added to the uncertainty of what is revealed last; more than any entropy


class ConfidenceSampler(Sampler, ABC):
    """A sampler in which the network decides which masks are revealed next. Tokens are drawn at random.

    Of records that end in padding a network may be surest of the padding, from the end on: revealed first, it can leave
    no room for a text. Positions where ``pad`` is the most probable token are therefore revealed after all others.

    By the chain rule, samples have the model's distribution if at most one position is drawn per step and the
    conditionals are exact, that is, those of one distribution: the order may then depend on the tokens revealed so far.
    Otherwise they do not. The conditionals of a network differ between orders, and positions that are drawn in one step
    are drawn independently, the most certain ones together: likely tokens become likelier.
    """

    order: ClassVar[float] = 0.0
    assumes: ClassVar[str] = "absorbing noise; one token per step and exact conditionals, else it favours likely tokens"
    reveals_masks: ClassVar[bool] = True
    pad: int
    """Token id of padding, which is revealed last; −1: none."""

    def check(self, model: Any) -> None:
        super().check(model)
        if not -1 <= self.pad < (size := model.process.vocab_size):
            raise ValueError(f"pad is {self.pad}; it is a token id, 0..{size - 1}, or -1 for none")

    @abstractmethod
    def uncertainty(self, p: Float[Tensor, "*s N"]) -> Float[Tensor, "*s"]:
        """Return how uncertain the network is of a position, from p(x_0 | x)."""

    @final
    def ranked_uncertainty(self, p: Float[Tensor, "*s N"]) -> Float[Tensor, "*s"]:
        """Return the uncertainty, larger by `LATER` where padding is the most probable token."""
        uncertainty = self.uncertainty(p)
        return uncertainty if self.pad < 0 else uncertainty + LATER * (p.argmax(-1) == self.pad)

    @final
    def without_offset(self, uncertainty: Float[Tensor, "b L"]) -> Float[Tensor, "b L"]:
        """Subtract `LATER` again in rows whose masks are all padding: the bound on entropies is of entropies."""
        only_padding = (uncertainty >= LATER).all(-1, keepdim=True)
        return torch.where(only_padding, uncertainty - LATER, uncertainty)

    @final
    def mask_uncertainty(self, rows: Rows, hidden: RowStates, x: Sequences, sigma: PerSample) -> Float[Tensor, "b L"]:
        """Return the uncertainty at masks, that of padding after that of all others, and ∞ elsewhere."""
        uncertainty = torch.full(x.shape, math.inf, dtype=torch.float64, device=x.device)
        for at, row in rows.model.chunks(rows.noisy(x)):
            p = rows.model.clean_probs_at(hidden[at], x[at], sigma[row])
            uncertainty[at] = self.ranked_uncertainty(p).double()
        return self.without_offset(uncertainty)


@final
@dataclass(frozen=True)
class Confident(ConfidenceSampler, GridSampler):
    """MaskGIT-style sampling: the most certain masks first, as many per step as the schedule reveals.

    Reference: Chang et al. 2022, "MaskGIT: Masked Generative Image Transformer", arXiv 2202.04200.
    """

    pad: int = -1

    def uncertainty(self, p: Float[Tensor, "*s N"]) -> Float[Tensor, "*s"]:
        return 1 - p.amax(-1)

    def masks_left(self, model: HasNoise, blanks: Int[Tensor, " b"], s: PerSample) -> Int[Tensor, " b"]:
        """Return how many masks are left at time s: the share that the schedule leaves."""
        ends = corruption_probability(model.schedule.sigma(torch.stack([s, torch.ones_like(s)])))
        return (blanks * ends[0] / ends[1] + 1e-9).long()

    def choose(self, uncertainty: Float[Tensor, "b L"], left: Int[Tensor, " b"]) -> Positions:
        """Choose the most certain masks, all but ``left`` of them."""
        masks = uncertainty.isfinite()
        rank = uncertainty.argsort(dim=-1, stable=True).argsort(-1)
        return masks & (rank < (masks.sum(-1) - left)[:, None])

    def needs_model(self, rows: Rows, t: PerSample, s: PerSample) -> Bool[Tensor, " b"]:
        return rows.noisy(rows.x).sum(-1) > self.masks_left(rows, rows.free.sum(-1), s)

    def step(self, x: Sequences, t: PerSample, s: PerSample, rows: Rows) -> Sequences:
        sigma, left = rows.schedule.sigma(t), self.masks_left(rows, rows.free.sum(-1), s)
        if not (rows.noisy(x).sum(-1) > left).any():
            return x
        hidden = rows.hidden(x, sigma)
        chosen = self.choose(self.mask_uncertainty(rows, hidden, x, sigma), left)
        return rows.model.draw_clean(hidden, x, sigma, chosen, rows.uniforms(STEP))


@final
@dataclass(frozen=True)
class EntropyBounded(ConfidenceSampler):
    """Entropy-bounded unmasking: as many positions per call as cost at most ``bound`` nats when drawn independently.

    Positions are taken by increasing entropy, padding last, while the sum of entropies without the largest is at most
    the bound, which bounds the KL divergence of the independent draw. The number of calls depends on the text.

    Reference: Ben-Hamu et al. 2025, "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking",
    arXiv 2505.24857.
    """

    supports_infinite_steps: ClassVar[bool] = True
    bound: float = 0.1
    """Largest sum of entropies, in nats, of the tokens that one step reveals, its last one not counted."""
    pad: int = -1

    def __post_init__(self) -> None:
        if not self.bound >= 0:
            raise ValueError(f"bound is {self.bound}; it is an entropy and must be 0 or more")

    def uncertainty(self, p: Float[Tensor, "*s N"]) -> Float[Tensor, "*s"]:
        """The entropy, in nats."""
        return -torch.xlogy(p, p).sum(-1)

    def choose(self, uncertainty: Float[Tensor, "b L"]) -> Positions:
        """Choose the most masks, by increasing entropy, whose sum without the last is within the bound."""
        ordered = uncertainty.sort(dim=-1, stable=True)
        before = torch.nn.functional.pad(ordered.values[:, :-1].cumsum(-1), (1, 0))
        chosen = ordered.values.isfinite() & (before <= self.bound)
        return torch.zeros_like(chosen).scatter(-1, ordered.indices, chosen)

    def plan(self, model: HasNoise, prompt: Prompt, times: Times, rng: CounterRNG) -> Plan:
        """Plan one call per open position: it begins where so many are revealed, and may reveal several."""
        plan = Ordered("forward").plan(model, prompt, times[:0], rng)
        return plan._replace(step=torch.ones_like(plan.step))

    def advance(self, rows: Rows) -> Sequences:
        """Draw the positions whose entropies are within the bound; the plan goes on at the number revealed."""
        x, sigma = rows.x, rows.now(rows.sigmas)
        hidden = rows.hidden(x, sigma)
        chosen = self.choose(self.mask_uncertainty(rows, hidden, x, sigma))
        revealed = chosen.sum(-1).cpu()
        if not revealed.all():  # of NaN none is ever chosen
            raise ValueError(NOT_FINITE)
        rows.done, rows.steps = rows.done + revealed - 1, rows.steps + 1
        return rows.model.draw_clean(hidden, x, sigma, chosen, rows.u)

    def expected_calls(self, model: HasNoise, times: Times, blanks: int) -> float:
        return math.nan if blanks else 0.0  # the number depends on the text
