"""Samplers that go down a grid of times: Tweedie, Euler, ancestral, and the θ-trapezoidal method.  [§9]"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool
from torch import Tensor

from sedd import reverse
from sedd.draws import AffineWeights
from sedd.parameterization import HasNoise, PerRow
from sedd.reverse import analytic_weights, forward_likelihood, normalize_probs
from sedd.samplers.loop import MIDPOINT, STEP, GridSampler, Rows
from sedd.samplers.model import PerSample, Sequences, TableAt, TokenAt, is_denoiser, log_score_at
from sedd.tensors import PerSequence, PerState, Tokens


class FactorizedSampler(GridSampler, ABC):
    """A grid sampler whose step draws every position independently, given the whole sequence.

    A subclass states the weights of the next token twice: in full, and as an affine function of the scores, from which
    a kernel draws without a table.
    """

    order: ClassVar[float] = 1.0  # positions that change in the same step are drawn independently of each other
    uses_score: ClassVar[bool]  # whether the weights are a function of the log-score, or of log p(x_0 | x)

    @abstractmethod
    def weights(self, model: HasNoise, output: TableAt, x: TokenAt, t: PerRow, s: PerRow) -> TableAt:
        """Return unnormalised probabilities of the states at time s, by the log-score or log p(x_0 | x) at time t."""

    @abstractmethod
    def affine_weights(self, model: HasNoise, t: PerRow, s: PerRow) -> AffineWeights:
        """Return the same weights as an affine function of the scores."""

    def needs_model(self, rows: Rows, t: PerSample, s: PerSample) -> Bool[Tensor, " b"]:
        return rows.noisy(rows.x).any(-1)

    @final
    def step(self, x: Sequences, t: PerSample, s: PerSample, rows: Rows) -> Sequences:
        """Draw every free position; the first uniform decides whether it changes, the second to what."""
        model, schedule, y = rows.model, rows.schedule, x.clone()
        sigma = schedule.sigma(t)
        hidden, u = rows.hidden(x, sigma), rows.uniforms(STEP)
        fused = model.can_fuse(self.uses_score, sigma - schedule.sigma(s))
        for at, row in model.chunks(rows.noisy(x)):
            if fused:
                weights = self.affine_weights(model, t[row], s[row])
                y[at] = model.draw_fused(hidden[at], x[at], sigma[row], u[at], weights)
                continue
            inputs = hidden[at], x[at], sigma[row]
            output = log_score_at(model.model, *inputs) if self.uses_score else model.model.log_mean_at(*inputs)
            y[at] = model.draw_weighted(x[at], self.weights(model, output, x[at], t[row], s[row]), u[at])
        return y


@final
@dataclass(frozen=True)
class Tweedie(FactorizedSampler):
    """Tweedie τ-leaping: the analytic step of each position while the others stay. Exact for one token.  [§9]

    Reference: Lou et al. 2024, "Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution",
    arXiv 2310.16834.
    """

    assumes: ClassVar[str] = "nothing; masks are revealed at the rate of the score"
    uses_score: ClassVar[bool] = True

    def weights(self, model: HasNoise, output: TableAt, x: TokenAt, t: PerRow, s: PerRow) -> TableAt:
        """[exp(−Δσ Q) s]_y · P_Δσ(x, y)."""
        sigma_t, sigma_s = model.schedule.sigma(t), model.schedule.sigma(s)
        return analytic_weights(model.process, output[:, None], x[:, None], sigma_t, sigma_s)[:, 0]

    def affine_weights(self, model: HasNoise, t: PerRow, s: PerRow) -> AffineWeights:
        return reverse.tweedie_weights(model.process, model.schedule.sigma(t) - model.schedule.sigma(s))


@final
@dataclass(frozen=True)
class Euler(FactorizedSampler):
    """Euler τ-leaping: each position jumps at the reverse rate it has at time t.  [§9]

    Reference: Campbell et al. 2022, "A Continuous Time Framework for Discrete Denoising Models", arXiv 2205.14987.
    """

    assumes: ClassVar[str] = "nothing; steps so short that no position changes with probability above 1"
    uses_score: ClassVar[bool] = True

    def weights(self, model: HasNoise, output: TableAt, x: TokenAt, t: PerRow, s: PerRow) -> TableAt:
        """P(x → y) = (t − s)·σ'(t)·Q(x, y)·s_y for y ≠ x, and the rest for y = x."""
        rates = ((t - s) * model.schedule.rate(t))[:, None] * model.process.incoming_rates(x)
        jump = (rates.to(output.dtype) * output.exp()).scatter(-1, x[:, None], 0)
        return jump.scatter(-1, x[:, None], 1 - jump.sum(-1, keepdim=True))

    def affine_weights(self, model: HasNoise, t: PerRow, s: PerRow) -> AffineWeights:
        rate = (t - s) * model.schedule.rate(t) * reverse.incoming_rate(model.process)
        return AffineWeights(rate, torch.ones_like(rate), -rate)


