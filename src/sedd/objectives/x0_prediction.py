"""Objectives that predict the clean token.  [§6]"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd import draws, tensors
from sedd.objectives.base import Integral, Masked, Objective
from sedd.objectives.coefficients import CrossEntropyTerms
from sedd.parameterization import Denoiser, HasNoise, NextTokenPredictor
from sedd.process import log_odds, reveal_probability
from sedd.schedule import Times, UniformTimes


@final
@dataclass(frozen=True)
class MeanCrossEntropy(Integral[Denoiser]):
    """Cross entropy −log p(x_0 | x_t) with the same weight at every time: a denoiser, but no bound.  [§6]"""

    is_bound: ClassVar[bool] = False
    needs: ClassVar[type | None] = Denoiser

    def coefficients(
        self, noise: HasNoise, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> CrossEntropyTerms:
        """−log p(x_0 | x_t); under absorbing noise at masked positions only, since the others are known."""
        return CrossEntropyTerms(x_t, x_0, self.sigma(noise, t), torch.ones_like(t), self.counts(noise, x_t))


@final
@dataclass(frozen=True)
class D3PM(Objective[Denoiser]):
    """The variational bound of a chain of ``steps`` discrete steps, for a denoiser: D3PM.  [§6]

    Step k of T goes from t = k/T to (k−1)/T, and p(x_s | x_t) = Σ_{x_0} q(x_s | x_t, x_0)·p(x_0 | x_t). As T grows
    it falls to the score entropy of the same denoiser.

    Reference: Austin et al. 2021, "Structured Denoising Diffusion Models in Discrete State-Spaces", arXiv 2107.03006.
    """

    is_bound: ClassVar[bool] = True
    needs: ClassVar[type | None] = Denoiser
    steps: int = 1000
    """Number T of steps of the chain."""

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps is {self.steps}; the chain needs a whole number of at least 1 step")

    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """Map uniforms to the ends k/T of the steps, each with weight T."""
        tensors.check_times(u)
        k = (1 + torch.floor(u * self.steps)).clamp_max(self.steps)  # u = 1 belongs to the last step
        return Times(t=k / self.steps, weight=torch.full_like(u, self.steps))

    def coefficients(
        self, noise: HasNoise, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> CrossEntropyTerms | None:
        """P(the step reveals a mask) · −log p_{x_0} at masked positions; None under other noise."""
        if not noise.process.only_masks:
            return None
        sigma_s, sigma_t = self._step(noise, t)
        return CrossEntropyTerms(x_t, x_0, sigma_t, reveal_probability(sigma_s, sigma_t), self.counts(noise, x_t))

    def loss(
        self, model: Denoiser, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """KL(q(x_s | x_t, x_0) ‖ p(x_s | x_t)), s = t − 1/T."""
        if model.process.only_masks:
            return super().loss(model, x_t, x_0, t)
        sigma_s, sigma_t = self._step(model, t)
        return model.process.posterior_kl(model.log_mean(x_t, sigma_t), x_t, x_0, sigma_s, sigma_t)

    def _step(self, noise: HasNoise, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return σ_s and σ_t."""
        s = (t - 1 / self.steps).clamp_min(0)  # 1/T − 1/T may round below 0
        return self.sigma(noise, s), self.sigma(noise, t)


