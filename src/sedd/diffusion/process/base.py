"""The interface of noise processes: the Markov chain, corruption, ratios, scores and reverse steps.  [§2–§6]"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.diffusion import categorical, validate
from sedd.diffusion.categorical import AffineWeights
from sedd.diffusion.divergence import Divergence, score_entropy
from sedd.diffusion.precision import upcast
from sedd.diffusion.schedule import corruption_probability


class Ratio(NamedTuple):
    """The denoising ratios a_y of all y ≠ x_t as logarithms: one value at y = x_0, one at every other y."""

    log_data: Float[Tensor, "*s"]
    log_rest: Float[Tensor, "*s"] | None
    """None: they are 0."""


def log_odds(sigma: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return log ω, ω = e^σ − 1: the log odds that noise has replaced a token; stable for every σ > 0."""
    log_odds = sigma + torch.log(-torch.expm1(-sigma))
    return log_odds.clamp_min(-70.0)  # σ = 0 is allowed; −∞ would make NaN of ratios that have probability 0


def at_token(x: Float[Tensor, "*b L n"], y: Int[Tensor, "*b L"]) -> Float[Tensor, "*b L"]:
    """Return the entry at y of every position."""
    return x.gather(-1, y[..., None]).squeeze(-1)


def interpolate_log(a: Float[Tensor, "*s"], b: Float[Tensor, "*s"], weight: float) -> Float[Tensor, "*s"]:
    """Return (1 − γ)·a + γ·b of log-probabilities, γ > 0; −∞ where b is −∞."""
    return torch.where(b.isneginf(), b, torch.lerp(a, b, weight))


