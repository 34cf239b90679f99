"""Training objectives.  [§4, §6]

An objective samples times (`times`), corrupts the data (`corrupt`) and computes the loss of the model (`loss`);
calling it does the three in turn, with the process and the schedule of the model:

    loss = LambdaDCE()(model, x_0, generator=generator)    # nats, (*b, L)

Sum it over positions and average it over the batch. Where ``is_bound`` is true, that sum is in expectation the
diffusion term of an upper bound on −log p(x_0), with any schedule.  [§8]
"""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool
from torch import Tensor

from sedd import divergence, tensors
from sedd.draws import uniforms
from sedd.parameterization import CausalModel, HasNoise, MeanModel, SignedScoreModel
from sedd.process import Process, at_token, log_odds, reveal_probability
from sedd.schedule import Times, TimeSampler, UniformTimes, corruption_probability, stratified
from sedd.tensors import PerPosition, PerSequence, Tokens


def weighted(weight: Tensor, loss: Tensor) -> Tensor:
    """Multiply the loss of every position by the weight of its row."""
    return weight.to(loss.dtype)[..., None] * loss


# Coefficients: a loss without the network's output -----------------------------------------------------------


@dataclass(frozen=True)
class Coefficients(ABC):
    """All of a loss but the network's output, so that plain and fused losses share one definition."""

    x_t: Tokens
    x_0: Tokens
    sigma: PerSequence  # the noise level at which the network is called
    weight: PerSequence  # the weight of each sequence's loss
    counts: Bool[Tensor, "*b L"] | None  # False where the loss is 0 whatever the model returns; None: nowhere

    @abstractmethod
    def loss(self, model: Any) -> PerPosition:
        """Return the loss of every position, in nats."""

    @abstractmethod
    def of_logits(self, model: Any) -> "Coefficients | None":
        """Return the coefficients of the same loss of the model's logits; None: logits alone do not determine it."""


@final
@dataclass(frozen=True)
class CrossEntropyTerms(Coefficients):
    """−weight·log p(x_0): what every objective on the clean token is, each with a weight of its own.  [§6]"""

    def loss(self, model: Any) -> PerPosition:
        loss = -at_token(model.log_mean(self.x_t, self.sigma), self.x_0)
        return weighted(self.weight, loss if self.counts is None else torch.where(self.counts, loss, 0))

    def of_logits(self, model: Any) -> "CrossEntropyTerms | None":
        """Return these coefficients if log p is the log-softmax of the logits."""
        is_log_p = isinstance(model, CausalModel) or (isinstance(model, MeanModel) and model.process.only_masks)
        return self if is_log_p else None


@final
@dataclass(frozen=True)
class ScoreEntropyTerms(Coefficients):
    """weight·Σ_{y≠x_t} Q(x_t, y)·[s_y − a_y log s_y + K(a_y)]: the denoising score entropy.  [§4]"""

    process: Process

    def loss(self, model: Any) -> PerPosition:
        log_score = model(self.x_t, self.sigma)
        loss = self.process.denoising(divergence.score_entropy, log_score, self.x_t, self.x_0, self.sigma)
        return weighted(self.weight, loss)

    def of_logits(self, model: Any) -> Coefficients | None:
        """For a denoiser of masks, return a cross entropy: score entropy is then −log p(x_0)/(e^σ − 1).  [§7]"""
        if isinstance(model, MeanModel) and self.process.only_masks:
            weight = self.weight * torch.exp(-log_odds(self.sigma))
            return CrossEntropyTerms(self.x_t, self.x_0, self.sigma, weight, self.counts)
        return self if model.logits_are_scores and self.process.has_fused_forms else None


# What objectives share -------------------------------------------------------------------------------------