@final
@dataclass(frozen=True)
class Ancestral(FactorizedSampler):
    """Ancestral sampling with a denoiser: q(x_s | x_t, x_0) averaged over p(x_0 | x_t).  [§6, §9]

    The same distribution as Tweedie's on the denoiser's score, but the score is never computed: at high uniform noise
    it rounds to 1 in float32.

    Reference: Austin et al. 2021, "Structured Denoising Diffusion Models in Discrete State-Spaces", arXiv 2107.03006.
    """

    assumes: ClassVar[str] = "a denoiser (parameterization mean)"
    uses_score: ClassVar[bool] = False

    def check(self, model: Any) -> None:
        if not is_denoiser(model):
            raise ValueError("sampler ancestral needs a denoiser (parameterization mean); of a score use tweedie")

    def weights(self, model: HasNoise, output: TableAt, x: TokenAt, t: PerRow, s: PerRow) -> TableAt:
        """Σ_{x_0} q(y | x, x_0)·p(x_0 | x)."""
        sigma_s, sigma_t = model.schedule.sigma(s), model.schedule.sigma(t)
        return model.process.log_posterior(output[:, None], x[:, None], sigma_s, sigma_t)[:, 0].exp()

    def affine_weights(self, model: HasNoise, t: PerRow, s: PerRow) -> AffineWeights:
        return reverse.posterior_weights(model.process, model.schedule.sigma(s), model.schedule.sigma(t))


@final
@dataclass(frozen=True)
class Theta(GridSampler):
    """A second-order step in two stages, from t to ρ = t − θ(t − s) and from ρ to s.

    The first stage is a Tweedie step to ρ. The second draws from α₁·(the step by the score at ρ) − α₂·(the step by the
    score at t), with α₁ = 1/(2θ(1−θ)) and α₂ = α₁ − 1: pairs of positions that change in one step then have their joint
    distribution, which a single stage replaces by a product. Where the difference is below 0, because a conditional
    changed by more than a factor of about two, it is clamped and counted, and the second order is lost. Where tokens
    are noise that happens near the data for any distribution: of two implausible tokens, the second becomes plausible
    once the first is corrected.

    Reference: Ren et al. 2025, "Fast Solvers for Discrete Diffusion Models: Theory and Applications of High-Order
    Algorithms", arXiv 2502.00234: the θ-trapezoidal method, with Tweedie's steps where it has τ-leaping.
    """

    order: ClassVar[float] = 2.0  # under uniform noise 1, with a fraction of Tweedie's error at as many calls
    assumes: ClassVar[str] = "absorbing noise; conditionals that change by less than a factor of two within a step"
    calls_per_step: ClassVar[int] = 2
    theta: float = 0.5
    """Where in a step the second stage begins, from 0 (its start) to 1 (its end)."""

    def __post_init__(self) -> None:
        if not 0 < self.theta < 1:
            raise ValueError(f"theta is {self.theta}; it must lie between 0 and 1")

    def midpoint(self, t: PerSequence, s: PerSequence) -> PerSequence:
        return t - self.theta * (t - s)

    def first_stage(self, model: HasNoise, log_score: PerState, x: Tokens, t: PerSequence, s: PerSequence) -> PerState:
        """Return the unnormalised probabilities of the step from t to ρ."""
        sigma_t, sigma_m = model.schedule.sigma(t), model.schedule.sigma(self.midpoint(t, s))
        return analytic_weights(model.process, log_score, x, sigma_t, sigma_m)

    def second_stage(
        self, model: HasNoise, log_score_t: PerState, log_score_m: PerState, x_m: Tokens, t: PerSequence, s: PerSequence
    ) -> PerState:
        """Return the weights of the step from ρ to s, α₁·(score at ρ) − α₂·(score at t); entries may be below 0."""
        sigma_t, sigma_m, sigma_s = (model.schedule.sigma(a) for a in (t, self.midpoint(t, s), s))
        alpha = 1 / (2 * self.theta * (1 - self.theta))
        dtype = log_score_m.dtype
        into_middle = forward_likelihood(model.process, x_m, sigma_m - sigma_s, dtype)
        by_t = model.process.staggered_score(log_score_t.exp(), (sigma_t - sigma_s).to(dtype)) * into_middle
        by_mid = analytic_weights(model.process, log_score_m, x_m, sigma_m, sigma_s)
        return alpha * normalize_probs(by_mid) - (alpha - 1) * normalize_probs(by_t)

    def needs_model(self, rows: Rows, t: PerSample, s: PerSample) -> Bool[Tensor, " b"]:
        return rows.noisy(rows.x).any(-1)

    def step(self, x: Sequences, t: PerSample, s: PerSample, rows: Rows) -> Sequences:
        model, middle = rows.model, x.clone()
        sigma_t, sigma_m = rows.schedule.sigma(t), rows.schedule.sigma(self.midpoint(t, s))
        hidden_t, u = rows.hidden(x, sigma_t), rows.uniforms(MIDPOINT)
        for at, row in model.chunks(rows.noisy(x)):
            log_score = log_score_at(model.model, hidden_t[at], x[at], sigma_t[row])[:, None]
            weights = self.first_stage(model, log_score, x[at][:, None], t[row], s[row])[:, 0]
            middle[at] = model.draw_weighted(x[at], weights, u[at])
        y, hidden_m, u = middle.clone(), rows.hidden(middle, sigma_m), rows.uniforms(STEP)
        for at, row in model.chunks(rows.noisy(middle)):
            log_score_t = log_score_at(model.model, hidden_t[at], x[at], sigma_t[row])[:, None]
            log_score_m = log_score_at(model.model, hidden_m[at], middle[at], sigma_m[row])[:, None]
            weights = self.second_stage(model, log_score_t, log_score_m, middle[at][:, None], t[row], s[row])[:, 0]
            y[at] = model.draw_weighted(middle[at], weights, u[at])
        return y