@dataclass(frozen=True)
class Process(ABC):
    """A continuous-time Markov chain on the states of one token.

    Reference: Campbell et al. 2022, "A Continuous Time Framework for Discrete Denoising Models", arXiv 2205.14987.
    """

    has_closed_forms: ClassVar[bool] = True
    """Whether noise replaces a token independently of what it was: the fused loss and the fused draws need it."""

    vocab_size: int

    def __post_init__(self) -> None:
        validate.vocab_size(self.vocab_size)

    @property
    @abstractmethod
    def num_states(self) -> int:
        """The number of states of a token, the mask included."""

    # The chain ---------------------------------------------------------------------------------------------

    @abstractmethod
    def rate(
        self, y: Int[Tensor, "*#s"], x: Int[Tensor, "*#s"], dtype: torch.dtype = torch.float64
    ) -> Float[Tensor, "*#s"]:
        """Q(y, x): the rate from x to y; for y = x, minus the rate of leaving x.  [§2]

        Args:
            y: States to which the chain jumps.
            x: States from which it jumps.
            dtype: The dtype of the rates.
        """

    @abstractmethod
    def transition(
        self, y: Int[Tensor, "*#s"], x: Int[Tensor, "*#s"], sigma: Float[Tensor, "*#s"]
    ) -> Float[Tensor, "*#s"]:
        """P_σ(y, x): the probability of y at noise σ, given x, in closed form.  [§2]

        Args:
            y: States at noise σ.
            x: States without noise.
            sigma: Total noise σ.
        """

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
        validate.sigma(sigma)
        states = self._states(sigma.device)
        return self.transition(states[:, None], states, sigma[..., None, None])

    def _check_mean(self, log_mean: Tensor, x_t: Tensor) -> None:
        validate.num_outputs(log_mean, self.vocab_size, "mean")
        validate.states(x_t, self.num_states)

    def _states(self, device: torch.device | None = None) -> Tensor:
        return torch.arange(self.num_states, device=device)

    # Forward: from data to noise ---------------------------------------------------------------------------

    def corrupt(
        self, x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], generator: torch.Generator
    ) -> Int[Tensor, "*b L"]:
        """Draw x_t given x_0 at total noise σ.

        Args:
            x_0: Clean sequences.
            sigma: Total noise of each sequence.
            generator: The source of randomness.
        """
        validate.clean_tokens(x_0, self.vocab_size)
        validate.sigma(sigma)
        replaced = categorical.bernoulli(corruption_probability(sigma.double())[..., None].expand(x_0.shape), generator)
        return torch.where(replaced, self._noise(tuple(x_0.shape), generator), x_0)

    def corrupt_by(
        self, x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], u: Float[Tensor, "*b L 2"]
    ) -> Int[Tensor, "*b L"]:
        """Make x_t from x_0 and uniforms: the first decides whether a token is replaced, the second by what."""
        validate.clean_tokens(x_0, self.vocab_size)
        return torch.where(u[..., 0] < corruption_probability(sigma)[..., None], self.prior_sample(u[..., 1]), x_0)

    @abstractmethod
    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw what replaced tokens become."""

    @abstractmethod
    def prior_sample(self, u: Float[Tensor, "*s"]) -> Int[Tensor, "*s"]:
        """Map uniforms to pure noise, from which every sampler starts.

        Under absorbing noise these are masks only: masks carry no information, so starting there is exact,
        while the prior of the bound must also allow tokens.
        """

    @abstractmethod
    def log_prior(self, x: Int[Tensor, "*#s"], sigma: Float[Tensor, "*#s"]) -> Float[Tensor, "*#s"]:
        """Return the prior's log-probability of each token."""

    @abstractmethod
    def prior_kl(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """KL(P_σ(·|x_0) ‖ prior) in nats per token, the same for every x_0; otherwise the largest of them.  [§8]"""

    # Scores and ratios -------------------------------------------------------------------------------------

    @abstractmethod
    def ratios(self, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Ratio:
        """a_y = P_σ(y, x_0)/P_σ(x_t, x_0) for y ≠ x_t, where Q(x_t, y) > 0.  [§4]

        Args:
            x_t: Noisy tokens.
            x_0: Clean tokens.
            sigma: Total noise of each sequence.
        """

    @abstractmethod
    def is_noisy(self, x_t: Int[Tensor, "*s"]) -> Bool[Tensor, "*s"]:
        """Return where noise may have changed the token: the positions that reverse steps may change."""

    @property
    @abstractmethod
    def incoming_rate(self) -> float:
        """Q(x_t, y), the rate from y ≠ x_t into a noisy x_t: the same for all y in a process with closed forms."""

    @abstractmethod
    def log_score_shift(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return the term that `ScoreModel` adds to a network's output to make it a log-score.  [§5]"""

    @abstractmethod
    def own_log_likelihood(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """log P_σ(x, x) − log P_σ(x, y): how much likelier x_t is if it was the clean token than if another was."""

    @abstractmethod
    def add_log_likelihood(
        self, logits: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L N"]:
        """Add log P_σ(x_t, x_0), up to a constant, to the logits of x_0: Bayes' rule for a denoiser.  [§5]"""

    @abstractmethod
    def log_marginal(self, log_p: Float[Tensor, "*b L N"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """log Σ_{x_0} P_σ(y, x_0)·p(x_0): the distribution of the noisy token, given that of the clean one.  [§5]"""

    @abstractmethod
    def mean_score(
        self, log_mean: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """Return the log of the score s_y = E[a_y(x_0) | x_t] of a denoiser p(x_0 | x_t).  [§3, §5]

        Args:
            log_mean: log p(x_0 | x_t) of a denoiser.
            x_t: Noisy tokens.
            sigma: Total noise of each sequence.
        """

    @abstractmethod
    def marginal_score(
        self, log_p: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """Return the log of the score s_y = p_σ(y)/p_σ(x_t), where p_σ = Σ_{x_0} P_σ(·, x_0)·p(x_0).  [§5]"""

    @abstractmethod
    def rescore(
        self,
        log_score: Float[Tensor, "*b L n"],
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L n"]:
        """Return the log-score of the denoiser ``log_mean``; masks are revealed at the rate of ``log_score``."""

    @abstractmethod
    def mix_log_scores(
        self, free: Float[Tensor, "*s n"], given: Float[Tensor, "*s n"], weight: float
    ) -> Float[Tensor, "*s n"]:
        """Return (1 − γ)·log s(x) + γ·log s(x | label), normalised where masks are revealed.  [§9]"""

    @abstractmethod
    def staggered_score(self, score: Float[Tensor, "*b L n"], dsigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """exp(−Δσ Q) s: the ratios p_{σ−Δσ}(y)/p_σ(x) of the lower noise level to the present one.  [§9]"""

    @abstractmethod
    def amplifies_rounding(self, dsigma: Float[Tensor, "*s"]) -> bool:
        """Return whether Tweedie steps of Δσ multiply errors of the score so much that float32 is not enough."""

    @abstractmethod
    def tweedie_weights(self, dsigma: Float[Tensor, "*s"]) -> AffineWeights:
        """[exp(−Δσ Q) s]_y · P_Δσ(x, y) as an affine function of a score with s_x = 1.  [§9]"""

    @abstractmethod
    def denoising_weights(self, sigma: Float[Tensor, "*s"]) -> AffineWeights:
        """The Tweedie weights of the step to σ = 0, after which no mask is left.  [§9]"""

    @abstractmethod
    def posterior_weights(self, sigma_s: Float[Tensor, "*s"], sigma_t: Float[Tensor, "*s"]) -> AffineWeights:
        """Σ_{x_0} q(y | x, x_0)·p(x_0 | x) as an affine function of p(· | x), which is 0 at the mask.  [§6]"""

    def score_entropy(
        self,
        log_score: Float[Tensor, "*b L n"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """Σ_{y≠x_t} Q(x_t, y)·[s_y − a_y log s_y + K(a_y)], the integrand of the bound but for σ'.  [§4]

        Args:
            log_score: log s_y of a model, at every position and state.
            x_t: Noisy tokens.
            x_0: Clean tokens.
            sigma: Total noise of each sequence.
        """
        return self.denoising(score_entropy, log_score, x_t, x_0, sigma)

    def denoising(
        self,
        divergence: Divergence,
        log_score: Float[Tensor, "*b L n"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """Σ_{y≠x_t} Q(x_t, y)·D(s_y, a_y) against the denoising ratios a_y, which take two values.  [§4]

        Args:
            divergence: D, such as score entropy or half the squared error.
            log_score: log s_y of a model, at every position and state.
            x_t: Noisy tokens.
            x_0: Clean tokens.
            sigma: Total noise of each sequence.
        """
        validate.sigma(sigma)
        validate.states(x_t, self.num_states)
        validate.clean_tokens(x_0, self.vocab_size)
        validate.num_outputs(log_score, self.num_states, "log-score")
        log_score = upcast(log_score)
        ratio = self.ratios(x_t, x_0, sigma.to(log_score.dtype))
        total = sum_by_value(divergence, log_score, x_t, x_0, ratio)
        return torch.where(self.is_noisy(x_t), self.incoming_rate * total, 0)

    def explicit(
        self,
        divergence: Divergence,
        log_score: Float[Tensor, "*b L n"],
        log_ratio: Float[Tensor, "*b L n"],
        x_t: Int[Tensor, "*b L"],
    ) -> Float[Tensor, "*b L"]:
        """Σ_{y≠x_t} Q(x_t, y)·D(s_y, a_y) against ratios given for every y. Dense: for small spaces.  [§6]"""
        validate.states(x_t, self.num_states)
        validate.num_outputs(log_score, self.num_states, "log-score")
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
        """log Σ_{x_0} q(x_s | x_t, x_0)·p(x_0 | x_t): a denoiser's reverse step from σ_t to σ_s < σ_t.  [§6]

        Args:
            log_mean: log p(x_0 | x_t) of a denoiser.
            x_t: Noisy tokens.
            sigma_s: Total noise after the step.
            sigma_t: Total noise before it.
        """

    @abstractmethod
    def posterior_kl(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """KL(q(x_s | x_t, x_0) ‖ p(x_s | x_t)), the terms of the D3PM bound.  [§6]

        Args:
            log_mean: log p(x_0 | x_t) of a denoiser.
            x_t: Noisy tokens.
            x_0: Clean tokens.
            sigma_s: Total noise after the step.
            sigma_t: Total noise before it.
        """


def sum_by_value(
    divergence: Divergence, log_s: Tensor, x_t: Tensor, x_0: Tensor, ratio: Ratio
) -> Float[Tensor, "*b L"]:
    """Return Σ_{y≠x_t} D(s_y, a_y), where a_y has one value at y = x_0 and one at every other y."""
    rest = divergence.sum_except(torch.stack([x_t, x_0], -1), log_s, ratio.log_rest)
    data = divergence(at_token(log_s, x_0), ratio.log_data)
    return rest + torch.where(x_t == x_0, 0, data)
