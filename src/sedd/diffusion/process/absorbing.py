"""Absorbing noise: a token is replaced by the mask."""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.diffusion import validate
from sedd.diffusion.categorical import AffineWeights
from sedd.diffusion.process.base import Process, Ratio, at_token, interpolate_log, log_odds
from sedd.diffusion.schedule import corruption_probability


@final
@dataclass(frozen=True)
class Absorbing(Process):
    """Noise that replaces a token by the mask, state N, for good.  [§2]

    Only masked positions change in reverse steps, so only they count in losses, and the entries of a score at unmasked
    positions are never read.

    Reference: Austin et al. 2021, "Structured Denoising Diffusion Models in Discrete State-Spaces", arXiv 2107.03006.
    """

    @property
    def num_states(self) -> int:
        """N + 1: the mask is the last state."""
        return self.vocab_size + 1

    @property
    def mask(self) -> int:
        """The id of the mask."""
        return self.vocab_size

    def rate(
        self, y: Int[Tensor, "*#s"], x: Int[Tensor, "*#s"], dtype: torch.dtype = torch.float64
    ) -> Float[Tensor, "*#s"]:
        """[y = M] − [y = x] for tokens x; 0 for the mask."""
        return torch.where(x == self.mask, 0, (y == self.mask).to(dtype) - (y == x).to(dtype))

    def transition(
        self, y: Int[Tensor, "*#s"], x: Int[Tensor, "*#s"], sigma: Float[Tensor, "*#s"]
    ) -> Float[Tensor, "*#s"]:
        """e^−σ·[y = x] + (1 − e^−σ)·[y = M] for tokens x; the mask stays."""
        validate.sigma(sigma)
        token = torch.where(y == x, torch.exp(-sigma), torch.where(y == self.mask, corruption_probability(sigma), 0))
        return torch.where(x == self.mask, (y == self.mask).to(token.dtype), token)

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.full(shape, self.mask, device=generator.device)

    def prior_sample(self, u: Float[Tensor, "*s"]) -> Int[Tensor, "*s"]:
        """Return masks."""
        return torch.full(u.shape, self.mask, device=u.device)

    def log_prior(self, x: Int[Tensor, "*#s"], sigma: Float[Tensor, "*#s"]) -> Float[Tensor, "*#s"]:
        """log(1 − e^−σ) for a mask, −σ − log N for a token."""
        validate.states(x, self.num_states)
        validate.sigma(sigma)
        return torch.where(x == self.mask, torch.log(corruption_probability(sigma)), -sigma - math.log(self.vocab_size))

    def prior_kl(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """e^−σ·log N."""
        validate.sigma(sigma)
        return torch.exp(-sigma) * math.log(self.vocab_size)

    def ratios(self, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Ratio:
        """At masked positions a_y = [y = x_0]/ω, ω = e^σ − 1.  [§4]"""
        validate.sigma(sigma)
        log_data = -log_odds(sigma)[..., None].expand(x_t.shape)
        return Ratio(log_data=log_data, log_rest=None)

    def is_noisy(self, x_t: Int[Tensor, "*s"]) -> Bool[Tensor, "*s"]:
        """Return where the mask is."""
        return x_t == self.mask

    @property
    def incoming_rate(self) -> float:
        """1: every token turns into the mask at rate 1."""
        return 1.0

    def log_score_shift(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """−log ω − log N, so that output 0 means that every token is equally likely."""
        return -log_odds(sigma) - math.log(self.vocab_size)

    def own_log_likelihood(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """0: a mask is none of the clean tokens."""
        return torch.zeros_like(sigma)

    def add_log_likelihood(
        self, logits: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L N"]:
        """Return the logits: every token becomes a mask with the same probability, and other positions are known."""
        return logits

    def log_marginal(self, log_p: Float[Tensor, "*b L N"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """log p_y − σ for tokens, log(1 − e^−σ) for the mask."""
        validate.sigma(sigma)
        sigma = sigma.to(log_p.dtype)[..., None, None]
        return torch.cat([log_p - sigma, (log_odds(sigma) - sigma).expand(*log_p.shape[:-1], 1)], -1)

    def mean_score(
        self, log_mean: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """s_y = p_y/ω."""
        self._check_mean(log_mean, x_t)
        validate.sigma(sigma)
        log_omega = log_odds(sigma.to(log_mean.dtype))[..., None, None]
        to_mask = log_omega.expand(*log_mean.shape[:-1], 1)  # the ratio of the mask to a token is ω
        return torch.cat([log_mean - log_omega, to_mask], -1).scatter(-1, x_t[..., None], 0)

    def marginal_score(
        self, log_p: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """s_y = p_y/ω at a mask; other positions have no use for a score."""
        return self.mean_score(log_p, x_t, sigma)

    def rescore(
        self,
        log_score: Float[Tensor, "*b L n"],
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L n"]:
        """s_y = S·p_y, where S = Σ_y s_y is that of ``log_score``: 1/ω for a denoiser, free for a score model."""
        total = log_score[..., : self.vocab_size].logsumexp(-1, keepdim=True)
        return torch.cat([log_mean + total, log_score[..., self.vocab_size :]], -1)

    def mix_log_scores(
        self, free: Float[Tensor, "*s n"], given: Float[Tensor, "*s n"], weight: float
    ) -> Float[Tensor, "*s n"]:
        """s_y = S·p_y with p_y ∝ s_y(x)^(1−γ)·s_y(x | label)^γ, and S the same mixture of the two Σ_y s_y.

        Not normalised, Σ_y would exceed 1/ω for γ > 1: masks would be revealed faster than noise makes them.
        """
        N = self.vocab_size
        free, given_tokens = free[..., :N], given[..., :N]
        log_sum = interpolate_log(free.logsumexp(-1, keepdim=True), given_tokens.logsumexp(-1, keepdim=True), weight)
        return torch.cat([interpolate_log(free, given_tokens, weight).log_softmax(-1) + log_sum, given[..., N:]], -1)

    def staggered_score(self, score: Float[Tensor, "*b L n"], dsigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """e^Δσ·s_y for tokens; s_M − (e^Δσ − 1)·Σ_y s_y for the mask."""
        validate.sigma(dsigma)
        dsigma = dsigma[..., None, None]
        tokens, mask = score[..., :-1], score[..., -1:]
        mask = mask - torch.expm1(dsigma) * tokens.sum(-1, keepdim=True)
        return torch.cat([torch.exp(dsigma) * tokens, mask], -1)

    def amplifies_rounding(self, dsigma: Float[Tensor, "*s"]) -> bool:
        """False: all terms that matter have the same sign."""
        return False

    def tweedie_weights(self, dsigma: Float[Tensor, "*s"]) -> AffineWeights:
        """A mask becomes y with weight (e^Δσ − 1)·s_y and stays with 1 − (e^Δσ − 1)·S."""
        odds = torch.expm1(dsigma)
        return AffineWeights(odds, torch.ones_like(odds), -odds)

    def denoising_weights(self, sigma: Float[Tensor, "*s"]) -> AffineWeights:
        """A mask becomes y in the proportion of the scores."""
        return AffineWeights(torch.ones_like(sigma))

    def posterior_weights(self, sigma_s: Float[Tensor, "*s"], sigma_t: Float[Tensor, "*s"]) -> AffineWeights:
        """A mask is revealed with probability ρ."""
        return AffineWeights(
            self.reveal(sigma_s, sigma_t),
            torch.zeros_like(sigma_s),
            corruption_probability(sigma_s) / corruption_probability(sigma_t),
        )

    def reveal(self, sigma_s: Float[Tensor, "*b"], sigma_t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """P(a mask at σ_t is a token at σ_s) = (e^Δσ − 1)/(e^σ_t − 1), which does not depend on the network.  [§9]"""
        validate.decreasing_sigma(sigma_s, sigma_t)
        return torch.exp(-sigma_s) * corruption_probability(sigma_t - sigma_s) / corruption_probability(sigma_t)

    def log_posterior(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L n"]:
        """A mask is revealed with probability ρ, as token y with probability ρ·p_y; a token stays."""
        self._check_mean(log_mean, x_t)
        sigma_s, sigma_t = (s.to(log_mean.dtype)[..., None, None] for s in (sigma_s, sigma_t))
        tokens = log_mean + torch.log(self.reveal(sigma_s, sigma_t))
        stays = torch.log(corruption_probability(sigma_s) / corruption_probability(sigma_t)).expand(
            *log_mean.shape[:-1], 1
        )  # log(1 − ρ)
        masked = torch.cat([tokens, stays], -1)
        token = torch.full_like(masked, -math.inf).scatter(-1, x_t[..., None], 0)
        return torch.where(self.is_noisy(x_t)[..., None], masked, token)

    def posterior_kl(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """−ρ·log p_{x_0} at masked positions."""
        self._check_mean(log_mean, x_t)
        validate.clean_tokens(x_0, self.vocab_size)
        revealed = self.reveal(sigma_s, sigma_t).to(log_mean.dtype)[..., None]
        return torch.where(self.is_noisy(x_t), -revealed * at_token(log_mean, x_0), 0)
