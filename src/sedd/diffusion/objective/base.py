"""The interface of objectives: times, noisy sequences, and a weighted loss at every position."""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.diffusion import validate
from sedd.diffusion.process import Absorbing, Process
from sedd.diffusion.schedule import Schedule, Times, TimeSampler, UniformTimes

M = TypeVar("M")


class Objective(ABC, Generic[M]):
    """A loss per position, in nats, and how to draw what it is computed on; ``M`` is the kind of model it trains."""

    is_bound: ClassVar[bool]
    """Whether the loss summed over positions bounds −log p(x_0), but for the prior and the reconstruction."""

    needs: ClassVar[type | None] = None
    """What a model must be able to do beyond giving log-scores."""

    def __call__(
        self,
        model: M,
        x_0: Int[Tensor, "*b L"],
        u: Float[Tensor, "*b"],
        generator: torch.Generator,
    ) -> Float[Tensor, "*b L"]:
        """The loss of every position, at times made of ``u`` in (0, 1) and noise from ``generator``."""
        validate.clean_tokens(x_0, self._tokens())
        self._accept(model)
        times = self.times(u)
        x_t = self.corrupt(x_0, times.t, generator)
        return weighed(times.weight, self.loss(model, x_t, x_0, times.t))

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
        self, model: M, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """What its answer costs, at every position."""

    @abstractmethod
    def _tokens(self) -> int:
        """How many tokens there are."""

    def _accept(self, model: object) -> None:
        if self.needs is not None and not isinstance(model, self.needs):
            method = next(name for name in vars(self.needs) if name.startswith("log_"))
            raise ValueError(
                f"{type(self).__name__} needs a model with {method}(), and {type(model).__name__} has none; "
                "wrap the network in the parameterization that gives it"
            )


def weighed(weight: Tensor, loss: Tensor) -> Tensor:
    """The loss of every position times the weight of its row."""
    return weight.to(loss.dtype)[..., None] * loss


@dataclass(frozen=True)
class Noised(Objective[M], ABC):
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
class Integral(Noised[M], ABC):
    """An integral over t from t_min to 1."""

    _: KW_ONLY
    t_min: float = 0.0
    time_sampler: TimeSampler = field(default_factory=UniformTimes)
    """`schedule.UniformTimes` or, to importance-sample the times, `schedule.ImportanceTimes`."""

    def __post_init__(self) -> None:
        validate.t_min(self.t_min)

    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """Times in [t_min, 1]."""
        return self.time_sampler(u, self.t_min)


@dataclass(frozen=True)
class Masked(Objective[M], ABC):
    """A loss on masked tokens that needs no schedule; the model does not depend on time."""

    process: Process

    def __post_init__(self) -> None:
        only_absorbing(self, self.process)

    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """``u`` itself, which picks how much is masked."""
        return UniformTimes()(u)

    def _tokens(self) -> int:
        return self.process.vocab_size


def only_absorbing(objective: object, process: Process) -> None:
    """Refuse a process without a mask."""
    if not isinstance(process, Absorbing):
        raise ValueError(f"{type(objective).__name__} masks tokens, so it needs Absorbing; {process} has no mask")
