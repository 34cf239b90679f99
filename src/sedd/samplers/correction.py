"""Samplers that correct what they have drawn: Gibbs steps for noise of tokens, remasking (ReMDM) for masks.  [§9]"""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sedd import draws
from sedd.parameterization import HasNoise
from sedd.samplers.grid import Tweedie
from sedd.samplers.loop import POSITION, STEP, GridSampler, Rows, Times, draw_clean_tokens
from sedd.samplers.model import PerSample, Positions, Sequences, log_score_at
from sedd.schedule import corruption_probability
from sedd.tensors import PerSequence


@final
@dataclass(frozen=True)
class Gibbs(GridSampler):
    """A Tweedie step, then ``sites`` corrections: a random position is drawn again given all others.

    Where every state may be noise the score at a position is its conditional up to a factor, whatever is there:
    p_s(y | x_−i) = s_y / Σ s. Drawing from it leaves p_s unchanged, so corrections only remove error. Updating all
    positions at once would change p_s.
    """

    order: ClassVar[float] = 1.0  # of the step that is corrected
    assumes: ClassVar[str] = "uniform or hybrid noise, or noise by frequency"
    sites: int = 1
    """Positions that are drawn again after each step."""
    predictor: ClassVar[Tweedie] = Tweedie()  # the step that is corrected

    def __post_init__(self) -> None:
        if self.sites < 1:
            raise ValueError(f"sites is {self.sites}; there must be at least 1 correction per step")

    def check(self, model: Any) -> None:
        if model.process.only_masks:
            raise ValueError("sampler gibbs corrects tokens; under the model's noise only masks change: use remask")

    def expected_calls(self, model: HasNoise, times: Times, blanks: int) -> float:
        return float((1 + self.sites) * (len(times) - 2) + 1) if blanks else 0.0

    def step(self, x: Sequences, t: PerSample, s: PerSample, rows: Rows) -> Sequences:
        x = self.predictor.step(x, t, s, rows)
        sigma, row = rows.schedule.sigma(s), torch.arange(len(x), device=x.device)
        for k in range(self.sites):
            u = rows.rng(x.shape[-1], rows.step * self.sites + k, POSITION)
            keys = torch.where(rows.free, u[..., 0], -1.0)
            at = row, keys.argmax(-1)  # the free position with the largest of independent uniforms is a uniform choice
            score = log_score_at(rows.model.model, rows.hidden(x, sigma)[at], x[at], sigma).exp()
            drawn = draws.sample_inverse_cdf(score, u[at][:, 1])
            x = x.index_put(at, torch.where(rows.free[at], drawn, x[at]))
        return x


@final
@dataclass(frozen=True)
class Remask(GridSampler):
    """A step that masks each token again with probability r, and reveals more masks to make up for it.

    With α = e^−σ the share of tokens, r is at most r_max = (1 − α_s)/α_t, so that the share of tokens at s is still
    α_s. ``cap`` takes r = min(η, r_max) and ``rescale`` r = η·r_max. ``loop`` steps as usual down to time t_on, holds
    the noise level there until t_off while tokens are exchanged with r = η, and then goes on to 0.

    Reference: Wang et al. 2025, "Remasking Discrete Diffusion Models with Inference-Time Scaling", arXiv 2503.00307.
    """

    order: ClassVar[float] = 1.0  # if η shrinks like 1/steps; less if it does not
    assumes: ClassVar[str] = "absorbing noise; a score's distribution of a mask is normalised"
    strategy: str = "cap"
    """How the probability r of masking a token again is chosen."""
    eta: float = 0.02
    """η: for ``cap`` and ``loop`` the largest probability r, for ``rescale`` the fraction r/r_max."""
    t_on: float = 0.55
    """For ``loop``: the time at which tokens begin to be exchanged."""
    t_off: float = 0.05
    """For ``loop``: the time at which that ends."""

    def __post_init__(self) -> None:
        if self.strategy not in ("cap", "rescale", "loop"):
            raise ValueError(f"strategy is {self.strategy!r}; choose one of cap, rescale, loop")
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta is {self.eta}; it must lie in [0, 1]")
        if not 0 <= self.t_off < self.t_on <= 1:
            raise ValueError(f"t_on is {self.t_on} and t_off is {self.t_off}; they must satisfy 0 ≤ t_off < t_on ≤ 1")

    def check(self, model: Any) -> None:
        if not model.process.only_masks:
            raise ValueError("sampler remask masks tokens again; under the model's noise tokens change too: use gibbs")

    def grid(self, times: PerSequence) -> PerSequence:
        """Return the times at which the noise level is read: constant from t_on to t_off with ``loop``."""
        if self.strategy != "loop":
            return times
        rest = times / self.t_off * self.t_on if self.t_off > 0 else times
        return torch.where(times > self.t_on, times, torch.where(times > self.t_off, self.t_on, rest))

    def rates(self, model: HasNoise, t: PerSequence, s: PerSequence) -> tuple[PerSequence, PerSequence]:
        """Return P(a token is masked) and P(a mask is revealed) in the step from t to s."""
        sigma_t, sigma_s = model.schedule.sigma(t), model.schedule.sigma(s)
        alpha_t, alpha_s = torch.exp(-sigma_t), torch.exp(-sigma_s)
        most = (corruption_probability(sigma_s) / alpha_t).clamp_max(1)
        remasked = self.eta * most if self.strategy == "rescale" else most.clamp_max(self.eta)
        if self.strategy == "loop":
            remasked = torch.where(t == s, remasked, 0)
        return remasked, (alpha_s - (1 - remasked) * alpha_t) / corruption_probability(sigma_t)

    def changes(
        self, x: Sequences, t: PerSample, s: PerSample, rows: Rows
    ) -> tuple[Float[Tensor, "b L"], Positions, Positions]:
        """Draw the masks to reveal and the tokens to mask, by uniforms alone; return those first."""
        remasked, revealed = self.rates(rows, t, s)
        u, masks = rows.uniforms(STEP)[..., 0], rows.noisy(x)
        return u, masks & (u < revealed[:, None]), rows.free & ~masks & (u < remasked[:, None])

    def needs_model(self, rows: Rows, t: PerSample, s: PerSample) -> Bool[Tensor, " b"]:
        return self.changes(rows.x, t, s, rows)[1].any(-1)

    def step(self, x: Sequences, t: PerSample, s: PerSample, rows: Rows) -> Sequences:
        u, to_reveal, to_mask = self.changes(x, t, s, rows)
        y = draw_clean_tokens(x, rows.schedule.sigma(t), to_reveal, rows)
        return torch.where(to_mask, rows.process.prior_sample(u), y)
