"""Noise processes: what noise does to one token. Every position is corrupted independently.  [§1–§4]

Noise replaces a token by a draw from a distribution π. `Absorbing`, `Uniform`, `Hybrid` and `Frequency` are four
choices of π, and `Process` has the closed forms of all of them: 50,000 states cost a gather or a scalar where a matrix
would not fit.

Shapes: token ids are ``(*b, L)``, the total noise ``sigma`` is ``(*b,)``, scores are ``(*b, L, num_states)``.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from sedd import tensors
from sedd.divergence import Divergence, score_entropy
from sedd.draws import uniforms
from sedd.schedule import corruption_probability
from sedd.tensors import PerPosition, PerSequence, PerState, PerToken, Tokens, upcast

States = Int[Tensor, "*#s"]
Values = Float[Tensor, "*#s"]


def at_token(x: PerState, y: Tokens) -> PerPosition:
    """Return the entry at y of every position."""
    return x.gather(-1, y[..., None]).squeeze(-1)


def log_odds(sigma: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return log ω, ω = e^σ − 1: the log odds that noise has replaced a token; stable for every σ > 0."""
    log_odds = sigma + torch.log(-torch.expm1(-sigma))
    return log_odds.clamp_min(-70.0)  # σ = 0 is allowed; −∞ would make NaN of ratios that have probability 0


def reveal_probability(sigma_s: PerSequence, sigma_t: PerSequence) -> PerSequence:
    """P(a mask at σ_t is a token at σ_s) = (e^Δσ − 1)/(e^σ_t − 1), where only masks are noise.  [§9]"""
    return torch.exp(-sigma_s) * corruption_probability(sigma_t - sigma_s) / corruption_probability(sigma_t)


class Ratio(NamedTuple):
    """The denoising ratios a_y of all y ≠ x_t as logarithms: one value at y = x_0, and those of every other y."""

    log_data: Float[Tensor, "*b #L"]
    log_rest: Float[Tensor, "*b L #n"] | None  # None: they are 0


