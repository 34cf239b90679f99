"""The interface of noise processes, and what follows from it by Bayes' rule.  [§2–§6]"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.diffusion import categorical, validate
from sedd.diffusion.divergence import Divergence, score_entropy
from sedd.diffusion.precision import upcast


def at_token(x: Float[Tensor, "*b L n"], y: Int[Tensor, "*b L"]) -> Float[Tensor, "*b L"]:
    """Return the entry at y of every position."""
    return x.gather(-1, y[..., None]).squeeze(-1)


class Ratio(NamedTuple):
    """The denoising ratios a_y of all y ≠ x_t as logarithms: one value at y = x_0, and those of every other y."""

    log_data: Float[Tensor, "*b #L"]
    log_rest: Float[Tensor, "*b L #n"] | None
    """None: they are 0."""


@dataclass(frozen=True)
class Process(ABC):
    """A continuous-time Markov chain on the states of one token.

    A subclass writes the abstract methods; scores, reverse steps and losses follow from them.

    Reference: Campbell et al. 2022, "A Continuous Time Framework for Discrete Denoising Models", arXiv 2205.14987.
    """

    vocab_size: int

    def __post_init__(self) -> None:
        validate.vocab_size(self.vocab_size)

    @property
    def has_mask(self) -> bool:
        """Whether a token may become a mask."""
        return False

    @property
    def mask(self) -> int:
        """The id of the mask, if there is one."""
        return self.vocab_size

    @property
    def num_states(self) -> int:
        """The number of states of a token, the mask included."""
        return self.vocab_size + self.has_mask

    @property
    def only_masks(self) -> bool:
        """Whether only masks are noise, so that every token is known to be clean; else any token may be noise."""
        return False

    @property
    def has_fused_forms(self) -> bool:
        """Whether the fused loss and the fused draws cover this process: see `process.fused`."""
        return False

    def is_noisy(self, x_t: Int[Tensor, "*s"]) -> Bool[Tensor, "*s"]:
        """Return where noise may have changed the token: the positions that reverse steps may change."""
        return x_t == self.mask if self.only_masks else torch.ones_like(x_t, dtype=torch.bool)

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
        """P_σ(y, x): the probability of y at noise σ, given x without noise.  [§2]"""

    def rates_out_of(
        self, x: Int[Tensor, "*s"], dtype: torch.dtype = torch.float64
    ) -> Float[Tensor, "*s {self.num_states}"]:
        """Q(·, x): the rates from x to every state. Dense: for small spaces."""
        return self.rate(self._states(x.device), x[..., None], dtype)

    def rates_into(
        self, x: Int[Tensor, "*s"], dtype: torch.dtype = torch.float64
    ) -> Float[Tensor, "*s {self.num_states}"]:
        """Q(x, ·): the rates from every state into x, which the reverse process runs along."""
        return self.rate(x[..., None], self._states(x.device), dtype)

    def incoming_rates(self, x: Int[Tensor, "*s"]) -> Float[Tensor, "*s #n"]:
        """Q(x, y), the rates from every y ≠ x into x; the entry at y = x has no meaning."""
        return self.rates_into(x)

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
        """Draw x_t given x_0 at total noise σ."""
        return self.corrupt_by(x_0, sigma, categorical.uniforms((*x_0.shape, 2), generator))

    @abstractmethod
    def corrupt_by(
        self, x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], u: Float[Tensor, "*b L 2"]
    ) -> Int[Tensor, "*b L"]:
        """Make x_t from x_0 and two uniforms per position."""

    @abstractmethod
    def prior_sample(self, u: Float[Tensor, "*s"]) -> Int[Tensor, "*s"]:
        """Map uniforms to pure noise, from which every sampler starts."""

    @abstractmethod
    def log_prior(self, x: Int[Tensor, "*#s"], sigma: Float[Tensor, "*#s"]) -> Float[Tensor, "*#s"]:
        """Return the log-probability of each state under the prior of the bound, at total noise σ.  [§8]"""

    @abstractmethod
    def prior_kl(self, x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L"]:
        """KL(P_σ(·|x_0) ‖ prior) in nats per token.  [§8]"""

    # Scores and ratios -------------------------------------------------------------------------------------

    def ratios(self, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Ratio:
        """a_y = P_σ(y, x_0)/P_σ(x_t, x_0) for y ≠ x_t, where noise may have led to x_t.  [§4]"""
        levels = sigma.double()[..., None, None]
        log_p = self.transition(self._states(x_t.device), x_0[..., None], levels).clamp_min(1e-300).log()
        log_ratio = (log_p - log_p.gather(-1, x_t[..., None])).to(sigma.dtype)
        return Ratio(at_token(log_ratio, x_0), log_ratio)

    def denoising(
        self,
        divergence: Divergence,
        log_score: Float[Tensor, "*b L n"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """Σ_{y≠x_t} Q(x_t, y)·D(s_y, a_y) against the denoising ratios a_y = P_σ(y, x_0)/P_σ(x_t, x_0).  [§4]

        Args:
            divergence: D, such as score entropy or half the squared error.
            log_score: log s_y of a model, at every position and state.
            x_t: Noisy tokens.
            x_0: Clean tokens.
            sigma: Total noise of each sequence.
        """
        validate.clean_tokens(x_0, self.vocab_size)
        log_score = upcast(log_score)
        log_ratio = self.ratios(x_t, x_0, sigma.to(log_score.dtype)).log_rest
        assert log_ratio is not None
        return self.explicit(divergence, log_score, log_ratio, x_t)

    def score_entropy(
        self,
        log_score: Float[Tensor, "*b L n"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """Σ_{y≠x_t} Q(x_t, y)·[s_y − a_y log s_y + K(a_y)], the integrand of the bound but for σ'.  [§4]"""
        return self.denoising(score_entropy, log_score, x_t, x_0, sigma)

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

    def base_log_score(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b #L #n"]:
        """Return the log-score of the prior, which `ScoreModel` adds to a network's output.  [§5]

        An output of 0 then stands for tokens that are drawn from the prior.
        """
        log_prior = self.log_prior(self._states(x_t.device), sigma[..., None])
        return log_prior[..., None, :] - log_prior.gather(-1, x_t)[..., None]

    @abstractmethod
    def add_log_likelihood(
        self, logits: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L N"]:
        """Add log P_σ(x_t, x_0), up to a constant, to the logits of x_0: Bayes' rule for a denoiser.  [§5]"""

    @abstractmethod
    def log_marginal(self, log_p: Float[Tensor, "*b L N"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """log Σ_{x_0} P_σ(y, x_0)·p(x_0): the distribution of the noisy token, given that of the clean one.  [§5]"""

    def leave_one_out(
        self, log_mean: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L N"]:
        """Return log p(x_0 | all noisy tokens but its own) of a denoiser p(x_0 | x_t), up to a constant.  [§5]"""
        self._check_mean(log_mean, x_t)
        return log_mean - self.add_log_likelihood(torch.zeros_like(log_mean), x_t, sigma)

    def marginal_score(
        self, log_p: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """Return the log of the score s_y = p_σ(y)/p_σ(x_t), where p_σ = Σ_{x_0} P_σ(·, x_0)·p(x_0).  [§5]"""
        self._check_mean(log_p, x_t)
        log_marginal = self.log_marginal(log_p, sigma)
        return log_marginal - log_marginal.gather(-1, x_t[..., None])

    def mean_score(
        self, log_mean: Float[Tensor, "*b L N"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L n"]:
        """Return the log of the score s_y = E[a_y(x_0) | x_t] of a denoiser p(x_0 | x_t).  [§3, §5]"""
        return self.marginal_score(self.leave_one_out(log_mean, x_t, sigma), x_t, sigma)

    @abstractmethod
    def staggered_score(self, score: Float[Tensor, "*b L n"], dsigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """exp(−Δσ Q) s: the ratios p_{σ−Δσ}(y)/p_σ(x) of the lower noise level to the present one.  [§9]"""

    def amplifies_rounding(self, dsigma: Float[Tensor, "*s"]) -> bool:
        """Return whether some step Δσ is above 7: errors of the score grow as e^Δσ, and float32 has 7 digits."""
        return not self.only_masks and bool((dsigma > 7).any())

    # Steps of finite size ----------------------------------------------------------------------------------

    def log_posterior(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L n"]:
        """log Σ_{x_0} q(x_s | x_t, x_0)·p(x_0 | x_t) = log P_Δσ(x_t, x_s)·p_σs(x_s)/p_σt(x_t).  [§6]

        This is a denoiser's reverse step from σ_t to σ_s < σ_t; p_σ is the marginal of its `leave_one_out`.
        """
        validate.decreasing_sigma(sigma_s, sigma_t)
        sigma_s, sigma_t = sigma_s.to(log_mean.dtype), sigma_t.to(log_mean.dtype)
        log_p = self.leave_one_out(log_mean, x_t, sigma_t).log_softmax(-1)
        step = self.transition(x_t[..., None], self._states(x_t.device), (sigma_t - sigma_s)[..., None, None])
        before = self.log_marginal(log_p, sigma_t).gather(-1, x_t[..., None])
        return step.log() + self.log_marginal(log_p, sigma_s) - before

    def posterior_kl(
        self,
        log_mean: Float[Tensor, "*b L N"],
        x_t: Int[Tensor, "*b L"],
        x_0: Int[Tensor, "*b L"],
        sigma_s: Float[Tensor, "*b"],
        sigma_t: Float[Tensor, "*b"],
    ) -> Float[Tensor, "*b L"]:
        """KL(q(x_s | x_t, x_0) ‖ p(x_s | x_t)), the terms of the D3PM bound.  [§6]

        It is the sum of the score-entropy divergences of p from q: both sum to 1, and no term is below 0.
        """
        validate.clean_tokens(x_0, self.vocab_size)
        certain = torch.full_like(log_mean, -torch.inf).scatter(-1, x_0[..., None], 0)
        log_q = self.log_posterior(certain, x_t, sigma_s, sigma_t)
        return score_entropy(self.log_posterior(log_mean, x_t, sigma_s, sigma_t), log_q).sum(-1)
