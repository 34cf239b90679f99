"""Uniform noise: a token is replaced by a random one."""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.diffusion import validate
from sedd.diffusion.categorical import AffineWeights
from sedd.diffusion.divergence import score_entropy
from sedd.diffusion.process.base import Process, Ratio, at_token, interpolate_log, log_odds, sum_by_value
from sedd.diffusion.schedule import corruption_probability


@final
@dataclass(frozen=True)
class Uniform(Process):
    """Noise that replaces a token by a uniformly random one, itself included: Q = 11ᵀ/N − I.  [§2]

    Reference: Hoogeboom et al. 2021, "Argmax Flows and Multinomial Diffusion: Learning Categorical Distributions",
    arXiv 2102.05379.
    """

    @property
    def num_states(self) -> int:
        """N: there is no mask."""
        return self.vocab_size

    def rate(
        self, y: Int[Tensor, "*#s"], x: Int[Tensor, "*#s"], dtype: torch.dtype = torch.float64
    ) -> Float[Tensor, "*#s"]:
        """1/N − [y = x]."""
        return 1 / self.vocab_size - (y == x).to(dtype)

    def transition(
        self, y: Int[Tensor, "*#s"], x: Int[Tensor, "*#s"], sigma: Float[Tensor, "*#s"]
    ) -> Float[Tensor, "*#s"]:
        """e^−σ·[y = x] + (1 − e^−σ)/N."""
        validate.sigma(sigma)
        return torch.where(y == x, torch.exp(-sigma), 0) + corruption_probability(sigma) / self.vocab_size

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randint(self.vocab_size, shape, generator=generator, device=generator.device)

    def prior_sample(self, u: Float[Tensor, "*s"]) -> Int[Tensor, "*s"]:
        """Map uniforms to uniform tokens."""
        return (u * self.vocab_size).long()

    def log_prior(self, x: Int[Tensor, "*#s"], sigma: Float[Tensor, "*#s"]) -> Float[Tensor, "*#s"]:
        """−log N."""
        validate.states(x, self.num_states)
        validate.sigma(sigma)
        return torch.full_like(x * sigma, -math.log(self.vocab_size))

    def prior_kl(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """[D(1 + (N−1)e^−σ) + (N−1)·D(1 − e^−σ)]/N with D(u) = u log u − u + 1, which is score entropy at s = 1."""
        validate.sigma(sigma)
        alpha, others = torch.exp(-sigma.double()), self.vocab_size - 1
        log_same, log_other = torch.log1p(others * alpha), torch.log1p(-alpha)
        log_one = torch.zeros_like(alpha)
        return ((score_entropy(log_one, log_same) + others * score_entropy(log_one, log_other)) / self.vocab_size).to(
            sigma.dtype
        )

    def ratios(self, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Ratio:
        """With r = ω/(ω + N), ω = e^σ − 1: all r where x_t = x_0; else 1/r at x_0 and 1 elsewhere.  [§4]"""
        validate.sigma(sigma)
        log_r = self._log_r(sigma)[..., None]
        return Ratio(log_data=-log_r, log_rest=torch.where(x_t == x_0, log_r, 0))

    def _log_r(self, sigma: Tensor) -> Tensor:
        """log ω/(ω + N), by the logistic function: 1 − N/(ω + N) would round to 0."""
        return torch.nn.functional.logsigmoid(log_odds(sigma) - math.log(self.vocab_size))

    def is_noisy(self, x_t: Int[Tensor, "*s"]) -> Bool[Tensor, "*s"]:
        """Return True everywhere: noise may have changed any token."""
        return torch.ones_like(x_t, dtype=torch.bool)

    @property
    def incoming_rate(self) -> float:
        """1/N."""
        return 1 / self.vocab_size

    def log_score_shift(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """0: a uniform-noise network's output is the log-score."""
        return torch.zeros_like(sigma)

    def own_log_likelihood(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """log(1 + N/ω)."""
        return -self._log_r(sigma)

    def add_log_likelihood(
        self, logits: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L N"]:
        """Add log(1 + N/ω) to the logit of x_t."""
        self._check_mean(logits, x_t)
        validate.sigma(sigma)
        own = self.own_log_likelihood(sigma.to(logits.dtype))[..., None, None]
        return logits.scatter_add(-1, x_t[..., None], own.expand(*x_t.shape, 1))

    def log_marginal(self, log_p: Float[Tensor, "*b L N"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """log(e^−σ·p_y + (1 − e^−σ)/N)."""
        validate.sigma(sigma)
        sigma = sigma.to(log_p.dtype)[..., None, None]
        return torch.logaddexp(log_p - sigma, log_odds(sigma) - sigma - math.log(self.vocab_size))

    def mean_score(
        self, log_mean: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """s_y = 1 + p_y·N/ω − p_{x_t}·N/(ω + N)  [§5, where 1/r − 1 = N/ω and 1 − r = N/(ω + N)].

        Near s = 1 (much noise) by log1p; elsewhere as the sum (1 − p_{x_t}) + r·p_{x_t} + p_y·N/ω of positive
        terms, in which little noise cancels nothing.
        """
        self._check_mean(log_mean, x_t)
        validate.sigma(sigma)
        sigma = sigma.to(log_mean.dtype)[..., None]
        here, elsewhere = _split(log_mean, x_t)
        always = torch.logaddexp(elsewhere, self._log_r(sigma) + here)[..., None]
        gain = log_mean + (math.log(self.vocab_size) - log_odds(sigma))[..., None]
        loss = here + torch.nn.functional.logsigmoid(math.log(self.vocab_size) - log_odds(sigma))
        change = gain.exp() - loss.exp()[..., None]
        log_score = torch.where(change.abs() < 0.5, torch.log1p(change.clamp(-0.5, 0.5)), torch.logaddexp(always, gain))
        return log_score.scatter(-1, x_t[..., None], 0)

    def marginal_score(
        self, log_p: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """s_y = (p_y + ω/N)/(p_{x_t} + ω/N); near 1, where much noise takes it, by log1p of the difference from 1."""
        self._check_mean(log_p, x_t)
        validate.sigma(sigma)
        log_p = log_p - log_p.logsumexp(-1, keepdim=True)  # log_softmax of 50,000 float32 may be off by 5e-5
        noise = log_odds(sigma.to(log_p.dtype))[..., None, None] - math.log(self.vocab_size)
        here = log_p.gather(-1, x_t[..., None])
        below = torch.logaddexp(here, noise)
        change = (log_p - below).exp() - (here - below).exp()
        far = torch.logaddexp(log_p, noise) - below
        return torch.where(change.abs() < 0.5, torch.log1p(change.clamp(-0.5, 0.5)), far).scatter(-1, x_t[..., None], 0)

    def rescore(
        self,
        log_score: Float[Tensor, "*b L n"],
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L n"]:
        """Return the score of the denoiser, which determines all of it under uniform noise."""
        return self.mean_score(log_mean, x_t, sigma)

    def mix_log_scores(
        self, free: Float[Tensor, "*s n"], given: Float[Tensor, "*s n"], weight: float
    ) -> Float[Tensor, "*s n"]:
        """The score of p_t(x)^(1−γ)·p_t(x | label)^γ: ratios need no normaliser."""
        return interpolate_log(free, given, weight)

    def staggered_score(self, score: Float[Tensor, "*b L n"], dsigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """s + (e^Δσ − 1)·(s − the mean of s): with much noise all s are near 1, where e^Δσ·s and its mean cancel."""
        validate.sigma(dsigma)
        return score + torch.expm1(dsigma[..., None, None]) * (score - score.mean(-1, keepdim=True))

    def amplifies_rounding(self, dsigma: Float[Tensor, "*s"]) -> bool:
        """Whether some Δσ is above 7: errors of the score grow as e^Δσ, and float32 has 7 digits."""
        return bool((dsigma > 7).any())

    def tweedie_weights(self, dsigma: Float[Tensor, "*s"]) -> AffineWeights:
        """P_Δσ(x, y)·(e^Δσ·s_y − (e^Δσ − 1)/N·(S + s_x))."""
        each = torch.expm1(dsigma) / self.vocab_size
        go = corruption_probability(dsigma) / self.vocab_size
        stay = torch.exp(-dsigma) + go
        return AffineWeights(
            go * torch.exp(dsigma), stay * (torch.exp(dsigma) - each), -stay * each, -go * each, -go * each
        )

    def denoising_weights(self, sigma: Float[Tensor, "*s"]) -> AffineWeights:
        """The Tweedie weights of the step to σ = 0."""
        return self.tweedie_weights(sigma)

    def posterior_weights(self, sigma_s: Float[Tensor, "*s"], sigma_t: Float[Tensor, "*s"]) -> AffineWeights:
        """P_Δ(x, y)·Σ_{x_0} P_s(y, x_0)·s_{x_0}/P_t(x, x_0)."""
        (stay_s, go_s), (stay_t, go_t), (stay, go) = (
            (torch.exp(self._log_stay(a)), torch.exp(self._log_go(a))) for a in (sigma_s, sigma_t, sigma_t - sigma_s)
        )
        here = torch.exp(-sigma_s)
        return AffineWeights(
            go * here / go_t, stay * stay_s / stay_t, stay * go_s / go_t, go * go_s / go_t, go * go_s / stay_t
        )

    def log_posterior(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L n"]:
        """log P_Δ(x_t, y) + log Σ_{x_0} P_s(y, x_0)·w(x_0), w = p(x_0 | x_t)/P_t(x_t, x_0)."""
        self._check_mean(log_mean, x_t)
        validate.decreasing_sigma(sigma_s, sigma_t)
        sigma_s, sigma_t = (s.to(log_mean.dtype)[..., None] for s in (sigma_s, sigma_t))
        here, elsewhere = _split(log_mean, x_t)
        stay_t, go_t = self._log_stay(sigma_t), self._log_go(sigma_t)
        all_weight = torch.logaddexp(elsewhere - go_t, here - stay_t) + self._log_go(sigma_s)
        weight = (log_mean - go_t[..., None]).scatter(-1, x_t[..., None], (here - stay_t)[..., None])
        down = torch.logaddexp(weight - sigma_s[..., None], all_weight[..., None])
        step_stay, step_go = (f(sigma_t - sigma_s) for f in (self._log_stay, self._log_go))
        stay = at_token(down, x_t) + step_stay
        return (down + step_go[..., None]).scatter(-1, x_t[..., None], stay[..., None])

    def _log_stay(self, sigma: Tensor) -> Tensor:
        """log P_σ(x, x)."""
        return torch.log(torch.exp(-sigma) + corruption_probability(sigma) / self.vocab_size)

    def _log_go(self, sigma: Tensor) -> Tensor:
        """log P_σ(y, x), y ≠ x."""
        return torch.log(corruption_probability(sigma)) - math.log(self.vocab_size)

    def posterior_kl(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """Σ_y D(p_y, q_y) with the score-entropy divergence: since p and q sum to 1 it is the KL, term by term ≥ 0."""
        validate.clean_tokens(x_0, self.vocab_size)
        log_p = self.log_posterior(log_mean, x_t, sigma_s, sigma_t)
        sigma_s, sigma_t = (s.to(log_mean.dtype)[..., None] for s in (sigma_s, sigma_t))
        step, same = sigma_t - sigma_s, x_t == x_0
        log_p_t = torch.where(same, self._log_stay(sigma_t), self._log_go(sigma_t))  # log P_t(x_t, x_0)
        q = Ratio(
            log_data=self._log_go(step) + self._log_stay(sigma_s) - log_p_t,
            log_rest=self._log_go(step) + self._log_go(sigma_s) - log_p_t,
        )
        last = torch.where(same, self._log_stay(sigma_s), self._log_go(sigma_s))  # log P_s(x_t, x_0)
        stay = score_entropy(at_token(log_p, x_t), self._log_stay(step) + last - log_p_t)
        return sum_by_value(score_entropy, log_p, x_t, x_0, q) + stay


def _split(log_mean: Tensor, x_t: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p_{x_t} and log(1 − p_{x_t}), the second by a sum: a difference would be lost to rounding."""
    others = log_mean.scatter(-1, x_t[..., None], -math.inf)
    return at_token(log_mean, x_t), others.logsumexp(-1)
