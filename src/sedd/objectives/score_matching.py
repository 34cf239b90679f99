"""Score-matching objectives: divergences between a model's scores and ratios of probabilities.  [§4, §6]"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd import divergence
from sedd.objectives.base import Integral
from sedd.objectives.coefficients import ScoreEntropyTerms, weighted
from sedd.parameterization import ConditionalPredictor, HasNoise, LogScoreModel, SignedScoreModel
from sedd.process import at_token


@final
@dataclass(frozen=True)
class DenoisingScoreEntropy(Integral[LogScoreModel]):
    """∫ σ' E Σ_i Σ_{y≠x_i} Q(x_i, y)·[s_y − a_y log s_y + K(a_y)] dt: the bound, and the default.  [§4]

    Reference: Lou et al. 2024, "Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution",
    arXiv 2310.16834. The denoising form is that of Vincent 2011, "A Connection Between Score Matching and
    Denoising Autoencoders", doi:10.1162/NECO_a_00142.
    """

    is_bound: ClassVar[bool] = True

    def coefficients(
        self, noise: HasNoise, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> ScoreEntropyTerms:
        """σ'·(score entropy against the denoising ratios)."""
        sigma, rate = noise.schedule(t)
        return ScoreEntropyTerms(x_t, x_0, sigma, rate, self.counts(noise, x_t), noise.process)


@final
@dataclass(frozen=True)
class DenoisingConcreteScore(Integral[LogScoreModel]):
    """Denoising concrete score matching: ½(s_y − a_y)² in place of score entropy. No bound.  [§6]

    Reference: Meng et al. 2022, "Concrete Score Matching: Generalized Score Matching for Discrete Data",
    arXiv 2211.00802.
    """

    is_bound: ClassVar[bool] = False

    def loss(
        self, model: LogScoreModel, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """σ'·½ Σ_{y≠x_i} Q(x_i, y)·(s_y − a_y)²; s may be negative if the model is a `SignedScoreModel`."""
        sigma, rate = model.schedule(t)
        if isinstance(model, SignedScoreModel):
            loss = model.process.denoising(divergence.signed_square, model.score(x_t, sigma), x_t, x_0, sigma)
        else:
            loss = model.process.denoising(divergence.square, model(x_t, sigma), x_t, x_0, sigma)
        return weighted(rate, loss)


@final
@dataclass(frozen=True)
class SoftmaxLinear(Integral[LogScoreModel]):
    """A faulty loss found in practice: s = softmax of the log-scores, and s where score entropy has log s.  [§6]

    It is linear in s, so its minimum is not at the ratios, and it bounds nothing. It is here for comparison. The score
    it trains is ``model(x_t, sigma).softmax(-1)``.
    """

    is_bound: ClassVar[bool] = False

    def loss(
        self, model: LogScoreModel, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """σ'·Σ_{y≠x_i} Q(x_i, y)·[s_y − a_y s_y + K(a_y)]."""
        sigma, rate = model.schedule(t)
        log_s = model(x_t, sigma).log_softmax(-1)
        loss = model.process.denoising(divergence.linear, log_s, x_t, x_0, sigma)
        return weighted(rate, loss)


@final
@dataclass(frozen=True)
class ImplicitScoreEntropy(Integral[LogScoreModel]):
    """Score entropy without ratios, from the model's scores at all neighbours of x_t: for small spaces.  [§6]

    It differs from the explicit form by a constant that does not depend on the model, so it may be negative.

    References: Lou et al. 2024, arXiv 2310.16834; in continuous spaces Hyvärinen 2005, "Estimation of Non-Normalized
    Statistical Models by Score Matching".
    """

    is_bound: ClassVar[bool] = False

    def loss(
        self, model: LogScoreModel, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """σ'·Σ_{y≠x_i} [Q(x_i, y)·s(x)_y − Q(y, x_i)·log s(x with x_i → y)_{x_i}]."""
        sigma, rate = model.schedule(t)
        log_score = model(x_t, sigma)
        states, length = model.process.num_states, x_t.shape[-1]
        y = torch.arange(states, device=x_t.device)
        position = torch.eye(length, dtype=torch.bool, device=x_t.device)[:, None]  # i, 1, L
        neighbours = torch.where(position, y[:, None], x_t[..., None, None, :])  # *b, i, y, L
        back = model(neighbours, sigma[..., None, None].expand(neighbours.shape[:-1]))  # *b, i, y, L, n
        back = back.gather(-1, x_t[..., None, None, :, None].expand(*neighbours.shape, 1)).squeeze(-1)
        back = back.diagonal(dim1=-3, dim2=-1).transpose(-2, -1)  # *b, i, y: at position i alone
        is_x_t = y == x_t[..., None]
        into, out = (
            torch.where(is_x_t, 0, rates(x_t, log_score.dtype))
            for rates in (model.process.rates_into, model.process.rates_out_of)
        )
        loss = torch.where(into > 0, into * log_score.exp(), 0) - torch.where(out > 0, out * back, 0)
        return weighted(rate, loss.sum(-1))


@final
@dataclass(frozen=True)
class RatioMatching(Integral[ConditionalPredictor]):
    """Ratio matching: −log p_t(x_i | x_−i), the likelihood of each noisy token given the others. No bound.  [§6]

    References: Hyvärinen 2007, "Some extensions of score matching", doi:10.1016/j.csda.2006.09.003; Sun et al. 2022,
    "Score-based Continuous-time Discrete Diffusion Models", arXiv 2211.16750.
    """

    is_bound: ClassVar[bool] = False
    needs: ClassVar[type | None] = ConditionalPredictor

    def loss(
        self, model: ConditionalPredictor, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """−log p(x_i | x_−i) at every position of x_t."""
        return -at_token(model.log_conditional(x_t, model.schedule.sigma(t)), x_t)