@dataclass(frozen=True)
class Process:
    """Noise that replaces a token by a draw from π: P_σ(y, x) = α[y = x] + mπ_y, α = e^−σ, m = 1 − α.  [§2]

    π is the mask with probability ``mask_share``, and else a token with probabilities w, which are 1/N unless
    ``frequencies`` are given. The prior of the bound is αw + mπ: the noise of tokens drawn from w. With ω = e^σ − 1,
    ratios and scores follow from r_x = ωπ_x/(1 + ωπ_x).

    A subclass for another Markov chain overrides the closed forms, from `rate` to `staggered_score`; the guide to
    extensions computes them from a rate matrix.

    Reference: Campbell et al. 2022, "A Continuous Time Framework for Discrete Denoising Models", arXiv 2205.14987.
    """

    vocab_size: int
    _: KW_ONLY
    mask_share: float = 0.0
    frequencies: Sequence[int | float] | None = field(default=None, repr=False)
    """How often noise draws each token, in any unit; None: equally often."""
    has_mask: bool = field(init=False, repr=False, compare=False)
    """Whether a token may become a mask."""
    only_masks: bool = field(init=False, repr=False, compare=False)
    """Whether only masks are noise, so that every token is known to be clean; else any token may be noise."""
    mask: int = field(init=False, repr=False, compare=False)
    """The id of the mask, if there is one."""
    num_states: int = field(init=False, repr=False, compare=False)
    """The number of states of a token, the mask included."""
    has_fused_forms: bool = field(init=False, repr=False, compare=False)
    """Whether the fused loss and the fused draws cover this process: its ratios take two values."""

    def __post_init__(self) -> None:
        tensors.check_vocab_size(self.vocab_size)
        if not 0 <= self.mask_share <= 1:
            raise ValueError(f"mask_share is {self.mask_share}; it is a probability and must lie in [0, 1]")
        derived: dict[str, object] = {
            "has_mask": self.mask_share > 0,
            "only_masks": self.mask_share == 1,
            "mask": self.vocab_size,
            "num_states": self.vocab_size + (self.mask_share > 0),
            "has_fused_forms": isinstance(self, Absorbing | Uniform),
        }
        if self.frequencies is not None:
            found, total = tuple(map(float, self.frequencies)), math.fsum(self.frequencies)
            if len(found) != self.vocab_size or not (min(found) > 0 and total < math.inf):
                raise ValueError(
                    f"frequencies hold {len(found)} numbers, the least of them {min(found, default=math.nan):g}; each "
                    f"of the {self.vocab_size} tokens needs one above 0"
                )
            derived["frequencies"] = tuple(value / total for value in found)
        self.__dict__.update(derived)  # a frozen dataclass takes no assignment

    def is_noisy(self, x_t: Int[Tensor, "*s"]) -> Bool[Tensor, "*s"]:
        """Return where noise may have changed the token: the positions that reverse steps may change."""
        return x_t == self.mask if self.only_masks else torch.ones_like(x_t, dtype=torch.bool)

    def _states(self, device: torch.device | None = None) -> Tensor:
        return torch.arange(self.num_states, device=device)

    @cached_property
    def _frequencies(self) -> dict[torch.device, Tensor]:
        return {}

    def _weight(self, x: Tensor) -> Tensor:
        """w of the given tokens, anything for a mask; one number where all are equal."""
        if self.frequencies is None:
            return torch.full((), 1 / self.vocab_size, dtype=torch.float64, device=x.device)
        if x.device not in self._frequencies:
            self._frequencies[x.device] = torch.tensor(self.frequencies, dtype=torch.float64, device=x.device)
        return self._frequencies[x.device][x.clamp_max(self.vocab_size - 1)]

    def _log_weight(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if self.frequencies is None:
            return torch.full((), -math.log(self.vocab_size), dtype=dtype, device=x.device)
        return self._weight(x).log().to(dtype)

    def _log_pi(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        token = self._log_weight(x, dtype) + _log(1 - self.mask_share)
        return token if not self.has_mask else torch.where(x == self.mask, _log(self.mask_share), token)

    def _log_pi_over(self, x_t: Tensor, dtype: torch.dtype) -> Tensor | float:
        """log π_y − log π_{x_t} for every y; 0.0 where all are equal."""
        if self.frequencies is None and not self.has_mask:
            return 0.0
        return self._log_pi(self._states(x_t.device), dtype) - self._log_pi(x_t, dtype)[..., None]

    def _times_pi(self, m: Tensor, y: Tensor) -> Tensor:
        token = m / self.vocab_size if self.frequencies is None else m * self._weight(y).to(m.dtype)
        token = token * (1 - self.mask_share)
        return token if not self.has_mask else torch.where(y == self.mask, m * self.mask_share, token)

    def _pi(self, y: Tensor) -> Tensor:
        return self._times_pi(torch.ones((), dtype=torch.float64, device=y.device), y)

    def _log_r(self, x: Tensor, sigma: Tensor) -> Tensor:
        """log r_x, by the logistic function: one minus a share would round to 0."""
        return logsigmoid(log_odds(sigma) + self._log_pi(x, sigma.dtype))

    def rate(self, y: States, x: States, dtype: torch.dtype = torch.float64) -> Values:
        """Q(y, x) = π_y − [y = x]: the rate from x to y; for y = x, minus the rate of leaving x.  [§2]"""
        return self._pi(y).to(dtype) - (y == x).to(dtype)

    def incoming_rates(self, x: Int[Tensor, "*s"]) -> Float[Tensor, "*s #n"]:
        """Q(x, y) = π_x, the rates from every y ≠ x into x; the entry at y = x has no meaning."""
        return self._pi(x).expand(x.shape)[..., None]

    def transition(self, y: States, x: States, sigma: Values) -> Values:
        """P_σ(y, x) = α[y = x] + mπ_y: the probability of y at noise σ, given x without noise.  [§2]"""
        p = torch.where(y == x, torch.exp(-sigma), 0) + self._times_pi(corruption_probability(sigma), y)
        return torch.where(x == self.mask, (y == self.mask).to(p.dtype), p) if self.only_masks else p

    def rate_matrix(self, dtype: torch.dtype = torch.float64) -> Float[Tensor, "n n"]:
        """Q, dense: for small spaces."""
        return self.rate(self._states()[:, None], self._states(), dtype)

    def transition_matrix(self, sigma: PerSequence) -> Float[Tensor, "*b n n"]:
        """P_σ, dense: for small spaces."""
        states = self._states(sigma.device)
        return self.transition(states[:, None], states, sigma[..., None, None])

    def corrupt(self, x_0: Tokens, sigma: PerSequence, generator: torch.Generator) -> Tokens:
        """Draw x_t given x_0 at total noise σ."""
        tensors.check_clean_tokens(x_0, self.vocab_size)
        tensors.check_sigma(sigma)
        replaced = uniforms(tuple(x_0.shape), generator) < corruption_probability(sigma.double())[..., None]
        if self.only_masks:
            noise = torch.full(x_0.shape, self.mask, device=generator.device)
        elif self.has_fused_forms:
            noise = torch.randint(self.vocab_size, x_0.shape, generator=generator, device=generator.device)
        else:
            noise = self.prior_sample(uniforms(tuple(x_0.shape), generator))
        return torch.where(replaced, noise, x_0)

    def corrupt_by(self, x_0: Tokens, sigma: PerSequence, u: Float[Tensor, "*b L 2"]) -> Tokens:
        """Make x_t from x_0 and uniforms: the first decides whether a token is replaced, the second by what."""
        return torch.where(u[..., 0] < corruption_probability(sigma)[..., None], self.prior_sample(u[..., 1]), x_0)

    def prior_sample(self, u: Float[Tensor, "*s"]) -> Int[Tensor, "*s"]:
        """Map uniforms to pure noise, from which samplers start: draws from π by its distribution function."""
        if self.only_masks:  # they carry no information: starting from them is exact, while the prior allows tokens
            return torch.full(u.shape, self.mask, device=u.device)
        share = (u - self.mask_share) / (1 - self.mask_share)
        if self.frequencies is None:
            token = (share * self.vocab_size).long()
        else:
            ends = self._weight(self._states(u.device)[: self.vocab_size]).cumsum(0)
            token = torch.searchsorted(ends, share.double(), right=True)
        return torch.where(u < self.mask_share, self.mask, token.clamp(0, self.vocab_size - 1))

    def log_prior(self, x: States, sigma: Values) -> Values:
        """log(αw_x + mπ_x), the prior of the bound at total noise σ.  [§8]"""
        log_weight, log_m = self._log_weight(x, sigma.dtype), torch.log(corruption_probability(sigma))
        if not self.has_mask:
            return log_weight + torch.zeros_like(x * sigma)
        token = torch.logaddexp(-sigma, log_m + _log(1 - self.mask_share)) + log_weight
        return torch.where(x == self.mask, log_m + _log(self.mask_share), token)

    def prior_kl(self, x_0: Tokens, sigma: PerSequence) -> PerPosition:
        """KL(P_σ(·|x_0) ‖ prior) in nats per token.  [§8]

        Σ_y w_y D(P_σ(y|x_0)/w_y) with D(u) = u log u − u + 1, which is score entropy at s = 1; a mask adds nothing.
        Where only masks are noise it is −α log w_{x_0}.
        """
        levels = sigma[..., None].expand(x_0.shape)
        if self.only_masks:
            return torch.exp(-levels) * -self._log_weight(x_0, sigma.dtype)
        alpha = torch.exp(-levels.double())
        tokens = 1 - self.mask_share * (1 - alpha)  # the probability of a token, which the prior has as well
        others = self.vocab_size - 1 if self.frequencies is None else 1 / self._weight(x_0) - 1
        log_same, log_other = torch.log1p(others * (alpha / tokens)), torch.log1p(-alpha / tokens)
        same, other = (score_entropy(torch.zeros_like(log_a), log_a) for log_a in (log_same, log_other))
        return (tokens * ((same + others * other) / (others + 1))).to(sigma.dtype)

    def ratios(self, x_t: Tokens, x_0: Tokens, sigma: PerSequence) -> Ratio:
        """a_y = P_σ(y, x_0)/P_σ(x_t, x_0) for y ≠ x_t, where noise may have led to x_t.  [§4]

        They are π_y/π_{x_t} times r_{x_t} where x_t = x_0; else times 1/r_{x_0} at y = x_0. Where only masks are noise
        they are [y = x_0]/ω at masks.
        """
        if self.only_masks:
            return Ratio(-log_odds(sigma)[..., None].expand(x_t.shape), None)
        over, levels = self._log_pi_over(x_t, sigma.dtype), sigma[..., None]
        log_data = self._log_pi(x_0, sigma.dtype) - self._log_pi(x_t, sigma.dtype) - self._log_r(x_0, levels)
        return Ratio(log_data, torch.where(x_t == x_0, self._log_r(x_t, levels), 0)[..., None] + over)

    def denoising(
        self, divergence: Divergence, log_score: PerState, x_t: Tokens, x_0: Tokens, sigma: PerSequence
    ) -> PerPosition:
        """Σ_{y≠x_t} Q(x_t, y)·D(s_y, a_y) against the denoising ratios; 0 where noise cannot have led to x_t.  [§4]"""
        log_score = upcast(log_score)
        ratio = self.ratios(x_t, x_0, sigma.to(log_score.dtype))
        rest = divergence.sum_except(torch.stack([x_t, x_0], -1), log_score, ratio.log_rest)
        data = divergence(at_token(log_score, x_0), ratio.log_data)
        total = rest + torch.where(x_t == x_0, 0, data)
        return torch.where(self.is_noisy(x_t), self._pi(x_t).to(total.dtype) * total, 0)

    def score_entropy(self, log_score: PerState, x_t: Tokens, x_0: Tokens, sigma: PerSequence) -> PerPosition:
        """Σ_{y≠x_t} Q(x_t, y)·[s_y − a_y log s_y + K(a_y)], the integrand of the bound but for σ'.  [§4]"""
        return self.denoising(score_entropy, log_score, x_t, x_0, sigma)

    def base_log_score(self, x_t: Tokens, sigma: PerSequence) -> Float[Tensor, "*b #L #n"]:
        """Return the log-score of the prior, which `ScoreModel` adds to a network's output.  [§5]

        It is −log ω + log w_y at masks where only they are noise, and 0 under uniform noise.
        """
        if self.only_masks:
            return -log_odds(sigma)[..., None, None] + self._log_weight(self._states(x_t.device), sigma.dtype)
        if self.frequencies is None and not self.has_mask:
            return torch.zeros_like(sigma)[..., None, None]
        log_prior = self.log_prior(self._states(x_t.device), sigma[..., None])
        return log_prior[..., None, :] - log_prior.gather(-1, x_t)[..., None]

    def add_log_likelihood(self, logits: PerToken, x_t: Tokens, sigma: PerSequence) -> PerToken:
        """Add log P_σ(x_t, x_0) up to a constant to the logits of x_0, that is log 1/r_{x_t} at the token x_t.  [§5]"""
        if self.only_masks:
            return logits  # every token becomes a mask with the same probability, and other positions are known
        own = -self._log_r(x_t, sigma.to(logits.dtype)[..., None]).expand(x_t.shape)
        own = own if not self.has_mask else torch.where(x_t == self.mask, 0, own)
        return logits.scatter_add(-1, x_t.clamp_max(self.vocab_size - 1)[..., None], own[..., None])

    def log_marginal(self, log_p: PerToken, sigma: PerSequence) -> PerState:
        """log Σ_{x_0} P_σ(y, x_0)·p(x_0) = log(αp_y + mπ_y): the distribution of the noisy token.  [§5]"""
        sigma = sigma.to(log_p.dtype)[..., None, None]
        noise = log_odds(sigma) - sigma + self._log_pi(self._states(log_p.device), log_p.dtype)
        return torch.logaddexp(self._with_mask(log_p) - sigma, noise)

    def _with_mask(self, log_p: Tensor) -> Tensor:
        return log_p if not self.has_mask else pad(log_p, (0, 1), value=-math.inf)  # it is none of the clean tokens

    def marginal_score(self, log_p: PerToken, x_t: Tokens, sigma: PerSequence) -> PerState:
        """Return the log of the score s_y = p_σ(y)/p_σ(x_t), where p_σ = Σ_{x_0} P_σ(·, x_0)·p(x_0).  [§5]

        s_y = (p_y + ωπ_y)/(p_{x_t} + ωπ_{x_t}); where only masks are noise, s_y = p_y/ω at a mask. Much noise takes s_y
        to π_y/π_{x_t}: near it, by log1p of the relative difference.
        """
        log_omega = log_odds(sigma.to(log_p.dtype))[..., None, None]
        if self.only_masks:
            to_mask = log_omega.expand(*log_p.shape[:-1], 1)  # the ratio of the mask to a token is ω
            return torch.cat([log_p - log_omega, to_mask], -1).scatter(-1, x_t[..., None], 0)
        # log_softmax of 50,000 float32 may be off by 5e-5
        log_p = self._with_mask(log_p - log_p.logsumexp(-1, keepdim=True))
        here, over = log_p.gather(-1, x_t[..., None]), self._log_pi_over(x_t, log_p.dtype)
        below = torch.logaddexp(here, log_omega + self._log_pi(x_t, log_p.dtype)[..., None])
        noise = log_omega + self._log_pi(self._states(x_t.device), log_p.dtype)
        change = (log_p - (below + over)).exp() - (here - below).exp()
        near, far = torch.log1p(change.clamp(-0.5, 0.5)), torch.logaddexp(log_p, noise) - below
        near = near if isinstance(over, float) else near + over
        return torch.where(change.abs() < 0.5, near, far).scatter(-1, x_t[..., None], 0)

    def staggered_score(self, score: PerState, dsigma: PerSequence) -> PerState:
        """exp(−Δσ Q) s: the ratios p_{σ−Δσ}(y)/p_σ(x) of the lower noise level to the present one.  [§9]

        s_y + (e^Δσ − 1)·(s_y − π_y Σ_z s_z): with much noise s is near π up to a factor, and little is left of it.
        Where only masks are noise, e^Δσ·s_y for tokens and s_M − (e^Δσ − 1)·Σ_y s_y for the mask.
        """
        dsigma = dsigma[..., None, None]
        if self.only_masks:
            tokens, mask = score[..., :-1], score[..., -1:]
            kept = mask - torch.expm1(dsigma) * tokens.sum(-1, keepdim=True)
            return torch.cat([torch.exp(dsigma) * tokens, kept], -1)
        noise = self._times_pi(score.sum(-1, keepdim=True), self._states(score.device))
        return score + torch.expm1(dsigma) * (score - noise)

    # What follows from these closed forms, for every chain

    def leave_one_out(self, log_mean: PerToken, x_t: Tokens, sigma: PerSequence) -> PerToken:
        """Return log p(x_0 | all noisy tokens but its own) of a denoiser p(x_0 | x_t), up to a constant.  [§5]"""
        return log_mean - self.add_log_likelihood(torch.zeros_like(log_mean), x_t, sigma)

    def mean_score(self, log_mean: PerToken, x_t: Tokens, sigma: PerSequence) -> PerState:
        """Return the log of the score s_y = E[a_y(x_0) | x_t] of a denoiser p(x_0 | x_t).  [§3, §5]"""
        return self.marginal_score(self.leave_one_out(log_mean, x_t, sigma), x_t, sigma)

    def log_posterior(self, log_mean: PerToken, x_t: Tokens, sigma_s: PerSequence, sigma_t: PerSequence) -> PerState:
        """log Σ_{x_0} q(x_s | x_t, x_0)·p(x_0 | x_t) = log P_Δσ(x_t, x_s)·p_σs(x_s)/p_σt(x_t).  [§6]

        This is a denoiser's reverse step from σ_t to σ_s < σ_t; p_σ is the marginal of its `leave_one_out`.
        """
        sigma_s, sigma_t = sigma_s.to(log_mean.dtype), sigma_t.to(log_mean.dtype)
        log_p = self.leave_one_out(log_mean, x_t, sigma_t).log_softmax(-1)
        step = self.transition(x_t[..., None], self._states(x_t.device), (sigma_t - sigma_s)[..., None, None])
        before = self.log_marginal(log_p, sigma_t).gather(-1, x_t[..., None])
        return step.log() + self.log_marginal(log_p, sigma_s) - before

    def posterior_kl(
        self, log_mean: PerToken, x_t: Tokens, x_0: Tokens, sigma_s: PerSequence, sigma_t: PerSequence
    ) -> PerPosition:
        """KL(q(x_s | x_t, x_0) ‖ p(x_s | x_t)), the terms of the D3PM bound.  [§6]

        It is the sum of the score-entropy divergences of p from q: both sum to 1, and no term is below 0.
        """
        certain = torch.full_like(log_mean, -torch.inf).scatter(-1, x_0[..., None], 0)
        log_q = self.log_posterior(certain, x_t, sigma_s, sigma_t)
        return score_entropy(self.log_posterior(log_mean, x_t, sigma_s, sigma_t), log_q).sum(-1)


def _log(p: float) -> float:
    return math.log(p) if p else -math.inf


@final
@dataclass(frozen=True)
class Absorbing(Process):
    """Noise that replaces a token by the mask, state N, for good (Austin et al. 2021, arXiv 2107.03006).

    Only masks count in losses and reverse steps.
    """

    mask_share: float = field(default=1.0, init=False, repr=False)
    frequencies: Sequence[int | float] | None = field(default=None, init=False, repr=False)


@final
@dataclass(frozen=True)
class Uniform(Process):
    """Noise that replaces a token by a uniformly random one or itself (Hoogeboom et al. 2021, arXiv 2102.05379)."""

    mask_share: float = field(default=0.0, init=False, repr=False)
    frequencies: Sequence[int | float] | None = field(default=None, init=False, repr=False)


@final
@dataclass(frozen=True)
class Hybrid(Process):
    """Noise that replaces a token by the mask with probability ``mask_share``, else by a uniformly random token.

    A mask may become a token and a token a mask, so that samplers may correct tokens. A mixture that changes with time:
    von Rütte et al. 2025, arXiv 2503.04482.
    """

    mask_share: float = field(default=0.9, kw_only=False)
    frequencies: Sequence[int | float] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mask_share < 1:
            raise ValueError(f"mask_share is {self.mask_share}; it must lie between 0 (uniform) and 1 (absorbing)")


@final
@dataclass(frozen=True)
class Frequency(Process):
    """Noise that replaces a token by one drawn by its frequency in the data; the prior of the bound is the same."""

    mask_share: float = field(default=0.0, init=False, repr=False)
    frequencies: Sequence[int | float] | None = field(default=None, repr=False, kw_only=False)

    def __post_init__(self) -> None:
        if self.frequencies is None:
            raise ValueError("frequencies are missing; give one number above 0 for each token")
        super().__post_init__()