class Objective:
    """A training loss per position, in nats, with its times and its noise.

    Process and schedule are the model's. A subclass defines ``times``, and either ``coefficients`` or ``loss``. Where
    an argument is ``noise``, it is a model or anything else with a process and a schedule.
    """

    is_bound: ClassVar[bool] = False
    """Whether the expected loss, summed over positions, is the diffusion term of a bound on −log p(x_0).  [§8]"""
    needs: ClassVar[str | None] = None
    """The method that the model must have, such as ``log_mean``; None: log-scores are enough."""
    needs_mask: ClassVar[bool] = False
    """Whether it is defined under absorbing noise only."""
    has_schedule: ClassVar[bool] = True
    """Whether its noise levels are the schedule's; False: its model must not depend on the noise level."""
    allows_padding: ClassVar[bool] = True
    """Whether the loss of a position is the same if others are padding that does not count."""

    def __call__(self, model: Any, x_0: Tokens, *, generator: torch.Generator | None = None) -> PerPosition:
        """Draw times and noise, and return the weighted loss of every position of the clean sequences x_0.

        Args:
            generator: The source of times and noise; None: one that torch's global generator seeds.
        """
        self.check(model)
        tensors.check_clean_tokens(x_0, model.process.vocab_size)
        if generator is None:  # on a device that has float64
            device = x_0.device if x_0.device.type == "cuda" else "cpu"
            generator = torch.Generator(device).manual_seed(int(torch.randint(2**63 - 1, ())))
        x, batch = x_0.to(generator.device), x_0.shape[:-1]
        times = self.times(stratified(batch.numel(), generator).view(batch))
        x_t = self.corrupt(model, x, times.t, generator)
        x_t, t, weight = (a.to(x_0.device) for a in (x_t, *times))
        return weighted(weight, self.loss(model, x_t, x_0, t))

    def times(self, u: PerSequence) -> Times:
        """Map uniforms to times in [0, 1] and their weights 1/density; by default the times are uniform."""
        return UniformTimes()(u)

    def sigma(self, noise: HasNoise, t: PerSequence) -> PerSequence:
        """Return the total noise at time t: the schedule's, unless the objective has its own."""
        return noise.schedule.sigma(t)

    def corrupt(self, noise: HasNoise, x_0: Tokens, t: PerSequence, generator: torch.Generator) -> Tokens:
        """Draw the noisy sequences x_t at times t."""
        return noise.process.corrupt(x_0, self.sigma(noise, t), generator)

    def corruption_probability(self, noise: HasNoise, t: PerSequence) -> PerSequence:
        """Return the probability that noise has replaced a token at time t."""
        return corruption_probability(self.sigma(noise, t))

    def counts(self, noise: HasNoise, x_t: Tokens) -> Bool[Tensor, "*b L"] | None:
        """Return where noise may have changed a token; elsewhere the loss is 0. None: everywhere."""
        return x_t == noise.process.mask if noise.process.only_masks else None

    def coefficients(self, noise: HasNoise, x_t: Tokens, x_0: Tokens, t: PerSequence) -> Coefficients | None:
        """Return all of the loss but the network's output; None: it has no such form."""
        return None

    def loss(self, model: Any, x_t: Tokens, x_0: Tokens, t: PerSequence) -> PerPosition:
        """Return the loss of the model at every position, before the weight of its time."""
        coefficients = self.coefficients(model, x_t, x_0, t)
        if coefficients is None:
            raise NotImplementedError(f"{type(self).__name__} has no loss; define coefficients() or loss()")
        return coefficients.loss(model)

    def check_process(self, process: Process) -> None:
        """Raise ValueError for noise under which the objective is not defined."""
        if self.needs_mask and not process.only_masks:
            raise ValueError(f"{type(self).__name__} masks tokens: it needs Absorbing; {process} has other noise too")

    def check(self, model: Any) -> None:
        """Raise ValueError for a model that the objective cannot train."""
        name, given = type(self).__name__, type(model).__name__
        if not isinstance(model, HasNoise):
            raise ValueError(f"{name} needs a model, as ScoreModel(network, process) is; {given} has no process")
        if self.needs is not None and not hasattr(model, self.needs):
            raise ValueError(f"{name} needs {self.needs}(), and {given} has none; choose a parameterization with it")
        self.check_process(model.process)


@dataclass(frozen=True)
class Integral(Objective, ABC):
    """An objective that is an integral over t from t_min to 1."""

    _: KW_ONLY
    t_min: float = 0.0
    """Time at which the integral begins; the loss at times below it is left out."""
    time_sampler: TimeSampler = field(default_factory=UniformTimes)
    """`schedule.UniformTimes` or, to importance-sample the times, `schedule.ImportanceTimes`."""

    def __post_init__(self) -> None:
        if not 0 <= self.t_min < 1:
            raise ValueError(f"t_min is {self.t_min}; it must lie in [0, 1)")

    def times(self, u: PerSequence) -> Times:
        return self.time_sampler(u, self.t_min)


