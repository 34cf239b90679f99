"""The θ-trapezoidal sampler: two stages per step, of second order where only masks are noise.  [§9]"""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Bool
from torch import Tensor

from sedd.parameterization import HasNoise
from sedd.reverse import analytic_weights, forward_likelihood, normalize_probs
from sedd.samplers.loop import MIDPOINT, STEP, GridSampler, Rows
from sedd.samplers.model import PerSample, Sequences
from sedd.tensors import PerSequence, PerState, Tokens


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
        """ρ = t − θ(t − s)."""
        return t - self.theta * (t - s)

    def first_stage(self, model: HasNoise, log_score: PerState, x: Tokens, t: PerSequence, s: PerSequence) -> PerState:
        """Return the unnormalised probabilities of the step from t to ρ."""
        sigma_t, sigma_m = model.schedule.sigma(t), model.schedule.sigma(self.midpoint(t, s))
        return analytic_weights(model.process, log_score, x, sigma_t, sigma_m)

    def second_stage(
        self,
        model: HasNoise,
        log_score_t: PerState,
        log_score_mid: PerState,
        x_mid: Tokens,
        t: PerSequence,
        s: PerSequence,
    ) -> PerState:
        """Return the weights of the step from ρ to s, α₁·(score at ρ) − α₂·(score at t); entries may be below 0."""
        sigma_t, sigma_m, sigma_s = (model.schedule.sigma(a) for a in (t, self.midpoint(t, s), s))
        alpha = 1 / (2 * self.theta * (1 - self.theta))
        dtype = log_score_mid.dtype
        into_middle = forward_likelihood(model.process, x_mid, sigma_m - sigma_s, dtype)
        by_t = model.process.staggered_score(log_score_t.exp(), (sigma_t - sigma_s).to(dtype)) * into_middle
        by_mid = analytic_weights(model.process, log_score_mid, x_mid, sigma_m, sigma_s)
        return alpha * normalize_probs(by_mid) - (alpha - 1) * normalize_probs(by_t)

    def needs_model(self, rows: Rows, t: PerSample, s: PerSample) -> Bool[Tensor, " b"]:
        """Return the rows with noise."""
        return rows.noisy(rows.x).any(-1)

    def step(self, x: Sequences, t: PerSample, s: PerSample, rows: Rows) -> Sequences:
        """Draw the sequences at ρ, then those at s."""
        model, middle = rows.model, x.clone()
        sigma_t, sigma_m = rows.schedule.sigma(t), rows.schedule.sigma(self.midpoint(t, s))
        hidden_t, u = rows.hidden(x, sigma_t), rows.uniforms(MIDPOINT)
        for row, column in model.chunks(rows.noisy(x)):
            at = row, column
            log_score = model.log_score_at(hidden_t[at], x[at], sigma_t[row])[:, None]
            weights = self.first_stage(model, log_score, x[at][:, None], t[row], s[row])[:, 0]
            middle[at] = model.draw_weighted(x[at], weights, u[at])
        y, hidden_m, u = middle.clone(), rows.hidden(middle, sigma_m), rows.uniforms(STEP)
        for row, column in model.chunks(rows.noisy(middle)):
            at = row, column
            log_score_t = model.log_score_at(hidden_t[at], x[at], sigma_t[row])[:, None]
            log_score_m = model.log_score_at(hidden_m[at], middle[at], sigma_m[row])[:, None]
            weights = self.second_stage(model, log_score_t, log_score_m, middle[at][:, None], t[row], s[row])[:, 0]
            y[at] = model.draw_weighted(middle[at], weights, u[at])
        return y
