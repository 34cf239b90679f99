"""Objectives: what a model is trained to make small.  [§4, §6]

An objective says at which times to look (`times`), what to show the model there (`corrupt`) and what its
answer costs (`loss`); calling it does the three in turn:

    loss = objective(model, x_0, stratified(len(x_0), generator), generator)    # nats, (*b, L)

Sum it over positions and average it over the batch. Where ``is_bound`` is true, that sum is in expectation the
diffusion term of an upper bound on −log p(x_0), with any schedule.  [§8]
"""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd import categorical, check, divergence
from sedd.exact import Law, Score
from sedd.parameterization import Conditioner, Denoiser, Predictor
from sedd.process import Absorbing, Process, at_token, log_odds
from sedd.schedule import Clock, Even, Schedule, Times


class Objective(ABC):
    """A loss a position, in nats, and how to draw what it is computed on."""

    is_bound: ClassVar[bool]
    """Whether the loss summed over positions bounds −log p(x_0), but for the prior and the reconstruction."""

    needs: ClassVar[type | None] = None
    """What a model must be able to do beyond giving log-scores."""

    def __call__(
        self,
        model: Any,
        x_0: Int[Tensor, "*b L"],
        u: Float[Tensor, "*b"],
        generator: torch.Generator,
    ) -> Float[Tensor, "*b L"]:
        """The loss of every position, at times made of ``u`` in (0, 1) and noise from ``generator``."""
        check.clean(x_0, self._tokens())
        self._accept(model)
        times = self.times(u)
        x_t = self.corrupt(x_0, times.t, generator)
        return _weighed(times.weight, self.loss(model, x_t, x_0, times.t))

    @abstractmethod
    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """Times in [0, 1] and 1/density, from uniform ``u``."""

    @abstractmethod
    def corrupt(
        self, x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], generator: torch.Generator
    ) -> Int[Tensor, "*b L"]:
        """What the model is shown."""

    @abstractmethod
    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """What its answer costs, at every position."""

    @abstractmethod
    def _tokens(self) -> int:
        """How many tokens there are."""

    def _accept(self, model: Any) -> None:
        if self.needs is not None and not isinstance(model, self.needs):
            method = next(name for name in vars(self.needs) if name.startswith("log_"))
            raise ValueError(
                f"{type(self).__name__} needs a model with {method}(), and {type(model).__name__} has none; "
                "wrap the network in the parameterization that gives it"
            )


def _weighed(weight: Tensor, loss: Tensor) -> Tensor:
    """The loss of every position times the weight of its row."""
    return weight.to(loss.dtype)[..., None] * loss


@dataclass(frozen=True)
class Noised(Objective, ABC):
    """A loss on sequences that a process and a schedule have noised."""

    process: Process
    schedule: Schedule

    def corrupt(
        self, x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], generator: torch.Generator
    ) -> Int[Tensor, "*b L"]:
        """x_t given x_0."""
        return self.process.corrupt(x_0, self.schedule.sigma(t), generator)

    def _tokens(self) -> int:
        return self.process.vocab_size


@dataclass(frozen=True)
class Integral(Noised, ABC):
    """An integral over t from t_min to 1."""

    _: KW_ONLY
    t_min: float = 0.0
    clock: Clock = field(default_factory=Even)
    """`schedule.Even` or, to importance-sample the times, `schedule.Importance`."""

    def __post_init__(self) -> None:
        check.t_min(self.t_min)

    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """Times in [t_min, 1]."""
        return self.clock(u, self.t_min)


@dataclass(frozen=True)
class Masked(Objective, ABC):
    """A loss on masked tokens that needs no schedule: the model is asked to know no time."""

    process: Process

    def __post_init__(self) -> None:
        _only_absorbing(self, self.process)

    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """``u`` itself, which picks how much is masked."""
        return Even()(u)

    def _tokens(self) -> int:
        return self.process.vocab_size


def _only_absorbing(objective: Objective, process: Process) -> None:
    if not isinstance(process, Absorbing):
        raise ValueError(f"{type(objective).__name__} masks tokens, so it needs Absorbing; {process} has no mask")


# Scores against ratios -------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class DenoisingScoreEntropy(Integral):
    """∫ σ' E Σ_i Σ_{y≠x_i} Q(x_i, y)·[s_y − a_y log s_y + K(a_y)] dt: the default, and the bound.  [§4]"""

    is_bound: ClassVar[bool] = True

    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """σ'·(score entropy against the denoising ratios)."""
        sigma, rate = self.schedule(t)
        loss = self.process.score_entropy(model(x_t, sigma), x_t, x_0, sigma)
        return _weighed(rate, loss)


@final
@dataclass(frozen=True)
class DenoisingConcreteScore(Integral):
    """The same with ½(s_y − a_y)² in place of score entropy: concrete score matching. No bound.  [§6]"""

    is_bound: ClassVar[bool] = False

    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """σ'·½ Σ_{y≠x_i} Q(x_i, y)·(s_y − a_y)²."""
        sigma, rate = self.schedule(t)
        loss = self.process.denoising(divergence.square, model(x_t, sigma), x_t, x_0, sigma)
        return _weighed(rate, loss)


