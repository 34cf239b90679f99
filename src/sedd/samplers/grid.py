"""Samplers that update all positions independently in each step: Tweedie, Euler, ancestral.  [§9]"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool
from torch import Tensor

from sedd import reverse
from sedd.draws import AffineWeights
from sedd.parameterization import HasNoise, PerRow
from sedd.samplers.loop import STEP, GridSampler, Rows
from sedd.samplers.model import PerSample, Sequences, TableAt, TokenAt, is_denoiser


class FactorizedSampler(GridSampler, ABC):
    """A grid sampler whose step draws every position independently, given the whole sequence.

    A subclass states the weights of the next token twice: in full, and as an affine function of the scores, from which
    a kernel draws without a table.
    """

    order: ClassVar[float] = 1.0  # positions that change in the same step are drawn independently of each other
    uses_score: ClassVar[bool]
    """Whether the weights are a function of the log-score, or of log p(x_0 | x)."""

    @abstractmethod
    def weights(self, model: HasNoise, output: TableAt, x: TokenAt, t: PerRow, s: PerRow) -> TableAt:
        """Return the unnormalised probabilities of every state at time s; the caller clamps entries below 0.

        Args:
            model: Process and schedule.
            output: The log-score or log p(x_0 | x), by `uses_score`.
            x: The tokens at time t.
            t: Times.
            s: Earlier times.
        """

    @abstractmethod
    def affine_weights(self, model: HasNoise, t: PerRow, s: PerRow) -> AffineWeights:
        """Return the same weights as an affine function of the scores."""

    def needs_model(self, rows: Rows, t: PerSample, s: PerSample) -> Bool[Tensor, " b"]:
        """Return the rows with noise."""
        return rows.noisy(rows.x).any(-1)

    @final
    def step(self, x: Sequences, t: PerSample, s: PerSample, rows: Rows) -> Sequences:
        """Draw every free position; the first uniform decides whether it changes, the second to what."""
        model, schedule, y = rows.model, rows.schedule, x.clone()
        sigma = schedule.sigma(t)
        hidden, u = rows.hidden(x, sigma), rows.uniforms(STEP)
        fused = model.can_fuse(self.uses_score, sigma - schedule.sigma(s))
        for row, column in model.chunks(rows.noisy(x)):
            at = row, column
            if fused:
                weights = self.affine_weights(model, t[row], s[row])
                y[at] = model.draw_fused(hidden[at], x[at], sigma[row], u[at], weights)
                continue
            output = (model.log_score_at if self.uses_score else model.log_mean_at)(hidden[at], x[at], sigma[row])
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
        return reverse.analytic_weights(model.process, output[:, None], x[:, None], sigma_t, sigma_s)[:, 0]

    def affine_weights(self, model: HasNoise, t: PerRow, s: PerRow) -> AffineWeights:
        """[exp(−Δσ Q) s]_y · P_Δσ(x, y)."""
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
        """(t − s)·σ'(t)·Q(x, y)·s_y for y ≠ x, and 1 minus their sum for y = x."""
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
        """Require a denoiser."""
        if not is_denoiser(model):
            raise ValueError(
                "sampler ancestral needs a denoiser (parameterization mean); the model is a score: use tweedie"
            )

    def weights(self, model: HasNoise, output: TableAt, x: TokenAt, t: PerRow, s: PerRow) -> TableAt:
        """Σ_{x_0} q(y | x, x_0)·p(x_0 | x)."""
        sigma_s, sigma_t = model.schedule.sigma(s), model.schedule.sigma(t)
        return model.process.log_posterior(output[:, None], x[:, None], sigma_s, sigma_t)[:, 0].exp()

    def affine_weights(self, model: HasNoise, t: PerRow, s: PerRow) -> AffineWeights:
        """Σ_{x_0} q(y | x, x_0)·p(x_0 | x)."""
        return reverse.posterior_weights(model.process, model.schedule.sigma(s), model.schedule.sigma(t))