@dataclass(frozen=True)
class Masked(Objective, ABC):
    """An objective on masked tokens without a schedule, for models that do not depend on time."""

    needs: ClassVar[str | None] = "log_mean"
    needs_mask: ClassVar[bool] = True
    has_schedule: ClassVar[bool] = False
    _: KW_ONLY
    time_sampler: TimeSampler = field(default_factory=UniformTimes)
    """The distribution of the masked fraction, which stands for the time."""

    def times(self, u: PerSequence) -> Times:
        return self.time_sampler(u)

    def corruption_probability(self, noise: HasNoise, t: PerSequence) -> PerSequence:
        return t


# Losses of the score ---------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class DenoisingScoreEntropy(Integral):
    """∫ σ' E Σ_i Σ_{y≠x_i} Q(x_i, y)·[s_y − a_y log s_y + K(a_y)] dt: the bound, and the default.  [§4]

    References: Lou et al. 2024, arXiv 2310.16834; the denoising form, Vincent 2011, doi:10.1162/NECO_a_00142.
    """

    is_bound: ClassVar[bool] = True

    def coefficients(self, noise: HasNoise, x_t: Tokens, x_0: Tokens, t: PerSequence) -> ScoreEntropyTerms:
        sigma, rate = noise.schedule(t)
        return ScoreEntropyTerms(x_t, x_0, sigma, rate, self.counts(noise, x_t), noise.process)


@final
@dataclass(frozen=True)
class DenoisingConcreteScore(Integral):
    """Denoising concrete score matching: ½(s_y − a_y)², no bound (Meng et al. 2022, arXiv 2211.00802).  [§6]"""

    def loss(self, model: Any, x_t: Tokens, x_0: Tokens, t: PerSequence) -> PerPosition:
        """σ'·½ Σ_{y≠x_i} Q(x_i, y)·(s_y − a_y)²; s may be negative if the model is a `SignedScoreModel`."""
        sigma, rate = model.schedule(t)
        is_signed = isinstance(model, SignedScoreModel)
        score, kind = (model.score, divergence.signed_square) if is_signed else (model, divergence.square)
        return weighted(rate, model.process.denoising(kind, score(x_t, sigma), x_t, x_0, sigma))


@final
@dataclass(frozen=True)
class SoftmaxLinear(Integral):
    """A faulty loss found in practice: s = softmax of the log-scores, and s where score entropy has log s.  [§6]

    It is linear in s, so its minimum is not at the ratios, and it bounds nothing. It is here for comparison. The score
    it trains is ``model(x_t, sigma).softmax(-1)``.
    """

    def loss(self, model: Any, x_t: Tokens, x_0: Tokens, t: PerSequence) -> PerPosition:
        """σ'·Σ_{y≠x_i} Q(x_i, y)·[s_y − a_y s_y + K(a_y)]."""
        sigma, rate = model.schedule(t)
        log_s = model(x_t, sigma).log_softmax(-1)
        return weighted(rate, model.process.denoising(divergence.linear, log_s, x_t, x_0, sigma))


@final
@dataclass(frozen=True)
class ImplicitScoreEntropy(Integral):
    """Score entropy without ratios, from the model's scores at all neighbours of x_t: for small spaces.  [§6]

    It differs from the explicit form by a constant that does not depend on the model, so it may be negative.
    References: Lou et al. 2024, arXiv 2310.16834; in continuous spaces Hyvärinen 2005, "Estimation of Non-Normalized
    Statistical Models by Score Matching".
    """

    def loss(self, model: Any, x_t: Tokens, x_0: Tokens, t: PerSequence) -> PerPosition:
        """σ'·Σ_{y≠x_i} [Q(x_i, y)·s(x)_y − Q(y, x_i)·log s(x with x_i → y)_{x_i}]."""
        sigma, rate = model.schedule(t)
        log_score = model(x_t, sigma)
        y, here = torch.arange(model.process.num_states, device=x_t.device), x_t[..., None]
        position = torch.eye(x_t.shape[-1], dtype=torch.bool, device=x_t.device)[:, None]  # i, 1, L
        neighbours = torch.where(position, y[:, None], x_t[..., None, None, :])  # *b, i, y, L
        back = model(neighbours, sigma[..., None, None].expand(neighbours.shape[:-1]))  # *b, i, y, L, n
        back = back.gather(-1, x_t[..., None, None, :, None].expand(*neighbours.shape, 1)).squeeze(-1)
        back = back.diagonal(dim1=-3, dim2=-1).transpose(-2, -1)  # *b, i, y: at position i alone
        into = torch.where(y == here, 0, model.process.rate(here, y, log_score.dtype))
        out = torch.where(y == here, 0, model.process.rate(y, here, log_score.dtype))
        loss = torch.where(into > 0, into * log_score.exp(), 0) - torch.where(out > 0, out * back, 0)
        return weighted(rate, loss.sum(-1))