@final
@dataclass(frozen=True)
class TimeDCE(Integral[Denoiser]):
    """t-DCE: ∫ σ'/(e^σ − 1) · E Σ_{masked} −log p_{x_0} dt; score entropy for a denoiser, without the score.  [§6]

    References: Ou et al. 2024, "Your Absorbing Discrete Diffusion Secretly Models the Conditional Distributions of
    Clean Data", arXiv 2406.03736; the same loss in Sahoo et al. 2024, "Simple and Effective Masked Diffusion Language
    Models", arXiv 2406.07524, and Shi et al. 2024, "Simplified and Generalized Masked Diffusion for Discrete Data",
    arXiv 2406.04329.
    """

    is_bound: ClassVar[bool] = True
    needs: ClassVar[type | None] = Denoiser
    needs_mask: ClassVar[bool] = True

    def coefficients(
        self, noise: HasNoise, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> CrossEntropyTerms:
        """σ'/(e^σ − 1) · −log p_{x_0} at masked positions."""
        sigma, rate = noise.schedule(t)
        return CrossEntropyTerms(x_t, x_0, sigma, rate * torch.exp(-log_odds(sigma)), self.counts(noise, x_t))


@final
@dataclass(frozen=True)
class LambdaDCE(Masked[Denoiser]):
    """λ-DCE: mask each position with probability λ ~ U(0, 1); 1/λ · Σ_{masked} −log p_{x_0}. No schedule.  [§6]

    Reference: Ou et al. 2024, arXiv 2406.03736.
    """

    is_bound: ClassVar[bool] = True
    needs: ClassVar[type | None] = Denoiser

    def sigma(self, noise: HasNoise, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return the noise that masks each position with probability λ = t."""
        return -torch.log1p(-t)

    def coefficients(
        self, noise: HasNoise, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> CrossEntropyTerms:
        """1/λ · −log p_{x_0} at masked positions."""
        weight = 1 / t.clamp_min(1e-30)  # λ = 0 masks nothing: avoid 0·∞
        return CrossEntropyTerms(x_t, x_0, self.sigma(noise, t), weight, self.counts(noise, x_t))


@final
@dataclass(frozen=True)
class AnyOrder(Masked[Denoiser]):
    """Any-order: k ~ U{1..L}, exactly k random positions masked, L/k · Σ_{masked} −log p_{x_0}.  [§6]

    References: Uria et al. 2013, "A Deep and Tractable Density Estimator", arXiv 1310.1757; Hoogeboom et al. 2021,
    "Autoregressive Diffusion Models", arXiv 2110.02037; as an objective of diffusion, Ou et al. 2024, arXiv 2406.03736.
    """

    is_bound: ClassVar[bool] = True
    needs: ClassVar[type | None] = Denoiser
    allows_padding: ClassVar[bool] = False

    def corrupt(
        self, noise: HasNoise, x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], generator: torch.Generator
    ) -> Int[Tensor, "*b L"]:
        """Mask k random positions, k = 1 + ⌊tL⌋."""
        order = draws.uniforms(tuple(x_0.shape), generator).argsort(-1).argsort(-1)
        return torch.where(order < self._count(t, x_0)[..., None], noise.process.num_states - 1, x_0)

    def coefficients(
        self, noise: HasNoise, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> CrossEntropyTerms:
        """L/k · −log p_{x_0} at masked positions."""
        length, k = x_0.shape[-1], self._count(t, x_0)
        sigma = -torch.log1p(-k / (length + 1))  # the noise at which about k of L are masked; never infinite
        return CrossEntropyTerms(x_t, x_0, sigma, length / k, self.counts(noise, x_t))

    def _count(self, t: Tensor, x_0: Tensor) -> Tensor:
        length = x_0.shape[-1]
        return (1 + torch.floor(t * length)).clamp_max(length)  # t = 1 masks all


@final
@dataclass(frozen=True)
class Autoregressive(Objective[NextTokenPredictor]):
    """−log p(x_i | x_1 … x_{i−1}), the autoregressive baseline: the likelihood itself rather than a bound.  [§6]"""

    is_bound: ClassVar[bool] = True
    needs: ClassVar[type | None] = NextTokenPredictor
    has_schedule: ClassVar[bool] = False

    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """Return uniform times, which are not used."""
        return UniformTimes()(u)

    def sigma(self, noise: HasNoise, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return 0: there is no noise."""
        return torch.zeros_like(t)

    def corrupt(
        self, noise: HasNoise, x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], generator: torch.Generator
    ) -> Int[Tensor, "*b L"]:
        """Return x_0."""
        return x_0

    def counts(self, noise: HasNoise, x_t: Int[Tensor, "*b L"]) -> None:
        """Return None: every token counts."""

    def coefficients(
        self, noise: HasNoise, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> CrossEntropyTerms:
        """−log p of every token."""
        return CrossEntropyTerms(x_0, x_0, self.sigma(noise, t), torch.ones_like(t), None)

    def loss(
        self, model: NextTokenPredictor, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """−log p(x_i | x_1 … x_{i−1})."""
        return self.coefficients(model, x_t, x_0, t).loss(model.log_next(x_0))
