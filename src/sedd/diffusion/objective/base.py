"""The interface of objectives: times, noisy sequences, and a weighted loss at every position."""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.diffusion import validate
from sedd.diffusion.objective.coefficients import Coefficients, weighted
from sedd.diffusion.process import Absorbing, Process, Uniform
from sedd.diffusion.schedule import Schedule, Times, TimeSampler, UniformTimes, corruption_probability

M = TypeVar("M")


class Objective(ABC, Generic[M]):
    """A training loss per position, in nats, with its times and its noise; ``M`` is the kind of model it trains."""

    is_bound: ClassVar[bool]
    """Whether the expected loss, summed over positions, is the diffusion term of a bound on −log p(x_0).  [§8]"""

    needs: ClassVar[type | None] = None
    """The protocol of `parameterization` that the model must have; None: log-scores are enough."""

    def __call__(
        self,
        model: M,
        x_0: Int[Tensor, "*b L"],
        u: Float[Tensor, "*b"],
        generator: torch.Generator,
    ) -> Float[Tensor, "*b L"]:
        """Return the weighted loss of every position.

        Args:
            model: The model to be trained.
            x_0: Clean sequences.
            u: Uniforms in (0, 1), from which times are made.
            generator: The source of noise.
        """
        validate.clean_tokens(x_0, self._vocab_size())
        self._check_model(model)
        times = self.times(u)
        x_t = self.corrupt(x_0, times.t, generator)
        return weighted(times.weight, self.loss(model, x_t, x_0, times.t))

    @abstractmethod
    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """Map uniforms to times in [0, 1] and their weights 1/density."""

    @abstractmethod
    def corrupt(
        self, x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], generator: torch.Generator
    ) -> Int[Tensor, "*b L"]:
        """Draw the noisy sequences x_t at times t.

        Args:
            x_0: Clean sequences.
            t: The time of each sequence.
            generator: The source of noise.
        """

    def counts(self, x_t: Int[Tensor, "*b L"]) -> Bool[Tensor, "*b L"] | None:
        """Return False where the loss is 0 whatever the model returns; None: nowhere."""
        return None

    def coefficients(
        self, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Coefficients | None:
        """Return all of the loss but the network's output; None: it has no such form.

        Args:
            x_t: Noisy sequences.
            x_0: Clean sequences.
            t: The time of each sequence.
        """
        return None

    def loss(
        self, model: M, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """Return the loss of the model at every position, before the weight of its time."""
        coefficients = self.coefficients(x_t, x_0, t)
        if coefficients is None:
            raise NotImplementedError(f"{type(self).__name__} has no loss; define coefficients() or loss()")
        return coefficients.loss(coefficients.output(model))

    def corruption_probability(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return the probability that noise has replaced a token at time t."""
        raise ValueError(f"{type(self).__name__} does not give the probability that train.loss_weighting needs")

    @abstractmethod
    def _vocab_size(self) -> int:
        """Return the number of tokens."""

    def _check_model(self, model: object) -> None:
        if self.needs is not None and not isinstance(model, self.needs):
            method = next(name for name in vars(self.needs) if name.startswith("log_"))
            raise ValueError(
                f"{type(self).__name__} needs a model with {method}(), and {type(model).__name__} has none; "
                "choose the parameterization that has it"
            )


@dataclass(frozen=True)
class Noised(Objective[M], ABC):
    """An objective whose noise is that of a process and a schedule."""

    process: Process
    schedule: Schedule

    def corrupt(
        self, x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], generator: torch.Generator
    ) -> Int[Tensor, "*b L"]:
        """Draw x_t given x_0."""
        return self.process.corrupt(x_0, self.schedule.sigma(t), generator)

    def counts(self, x_t: Int[Tensor, "*b L"]) -> Bool[Tensor, "*b L"] | None:
        """Return where noise may have changed a token."""
        return noisy_positions(self.process, x_t)

    def corruption_probability(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """1 − e^−σ(t)."""
        return corruption_probability(self.schedule.sigma(t))

    def _vocab_size(self) -> int:
        return self.process.vocab_size


@dataclass(frozen=True)
class Integral(Noised[M], ABC):
    """An objective that is an integral over t from t_min to 1."""

    _: KW_ONLY
    t_min: float = 0.0
    """Time at which the integral begins; the loss at times below it is left out."""
    time_sampler: TimeSampler = field(default_factory=UniformTimes)
    """`schedule.UniformTimes` or, to importance-sample the times, `schedule.ImportanceTimes`."""

    def __post_init__(self) -> None:
        validate.t_min(self.t_min)

    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """Map uniforms to times in [t_min, 1]."""
        return self.time_sampler(u, self.t_min)


@dataclass(frozen=True)
class Masked(Objective[M], ABC):
    """An objective on masked tokens without a schedule, for models that do not depend on time."""

    process: Process
    _: KW_ONLY
    time_sampler: TimeSampler = field(default_factory=UniformTimes)
    """The distribution of the masked fraction, which stands for the time."""

    def __post_init__(self) -> None:
        check_absorbing_process(self, self.process)

    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """Map uniforms to masked fractions."""
        return self.time_sampler(u)

    def counts(self, x_t: Int[Tensor, "*b L"]) -> Bool[Tensor, "*b L"] | None:
        """Return where the mask is."""
        return noisy_positions(self.process, x_t)

    def corruption_probability(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return the masked fraction, which stands for the time."""
        return t

    def _vocab_size(self) -> int:
        return self.process.vocab_size


def check_absorbing_process(objective: object, process: Process) -> None:
    """Raise ValueError for a process without a mask."""
    if not isinstance(process, Absorbing):
        raise ValueError(f"{type(objective).__name__} masks tokens, so it needs Absorbing; {process} has no mask")


def noisy_positions(process: Process, x_t: Int[Tensor, "*b L"]) -> Bool[Tensor, "*b L"] | None:
    """Return where noise may have changed a token; None: everywhere."""
    return None if isinstance(process, Uniform) else process.is_noisy(x_t)