@final
@dataclass(frozen=True)
class SoftmaxLinear(Integral):
    """A formulation in circulation: s = softmax of the log-scores, and s where score entropy has log s.  [§6]

    It is linear in s, so it is no score entropy, its minimum is not at the ratios, and it bounds nothing.
    Kept under its own name so that people can see what it does. The score it trains is
    ``model(x_t, sigma).softmax(-1)``.
    """

    is_bound: ClassVar[bool] = False

    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """σ'·Σ_{y≠x_i} Q(x_i, y)·[s_y − a_y s_y + K(a_y)]."""
        sigma, rate = self.schedule(t)
        log_s = model(x_t, sigma).log_softmax(-1)
        loss = self.process.denoising(divergence.linear, log_s, x_t, x_0, sigma)
        return _weighed(rate, loss)


@dataclass(frozen=True)
class _Explicit(Integral, ABC):
    law: Law

    def __post_init__(self) -> None:
        super().__post_init__()
        Score(self.law, self.process)  # refuses a law of another vocabulary

    def _log_ratio(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        ratio: Tensor = Score(self.law, self.process)(x_t, sigma)
        return ratio


@final
@dataclass(frozen=True)
class ExplicitScoreEntropy(_Explicit):
    """Score entropy against the true ratios of a law that is written down: 0 exactly at them.  [§6]"""

    is_bound: ClassVar[bool] = False

    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """σ'·(score entropy against the true ratios); x_0 served to draw x_t only."""
        sigma, rate = self.schedule(t)
        log_ratio = self._log_ratio(x_t, sigma)
        loss = self.process.explicit(divergence.score_entropy, model(x_t, sigma), log_ratio, x_t)
        return _weighed(rate, loss)


@final
@dataclass(frozen=True)
class ExplicitConcreteScore(_Explicit):
    """Concrete score matching against the true ratios of a law that is written down.  [§6]"""

    is_bound: ClassVar[bool] = False

    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """σ'·½ Σ_{y≠x_i} Q(x_i, y)·(s_y − true ratio)²."""
        sigma, rate = self.schedule(t)
        log_ratio = self._log_ratio(x_t, sigma)
        loss = self.process.explicit(divergence.square, model(x_t, sigma), log_ratio, x_t)
        return _weighed(rate, loss)


@final
@dataclass(frozen=True)
class ImplicitScoreEntropy(Integral):
    """Score entropy without any ratio, by asking the model at every neighbour of x_t; small spaces only.  [§6]

    It differs from the explicit form by a constant that the model has no part in, so it may be negative.
    """

    is_bound: ClassVar[bool] = False

    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """σ'·Σ_{y≠x_i} [Q(x_i, y)·s(x)_y − Q(y, x_i)·log s(x with x_i → y)_{x_i}]."""
        sigma, rate = self.schedule(t)
        log_score = model(x_t, sigma)
        states, length = self.process.num_states, x_t.shape[-1]
        y = torch.arange(states, device=x_t.device)
        position = torch.eye(length, dtype=torch.bool, device=x_t.device)[:, None]  # i, 1, L
        neighbours = torch.where(position, y[:, None], x_t[..., None, None, :])  # *b, i, y, L
        back = model(neighbours, sigma[..., None, None].expand(neighbours.shape[:-1]))  # *b, i, y, L, n
        back = back.gather(-1, x_t[..., None, None, :, None].expand(*neighbours.shape, 1)).squeeze(-1)
        back = back.diagonal(dim1=-3, dim2=-1).transpose(-2, -1)  # *b, i, y: at position i alone
        own = y == x_t[..., None]
        into, out = (
            torch.where(own, 0, rates(x_t, log_score.dtype))
            for rates in (self.process.rates_into, self.process.rates_out_of)
        )
        loss = torch.where(into > 0, into * log_score.exp(), 0) - torch.where(out > 0, out * back, 0)
        return _weighed(rate, loss.sum(-1))


@final
@dataclass(frozen=True)
class RatioMatching(Integral):
    """−log p_t(x_i | x_−i), the noisy token given the others, by maximum likelihood. No bound.  [§6]"""

    is_bound: ClassVar[bool] = False
    needs: ClassVar[type | None] = Conditioner

    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """−log p(x_i | x_−i) at every position of x_t."""
        return -at_token(model.log_conditional(x_t, self.schedule.sigma(t)), x_t)


# Predictions of the clean token ----------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class MeanCrossEntropy(Integral):
    """−log p(x_0 | x_t), every time weighing the same: a good denoiser, no bound.  [§6]"""

    is_bound: ClassVar[bool] = False
    needs: ClassVar[type | None] = Denoiser

    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """Cross entropy, at masked positions alone where there is a mask: the others are known."""
        loss = -at_token(model.log_mean(x_t, self.schedule.sigma(t)), x_0)
        return torch.where(self.process.unknown(x_t), loss, 0)


@final
@dataclass(frozen=True)
class D3PM(Noised):
    """The variational bound of a chain of ``steps`` discrete steps, for a denoiser.  [§6]

    Step k of T goes from t = k/T to (k−1)/T, and p(x_s | x_t) = Σ_{x_0} q(x_s | x_t, x_0)·p(x_0 | x_t). As T grows
    it falls to the score entropy of the same denoiser.
    """

    is_bound: ClassVar[bool] = True
    needs: ClassVar[type | None] = Denoiser
    steps: int = 1000

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps is {self.steps}; the chain needs a whole number of at least 1 step")

    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """The ends k/T of the steps, evenly; each stands for T of them."""
        check.times(u)
        k = (1 + torch.floor(u * self.steps)).clamp_max(self.steps)  # u = 1 is the last step's
        return Times(t=k / self.steps, weight=torch.full_like(u, self.steps))

    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """KL(q(x_s | x_t, x_0) ‖ p(x_s | x_t)), s = t − 1/T."""
        s = (t - 1 / self.steps).clamp_min(0)  # 1/T − 1/T may round below 0
        sigma_s, sigma_t = self.schedule.sigma(s), self.schedule.sigma(t)
        return self.process.posterior_kl(model.log_mean(x_t, sigma_t), x_t, x_0, sigma_s, sigma_t)


@final
@dataclass(frozen=True)
class TimeDCE(Integral):
    """t-DCE: ∫ σ'/(e^σ − 1) · E Σ_{masked} −log p_{x_0} dt; score entropy for a denoiser, without the score.  [§6]"""

    is_bound: ClassVar[bool] = True
    needs: ClassVar[type | None] = Denoiser

    def __post_init__(self) -> None:
        super().__post_init__()
        _only_absorbing(self, self.process)

    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """σ'/(e^σ − 1) · −log p_{x_0} at masked positions."""
        sigma, rate = self.schedule(t)
        loss = -at_token(model.log_mean(x_t, sigma), x_0)
        loss = torch.where(self.process.unknown(x_t), loss, 0)
        return _weighed(rate * torch.exp(-log_odds(sigma)), loss)


@final
@dataclass(frozen=True)
class LambdaDCE(Masked):
    """λ-DCE: mask each position with probability λ ~ U(0, 1); 1/λ · Σ_{masked} −log p_{x_0}. No schedule.  [§6]"""

    is_bound: ClassVar[bool] = True
    needs: ClassVar[type | None] = Denoiser

    def corrupt(
        self, x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], generator: torch.Generator
    ) -> Int[Tensor, "*b L"]:
        """Each position masked with probability λ = t."""
        return self.process.corrupt(x_0, self._sigma(t), generator)

    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """1/λ · −log p_{x_0} at masked positions."""
        loss = -at_token(model.log_mean(x_t, self._sigma(t)), x_0)
        loss = torch.where(self.process.unknown(x_t), loss, 0)
        return _weighed(1 / t.clamp_min(1e-30), loss)  # λ = 0 masks nothing, and 0·∞ is no loss

    def _sigma(self, masked: Tensor) -> Tensor:
        return -torch.log1p(-masked)


