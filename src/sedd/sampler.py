"""Samplers: one step from noise towards data, as the law of every position's next token.  [§9]

A step is a table ``(*b, L, num_states)``: given the sequence, positions move independently. Tables are what
proofs work on: `exact.propagate` turns them into the law of the samples, without drawing any.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.parameterization import Model
from sedd.process import Process
from sedd.schedule import Schedule


def _law(p: Float[Tensor, "*b L n"]) -> Float[Tensor, "*b L n"]:
    """A law made of ``p``: an imperfect score or a long step may leave entries below 0."""
    p = p.clamp_min(0)
    return p / p.sum(-1, keepdim=True)


def _into(process: Process, x: Tensor, dsigma: Tensor) -> Tensor:
    """P_Δσ(x, y) for every y."""
    states = torch.arange(process.num_states, device=x.device)
    return process.transition(x[..., None], states, dsigma[..., None, None])


def analytic_step(
    model: Model,
    process: Process,
    x: Int[Tensor, "*b L"],
    sigma_t: Float[Tensor, "*b"],
    sigma_s: Float[Tensor, "*b"],
) -> Float[Tensor, "*b L n"]:
    """P(y) ∝ [exp(−Δσ Q) s]_y · P_Δσ(x, y), exact for a sequence of one token."""
    dsigma = sigma_t - sigma_s
    staggered = process.staggered_score(model(x, sigma_t).exp(), dsigma)
    return _law(staggered * _into(process, x, dsigma))


@final
@dataclass(frozen=True)
class Tweedie:
    """The analytic step: each position as if the others stood still."""

    order: ClassVar[int] = 1
    model: Model
    process: Process
    schedule: Schedule

    def table(self, x: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], s: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """The step from time t down to s."""
        return analytic_step(self.model, self.process, x, self.schedule.sigma(t), self.schedule.sigma(s))


@final
@dataclass(frozen=True)
class Euler:
    """The first-order step: each position moves at the rate it has at time t."""

    order: ClassVar[int] = 1
    model: Model
    process: Process
    schedule: Schedule

    def table(self, x: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], s: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """P(x_i → y) = (t − s)·σ'(t)·Q(x_i, y)·s_y; stay with the rest."""
        sigma, rate = self.schedule(t)
        log_score = self.model(x, sigma)
        rates = self.process.rates_into(x, log_score.dtype)
        go = ((t - s) * rate)[..., None, None] * rates * log_score.exp()
        go = go.scatter(-1, x[..., None], 0)
        return _law(go.scatter(-1, x[..., None], 1 - go.sum(-1, keepdim=True)))


def last_step(
    model: Model, process: Process, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
) -> Float[Tensor, "*b L n"]:
    """The step to no noise at all: p(x_0 | x), position by position. No mask is left."""
    p = analytic_step(model, process, x, sigma, torch.zeros_like(sigma))
    tokens = torch.arange(process.num_states, device=x.device) < process.vocab_size
    return _law(torch.where(tokens, p, 0))