@final
@dataclass(frozen=True)
class RatioMatching(Integral):
    """Ratio matching: −log p_t(x_i | x_−i), the likelihood of each noisy token given the others. No bound.  [§6]

    References: Hyvärinen 2007, doi:10.1016/j.csda.2006.09.003; Sun et al. 2022, arXiv 2211.16750.
    """

    needs: ClassVar[str | None] = "log_conditional"

    def loss(self, model: Any, x_t: Tokens, x_0: Tokens, t: PerSequence) -> PerPosition:
        return -at_token(model.log_conditional(x_t, model.schedule.sigma(t)), x_t)


# Losses of the clean token ---------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class MeanCrossEntropy(Integral):
    """Cross entropy −log p(x_0 | x_t) with the same weight at every time: a denoiser, but no bound.  [§6]"""

    needs: ClassVar[str | None] = "log_mean"

    def coefficients(self, noise: HasNoise, x_t: Tokens, x_0: Tokens, t: PerSequence) -> CrossEntropyTerms:
        """At masked positions only under absorbing noise, since the others are known."""
        return CrossEntropyTerms(x_t, x_0, self.sigma(noise, t), torch.ones_like(t), self.counts(noise, x_t))


@final
@dataclass(frozen=True)
class D3PM(Objective):
    """The variational bound of a chain of ``steps`` discrete steps, for a denoiser: D3PM.  [§6]

    Step k of T goes from t = k/T to (k−1)/T, and p(x_s | x_t) = Σ_{x_0} q(x_s | x_t, x_0)·p(x_0 | x_t). As T grows
    it falls to the score entropy of the same denoiser. Reference: Austin et al. 2021, arXiv 2107.03006.
    """

    is_bound: ClassVar[bool] = True
    needs: ClassVar[str | None] = "log_mean"
    steps: int = 1000
    """Number T of steps of the chain."""

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps is {self.steps}; the chain needs a whole number of at least 1 step")

    def times(self, u: PerSequence) -> Times:
        """Map uniforms to the ends k/T of the steps, each with weight T."""
        k = (1 + torch.floor(u * self.steps)).clamp_max(self.steps)  # u = 1 belongs to the last step
        return Times(t=k / self.steps, weight=torch.full_like(u, self.steps))

    def coefficients(self, noise: HasNoise, x_t: Tokens, x_0: Tokens, t: PerSequence) -> CrossEntropyTerms | None:
        """P(the step reveals a mask) · −log p_{x_0} at masked positions; None under other noise."""
        if not noise.process.only_masks:
            return None
        sigma_s, sigma_t = self._step(noise, t)
        return CrossEntropyTerms(x_t, x_0, sigma_t, reveal_probability(sigma_s, sigma_t), self.counts(noise, x_t))

    def loss(self, model: Any, x_t: Tokens, x_0: Tokens, t: PerSequence) -> PerPosition:
        """KL(q(x_s | x_t, x_0) ‖ p(x_s | x_t)), s = t − 1/T."""
        if model.process.only_masks:
            return super().loss(model, x_t, x_0, t)
        sigma_s, sigma_t = self._step(model, t)
        loss: Tensor = model.process.posterior_kl(model.log_mean(x_t, sigma_t), x_t, x_0, sigma_s, sigma_t)
        return loss

    def _step(self, noise: HasNoise, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return σ_s and σ_t."""
        s = (t - 1 / self.steps).clamp_min(0)  # 1/T − 1/T may round below 0
        return self.sigma(noise, s), self.sigma(noise, t)


@final
@dataclass(frozen=True)
class TimeDCE(Integral):
    """t-DCE: ∫ σ'/(e^σ − 1) · E Σ_{masked} −log p_{x_0} dt; score entropy for a denoiser, without the score.  [§6]

    References of 2024: Ou et al., arXiv 2406.03736; Sahoo et al., arXiv 2406.07524; Shi et al., arXiv 2406.04329.
    """

    is_bound: ClassVar[bool] = True
    needs: ClassVar[str | None] = "log_mean"
    needs_mask: ClassVar[bool] = True

    def coefficients(self, noise: HasNoise, x_t: Tokens, x_0: Tokens, t: PerSequence) -> CrossEntropyTerms:
        sigma, rate = noise.schedule(t)
        return CrossEntropyTerms(x_t, x_0, sigma, rate * torch.exp(-log_odds(sigma)), self.counts(noise, x_t))


@final
@dataclass(frozen=True)
class LambdaDCE(Masked):
    """λ-DCE: mask each position with probability λ ~ U(0, 1); 1/λ · Σ_{masked} −log p_{x_0}. No schedule.  [§6]

    Reference: Ou et al. 2024, arXiv 2406.03736.
    """

    is_bound: ClassVar[bool] = True

    def sigma(self, noise: HasNoise, t: PerSequence) -> PerSequence:
        return -torch.log1p(-t)

    def coefficients(self, noise: HasNoise, x_t: Tokens, x_0: Tokens, t: PerSequence) -> CrossEntropyTerms:
        weight = 1 / t.clamp_min(1e-30)  # λ = 0 masks nothing: avoid 0·∞
        return CrossEntropyTerms(x_t, x_0, self.sigma(noise, t), weight, self.counts(noise, x_t))


@final
@dataclass(frozen=True)
class AnyOrder(Masked):
    """Any-order: k ~ U{1..L}, exactly k random positions masked, L/k · Σ_{masked} −log p_{x_0}.  [§6]

    References: Uria et al. 2013, arXiv 1310.1757; Hoogeboom et al. 2021, arXiv 2110.02037; as an objective of
    diffusion, Ou et al. 2024, arXiv 2406.03736.
    """

    is_bound: ClassVar[bool] = True
    allows_padding: ClassVar[bool] = False

    def corrupt(self, noise: HasNoise, x_0: Tokens, t: PerSequence, generator: torch.Generator) -> Tokens:
        order = uniforms(tuple(x_0.shape), generator).argsort(-1).argsort(-1)
        return torch.where(order < self._count(t, x_0)[..., None], noise.process.mask, x_0)

    def coefficients(self, noise: HasNoise, x_t: Tokens, x_0: Tokens, t: PerSequence) -> CrossEntropyTerms:
        length, k = x_0.shape[-1], self._count(t, x_0)
        sigma = -torch.log1p(-k / (length + 1))  # the noise at which about k of L are masked; never infinite
        return CrossEntropyTerms(x_t, x_0, sigma, length / k, self.counts(noise, x_t))

    def _count(self, t: Tensor, x_0: Tensor) -> Tensor:
        length = x_0.shape[-1]
        return (1 + torch.floor(t * length)).clamp_max(length)  # t = 1 masks all


@final
@dataclass(frozen=True)
class Autoregressive(Objective):
    """−log p(x_i | x_1 … x_{i−1}), the autoregressive baseline: the likelihood itself rather than a bound.  [§6]"""

    is_bound: ClassVar[bool] = True
    needs: ClassVar[str | None] = "log_next"
    has_schedule: ClassVar[bool] = False

    def sigma(self, noise: HasNoise, t: PerSequence) -> PerSequence:
        return torch.zeros_like(t)

    def corrupt(self, noise: HasNoise, x_0: Tokens, t: PerSequence, generator: torch.Generator) -> Tokens:
        return x_0

    def counts(self, noise: HasNoise, x_t: Tokens) -> None:
        """Return None: every token counts."""

    def coefficients(self, noise: HasNoise, x_t: Tokens, x_0: Tokens, t: PerSequence) -> CrossEntropyTerms:
        return CrossEntropyTerms(x_0, x_0, self.sigma(noise, t), torch.ones_like(t), None)

    def loss(self, model: Any, x_t: Tokens, x_0: Tokens, t: PerSequence) -> PerPosition:
        return -at_token(model.log_next(x_0), x_0)