@final
@dataclass(frozen=True)
class AnyOrder(Masked):
    """Any-order: k ~ U{1..L}, exactly k random positions masked, L/k · Σ_{masked} −log p_{x_0}.  [§6]"""

    is_bound: ClassVar[bool] = True
    needs: ClassVar[type | None] = Denoiser

    def corrupt(
        self, x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], generator: torch.Generator
    ) -> Int[Tensor, "*b L"]:
        """k random positions masked; t in (0, 1) picks k."""
        order = categorical.uniforms(tuple(x_0.shape), generator).argsort(-1).argsort(-1)
        return torch.where(order < self._count(t, x_0)[..., None], self.process.num_states - 1, x_0)

    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """L/k · −log p_{x_0} at masked positions."""
        length, k = x_0.shape[-1], self._count(t, x_0)
        sigma = -torch.log1p(-k / (length + 1))  # the noise at which about k of L are masked; never infinite
        loss = -at_token(model.log_mean(x_t, sigma), x_0)
        return _weighed(length / k, torch.where(self.process.unknown(x_t), loss, 0))

    def _count(self, t: Tensor, x_0: Tensor) -> Tensor:
        length = x_0.shape[-1]
        return (1 + torch.floor(t * length)).clamp_max(length)  # t = 1 masks all


@final
@dataclass(frozen=True)
class Autoregressive(Objective):
    """−log p(x_i | x_1 … x_{i−1}): the baseline. Its sum is no bound but the likelihood itself.  [§6]"""

    is_bound: ClassVar[bool] = True
    needs: ClassVar[type | None] = Predictor
    vocab_size: int

    def __post_init__(self) -> None:
        check.vocabulary(self.vocab_size)

    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """There is no time; any will do."""
        return Even()(u)

    def corrupt(
        self, x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], generator: torch.Generator
    ) -> Int[Tensor, "*b L"]:
        """Nothing is hidden."""
        return x_0

    def loss(
        self, model: Any, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """−log p(x_i | what stands before it)."""
        return -at_token(model.log_next(x_0), x_0)

    def _tokens(self) -> int:
        return self.vocab_size
