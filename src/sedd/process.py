"""Noise processes: what noise does to one token. Every position is corrupted independently.  [§1–§4]

Two processes: `Uniform` replaces a token by a random one, `Absorbing` by a mask. Each is a rate matrix Q in the
column convention (``Q[y, x]`` is the rate from x to y) and all that follows from it in closed form, so that
50,000 states cost a gather or a scalar where a matrix would not fit.

Shapes: token ids are ``(*b, L)``, the total noise ``sigma`` is ``(*b,)``, scores are ``(*b, L, num_states)``.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd import categorical, check
from sedd.divergence import Divergence, score_entropy


class Ratio(NamedTuple):
    """The denoising ratios a_y over all y ≠ x_t: one value at y = x_0, one at every other y, as logarithms."""

    log_data: Float[Tensor, "*s"]
    log_rest: Float[Tensor, "*s"] | None
    """None: they are 0."""


def log_odds(sigma: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """log(e^σ − 1), the log odds that a token was replaced rather than kept untouched; stable for every σ > 0."""
    log_odds = sigma + torch.log(-torch.expm1(-sigma))
    return log_odds.clamp_min(-70.0)  # σ = 0 is allowed; −∞ would make NaN of what no token can then be


def lost(sigma: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """1 − e^−σ, the probability that a token was touched."""
    return -torch.expm1(-sigma)


def at_token(x: Float[Tensor, "*b L n"], y: Int[Tensor, "*b L"]) -> Float[Tensor, "*b L"]:
    """The entry at y of every position."""
    return x.gather(-1, y[..., None]).squeeze(-1)


def at_least_float32(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Half precision raised to float32, the least in which losses and scores are computed."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class Process(ABC):
    """A continuous-time Markov chain on the states of one token."""

    vocab_size: int

    def __post_init__(self) -> None:
        check.vocabulary(self.vocab_size)

    @property
    @abstractmethod
    def num_states(self) -> int:
        """How many states a token has: with the mask where there is one."""

    # The chain ---------------------------------------------------------------------------------------------

    @abstractmethod
    def rate(
        self, y: Int[Tensor, "*#s"], x: Int[Tensor, "*#s"], dtype: torch.dtype = torch.float64
    ) -> Float[Tensor, "*#s"]:
        """Q(y, x): the rate from x to y; for y = x, minus the rate of leaving x.  [§2]"""

    @abstractmethod
    def transition(
        self, y: Int[Tensor, "*#s"], x: Int[Tensor, "*#s"], sigma: Float[Tensor, "*#s"]
    ) -> Float[Tensor, "*#s"]:
        """P_σ(y, x): the probability of y at noise σ, given x, in closed form.  [§2]"""

    def rates_out_of(
        self, x: Int[Tensor, "*s"], dtype: torch.dtype = torch.float64
    ) -> Float[Tensor, "*s {self.num_states}"]:
        """Q(·, x): the rates from x to every state. Dense: for small spaces."""
        return self.rate(self._states(x.device), x[..., None], dtype)

    def rates_into(
        self, x: Int[Tensor, "*s"], dtype: torch.dtype = torch.float64
    ) -> Float[Tensor, "*s {self.num_states}"]:
        """Q(x, ·): the rates from every state into x, which the reverse process runs along. Dense."""
        return self.rate(x[..., None], self._states(x.device), dtype)

    def rate_matrix(self, dtype: torch.dtype = torch.float64) -> Float[Tensor, "n n"]:
        """Q, dense: for tests and small spaces."""
        return self.rates_into(self._states(), dtype)

    def transition_matrix(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b n n"]:
        """P_σ, dense: for tests and small spaces."""
        check.noise(sigma)
        states = self._states(sigma.device)
        return self.transition(states[:, None], states, sigma[..., None, None])

    def _states(self, device: torch.device | None = None) -> Tensor:
        return torch.arange(self.num_states, device=device)

    # Forward: from data to noise ---------------------------------------------------------------------------

    def corrupt(
        self, x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], generator: torch.Generator
    ) -> Int[Tensor, "*b L"]:
        """Draw x_t given x_0 at total noise σ."""
        check.clean(x_0, self.vocab_size)
        check.noise(sigma)
        touched = categorical.happens(lost(sigma.double())[..., None].expand(x_0.shape), generator)
        return torch.where(touched, self._noise(tuple(x_0.shape), generator), x_0)

    @abstractmethod
    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """What touched tokens turn into."""

    @abstractmethod
    def draw_prior(
        self, shape: tuple[int, ...], sigma: Float[Tensor, ""], generator: torch.Generator
    ) -> Int[Tensor, "..."]:
        """Draw from the base law from which generation starts, for a schedule that ends at noise σ.  [§8]"""

    @abstractmethod
    def log_prior(self, x: Int[Tensor, "*#s"], sigma: Float[Tensor, "*#s"]) -> Float[Tensor, "*#s"]:
        """The base law's log-probability of each token."""

    @abstractmethod
    def prior_kl(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """KL(P_σ(·|x_0) ‖ base) in nats a token; it is the same for every x_0.  [§8]"""

    # Scores and ratios -------------------------------------------------------------------------------------

    @abstractmethod
    def ratios(self, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Ratio:
        """a_y = P_σ(y, x_0)/P_σ(x_t, x_0) for y ≠ x_t, where Q(x_t, y) > 0.  [§4]"""

    @abstractmethod
    def unknown(self, x_t: Int[Tensor, "*s"]) -> Bool[Tensor, "*s"]:
        """Where noise may have changed the token: the positions that move backwards."""

    @property
    @abstractmethod
    def into_rate(self) -> float:
        """Q(x_t, y) for every y ≠ x_t that leads to an unknown x_t: one number in both processes."""

    @abstractmethod
    def log_scale(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """What `parameterization.Score` adds to a network's output to make it a log-score.  [§5]"""

    @abstractmethod
    def mean_score(
        self, log_mean: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """The log-score s_y = E[a_y(x_0) | x_t] of a denoiser p(x_0 | x_t).  [§3, §5]"""

    @abstractmethod
    def staggered_score(self, score: Float[Tensor, "*b L n"], dsigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """exp(−Δσ Q) s: ratios at the earlier noise σ − Δσ to the probability at σ.  [§9]"""

    def score_entropy(
        self,
        log_score: Float[Tensor, "*b L n"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """Σ_{y≠x_t} Q(x_t, y)·[s_y − a_y log s_y + K(a_y)], the integrand of the bound but for σ'.  [§4]"""
        return self.denoising(score_entropy, log_score, x_t, x_0, sigma)

    def denoising(
        self,
        divergence: Divergence,
        log_score: Float[Tensor, "*b L n"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """Σ_{y≠x_t} Q(x_t, y)·D(s_y, a_y) against the denoising ratios, by their two values.  [§4]"""
        check.noise(sigma)
        check.states(x_t, self.num_states)
        check.clean(x_0, self.vocab_size)
        check.entries(log_score, self.num_states, "log-score")
        log_score = at_least_float32(log_score)
        ratio = self.ratios(x_t, x_0, sigma.to(log_score.dtype))
        total = _sum_by_value(divergence, log_score, x_t, x_0, ratio)
        return torch.where(self.unknown(x_t), self.into_rate * total, 0)

    def explicit(
        self,
        divergence: Divergence,
        log_score: Float[Tensor, "*b L n"],
        log_ratio: Float[Tensor, "*b L n"],
        x_t: Int[Tensor, "*b L"],
    ) -> Float[Tensor, "*b L"]:
        """Σ_{y≠x_t} Q(x_t, y)·D(s_y, a_y) against ratios written out for every y. Dense: for small spaces."""
        check.states(x_t, self.num_states)
        check.entries(log_score, self.num_states, "log-score")
        rates = self.rates_into(x_t, log_score.dtype).scatter(-1, x_t[..., None], 0)
        return torch.where(rates > 0, rates * divergence(log_score, log_ratio), 0).sum(-1)

    # Steps of finite size ----------------------------------------------------------------------------------

    @abstractmethod
    def log_posterior(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L n"]:
        """log Σ_{x_0} q(x_s | x_t, x_0)·p(x_0 | x_t): a denoiser's law one step down, σ_s < σ_t.  [§6]"""

    @abstractmethod
    def posterior_kl(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """KL(q(x_s | x_t, x_0) ‖ p(x_s | x_t)), the terms of the D3PM bound.  [§6]"""


def _sum_by_value(
    divergence: Divergence, log_s: Tensor, x_t: Tensor, x_0: Tensor, ratio: Ratio
) -> Float[Tensor, "*b L"]:
    """Σ_{y≠x_t} D(s_y, a_y), where a_y takes one value at y = x_0 and one at every other y."""
    rest = divergence.sum_except(torch.stack([x_t, x_0], -1), log_s, ratio.log_rest)
    data = divergence(at_token(log_s, x_0), ratio.log_data)
    return rest + torch.where(x_t == x_0, 0, data)


@final
@dataclass(frozen=True)
class Uniform(Process):
    """A touched token becomes a uniformly random one, itself included: Q = 11ᵀ/N − I.  [§2]"""

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
        return torch.where(y == x, torch.exp(-sigma), 0) + lost(sigma) / self.vocab_size

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randint(self.vocab_size, shape, generator=generator, device=generator.device)

    def draw_prior(
        self, shape: tuple[int, ...], sigma: Float[Tensor, ""], generator: torch.Generator
    ) -> Int[Tensor, "..."]:
        """Uniform tokens, whatever σ."""
        return self._noise(shape, generator)

    def log_prior(self, x: Int[Tensor, "*#s"], sigma: Float[Tensor, "*#s"]) -> Float[Tensor, "*#s"]:
        """−log N."""
        check.states(x, self.num_states)
        return torch.full_like(x * sigma, -math.log(self.vocab_size))

    def prior_kl(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """[D(1 + (N−1)e^−σ) + (N−1)·D(1 − e^−σ)]/N with D(u) = u log u − u + 1, which is score entropy at s = 1."""
        check.noise(sigma)
        alpha, others = torch.exp(-sigma.double()), self.vocab_size - 1
        kept, gone = torch.log1p(others * alpha), torch.log1p(-alpha)
        one = torch.zeros_like(alpha)
        return ((score_entropy(one, kept) + others * score_entropy(one, gone)) / self.vocab_size).to(sigma.dtype)

    def ratios(self, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Ratio:
        """With r = e/(e + N), e = e^σ − 1: all r where x_t = x_0; else 1/r at x_0 and 1 elsewhere.  [§4]"""
        log_r = self._log_r(sigma)[..., None]
        return Ratio(log_data=-log_r, log_rest=torch.where(x_t == x_0, log_r, 0))

    def _log_r(self, sigma: Tensor) -> Tensor:
        """log e/(e + N), by the logistic function: 1 − N/(e + N) would round to 0."""
        return torch.nn.functional.logsigmoid(log_odds(sigma) - math.log(self.vocab_size))

    def unknown(self, x_t: Int[Tensor, "*s"]) -> Bool[Tensor, "*s"]:
        """Everywhere."""
        return torch.ones_like(x_t, dtype=torch.bool)

    @property
    def into_rate(self) -> float:
        """1/N."""
        return 1 / self.vocab_size

    def log_scale(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """0: a uniform-noise network's output is the log-score."""
        return torch.zeros_like(sigma)

    def mean_score(
        self, log_mean: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """s_y = 1 + p_y·N/e − p_{x_t}·N/(e + N)  [§5, where 1/r − 1 = N/e and 1 − r = N/(e + N)].

        Near s = 1 (much noise) by log1p; elsewhere as the sum (1 − p_{x_t}) + r·p_{x_t} + p_y·N/e of positive
        terms, in which little noise cancels nothing.
        """
        check.entries(log_mean, self.vocab_size, "mean")
        sigma = sigma.to(log_mean.dtype)[..., None]
        here, elsewhere = _split(log_mean, x_t)
        always = torch.logaddexp(elsewhere, self._log_r(sigma) + here)[..., None]
        gain = log_mean + (math.log(self.vocab_size) - log_odds(sigma))[..., None]
        loss = here + torch.nn.functional.logsigmoid(math.log(self.vocab_size) - log_odds(sigma))
        change = gain.exp() - loss.exp()[..., None]
        log_score = torch.where(change.abs() < 0.5, torch.log1p(change.clamp(-0.5, 0.5)), torch.logaddexp(always, gain))
        return log_score.scatter(-1, x_t[..., None], 0)

    def staggered_score(self, score: Float[Tensor, "*b L n"], dsigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """e^Δσ·s + (1 − e^Δσ)/N · Σ_y s_y."""
        check.noise(dsigma)
        dsigma = dsigma[..., None, None]
        return torch.exp(dsigma) * score - torch.expm1(dsigma) * score.mean(-1, keepdim=True)

    def log_posterior(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L n"]:
        """log P_Δ(x_t, y) + log Σ_{x_0} P_s(y, x_0)·w(x_0), w = p(x_0 | x_t)/P_t(x_t, x_0)."""
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
        return torch.log(torch.exp(-sigma) + lost(sigma) / self.vocab_size)

    def _log_go(self, sigma: Tensor) -> Tensor:
        """log P_σ(y, x), y ≠ x."""
        return torch.log(lost(sigma)) - math.log(self.vocab_size)

    def posterior_kl(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """Σ_y D(p_y, q_y) with the score-entropy divergence: since p and q sum to 1 it is the KL, term by term ≥ 0."""
        log_p = self.log_posterior(log_mean, x_t, sigma_s, sigma_t)
        sigma_s, sigma_t = (s.to(log_mean.dtype)[..., None] for s in (sigma_s, sigma_t))
        step, same = sigma_t - sigma_s, x_t == x_0
        seen = torch.where(same, self._log_stay(sigma_t), self._log_go(sigma_t))  # log P_t(x_t, x_0)
        q = Ratio(
            log_data=self._log_go(step) + self._log_stay(sigma_s) - seen,
            log_rest=self._log_go(step) + self._log_go(sigma_s) - seen,
        )
        last = torch.where(same, self._log_stay(sigma_s), self._log_go(sigma_s))  # log P_s(x_t, x_0)
        stay = score_entropy(at_token(log_p, x_t), self._log_stay(step) + last - seen)
        return _sum_by_value(score_entropy, log_p, x_t, x_0, q) + stay


def _split(log_mean: Tensor, x_t: Tensor) -> tuple[Tensor, Tensor]:
    """log p_{x_t} and log(1 − p_{x_t}), the second summed and not subtracted: it may be far below rounding."""
    others = log_mean.scatter(-1, x_t[..., None], -math.inf)
    return at_token(log_mean, x_t), others.logsumexp(-1)


@final
@dataclass(frozen=True)
class Absorbing(Process):
    """A touched token becomes the mask, state N, and stays it.  [§2]

    Only masked positions ever move backwards, so only they count in losses, and the entries of a score at
    unmasked positions are never read.
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
        token = torch.where(y == x, torch.exp(-sigma), torch.where(y == self.mask, lost(sigma), 0))
        return torch.where(x == self.mask, (y == self.mask).to(token.dtype), token)

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.full(shape, self.mask, device=generator.device)

    def draw_prior(
        self, shape: tuple[int, ...], sigma: Float[Tensor, ""], generator: torch.Generator
    ) -> Int[Tensor, "..."]:
        """A mask with probability 1 − e^−σ, else a uniform token: all masks for σ = ∞.  [§8]"""
        check.noise(sigma)
        tokens = torch.randint(self.vocab_size, shape, generator=generator, device=generator.device)
        masked = categorical.happens(lost(sigma.double()).expand(shape), generator)
        return torch.where(masked, self.mask, tokens)

    def log_prior(self, x: Int[Tensor, "*#s"], sigma: Float[Tensor, "*#s"]) -> Float[Tensor, "*#s"]:
        """log(1 − e^−σ) for a mask, −σ − log N for a token."""
        check.states(x, self.num_states)
        return torch.where(x == self.mask, torch.log(lost(sigma)), -sigma - math.log(self.vocab_size))

    def prior_kl(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """e^−σ·log N."""
        check.noise(sigma)
        return torch.exp(-sigma) * math.log(self.vocab_size)

    def ratios(self, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Ratio:
        """At masked positions a_y = [y = x_0]/e, e = e^σ − 1.  [§4]"""
        log_data = -log_odds(sigma)[..., None].expand(x_t.shape)
        return Ratio(log_data=log_data, log_rest=None)

    def unknown(self, x_t: Int[Tensor, "*s"]) -> Bool[Tensor, "*s"]:
        """Where the mask is."""
        return x_t == self.mask

    @property
    def into_rate(self) -> float:
        """1: every token turns into the mask at rate 1."""
        return 1.0

    def log_scale(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """−log e − log N: a network that says 0 says that every token is equally likely."""
        return -log_odds(sigma) - math.log(self.vocab_size)

    def mean_score(
        self, log_mean: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """s_y = p_y/e."""
        check.entries(log_mean, self.vocab_size, "mean")
        log_e = log_odds(sigma.to(log_mean.dtype))[..., None, None]
        to_mask = log_e.expand(*log_mean.shape[:-1], 1)  # the ratio of the mask to a token is e
        return torch.cat([log_mean - log_e, to_mask], -1).scatter(-1, x_t[..., None], 0)

    def staggered_score(self, score: Float[Tensor, "*b L n"], dsigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """e^Δσ·s_y for tokens; s_M − (e^Δσ − 1)·Σ_y s_y for the mask."""
        check.noise(dsigma)
        dsigma = dsigma[..., None, None]
        tokens, mask = score[..., :-1], score[..., -1:]
        mask = mask - torch.expm1(dsigma) * tokens.sum(-1, keepdim=True)
        return torch.cat([torch.exp(dsigma) * tokens, mask], -1)

    def reveal(self, sigma_s: Float[Tensor, "*b"], sigma_t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """P(a mask at σ_t is a token at σ_s) = (e^Δσ − 1)/(e^σ_t − 1): the network has no say in it.  [§9]"""
        return torch.exp(-sigma_s) * lost(sigma_t - sigma_s) / lost(sigma_t)

    def log_posterior(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L n"]:
        """A mask is revealed with probability ρ, as token y with probability ρ·p_y; a token stays."""
        sigma_s, sigma_t = (s.to(log_mean.dtype)[..., None, None] for s in (sigma_s, sigma_t))
        tokens = log_mean + torch.log(self.reveal(sigma_s, sigma_t))
        stays = torch.log(lost(sigma_s) / lost(sigma_t)).expand(*log_mean.shape[:-1], 1)  # log(1 − ρ)
        masked = torch.cat([tokens, stays], -1)
        token = torch.full_like(masked, -math.inf).scatter(-1, x_t[..., None], 0)
        return torch.where(self.unknown(x_t)[..., None], masked, token)

    def posterior_kl(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """−ρ·log p_{x_0} at masked positions."""
        revealed = self.reveal(sigma_s, sigma_t).to(log_mean.dtype)[..., None]
        return torch.where(self.unknown(x_t), -revealed * at_token(log_mean, x_0), 0)
