"""The interface of objectives: times, noisy sequences, and a loss at every position."""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd import tensors
from sedd.objectives.coefficients import Coefficients, weighted
from sedd.parameterization import HasNoise
from sedd.process import Process
from sedd.schedule import Times, TimeSampler, UniformTimes, corruption_probability, stratified

M = TypeVar("M", bound=HasNoise)


class Objective(ABC, Generic[M]):
    """A training loss per position, in nats, with its times and its noise; ``M`` is the kind of model it trains.

    Process and schedule are the model's. A subclass defines ``times``, and either ``coefficients`` or ``loss``.
    """

    is_bound: ClassVar[bool]
    """Whether the expected loss, summed over positions, is the diffusion term of a bound on −log p(x_0).  [§8]"""

    needs: ClassVar[type | None] = None
    """The protocol of `parameterization` that the model must have; None: log-scores are enough."""

    needs_mask: ClassVar[bool] = False
    """Whether it is defined under absorbing noise only."""

    has_schedule: ClassVar[bool] = True
    """Whether its noise levels are the schedule's; False: its model must not depend on the noise level."""

    allows_padding: ClassVar[bool] = True
    """Whether the loss of a position is the same if others are padding that does not count."""

    def __call__(
        self, model: M, x_0: Int[Tensor, "*b L"], *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*b L"]:
        """Draw times and noise, and return the weighted loss of every position.

        Args:
            model: The model to be trained.
            x_0: Clean sequences.
            generator: The source of times and noise; None: one that torch's global generator seeds.
        """
        self.check(model)
        tensors.check_clean_tokens(x_0, model.process.vocab_size)
        generator = _new_generator(x_0.device) if generator is None else generator
        x, batch = x_0.to(generator.device), x_0.shape[:-1]
        times = self.times(stratified(batch.numel(), generator).view(batch))
        x_t = self.corrupt(model, x, times.t, generator)
        x_t, t, weight = (a.to(x_0.device) for a in (x_t, *times))
        return weighted(weight, self.loss(model, x_t, x_0, t))

    @abstractmethod
    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """Map uniforms to times in [0, 1] and their weights 1/density."""

    def sigma(self, noise: HasNoise, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return the total noise at time t: the schedule's, unless the objective has its own.

        Args:
            noise: What has a process and a schedule: a model, or the setup of a run.
            t: The time of each sequence.
        """
        return noise.schedule.sigma(t)

    def corrupt(
        self, noise: HasNoise, x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], generator: torch.Generator
    ) -> Int[Tensor, "*b L"]:
        """Draw the noisy sequences x_t at times t."""
        return noise.process.corrupt(x_0, self.sigma(noise, t), generator)

    def corruption_probability(self, noise: HasNoise, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return the probability that noise has replaced a token at time t."""
        return corruption_probability(self.sigma(noise, t))

    def counts(self, noise: HasNoise, x_t: Int[Tensor, "*b L"]) -> Bool[Tensor, "*b L"] | None:
        """Return where noise may have changed a token; elsewhere the loss is 0. None: everywhere."""
        return noise.process.is_noisy(x_t) if noise.process.only_masks else None

    def coefficients(
        self, noise: HasNoise, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Coefficients | None:
        """Return all of the loss but the network's output; None: it has no such form."""
        return None

    def loss(
        self, model: M, x_t: Int[Tensor, "*b L"], x_0: Int[Tensor, "*b L"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L"]:
        """Return the loss of the model at every position, before the weight of its time."""
        coefficients = self.coefficients(model, x_t, x_0, t)
        if coefficients is None:
            raise NotImplementedError(f"{type(self).__name__} has no loss; define coefficients() or loss()")
        return coefficients.loss(coefficients.output(model))

    def check_process(self, process: Process) -> None:
        """Raise ValueError for noise under which the objective is not defined."""
        if self.needs_mask and not process.only_masks:
            raise ValueError(
                f"{type(self).__name__} masks tokens, so it needs Absorbing; {process} makes noise of tokens too"
            )

    def check(self, model: Any) -> None:
        """Raise ValueError for a model that the objective cannot train."""
        name, given = type(self).__name__, type(model).__name__
        if not isinstance(model, HasNoise):
            raise ValueError(
                f"{name} needs a model with process and schedule, and {given} has none; wrap the network, as in "
                "ScoreModel(network, process)"
            )
        if self.needs is not None and not isinstance(model, self.needs):
            method = next(name for name in vars(self.needs) if name.startswith("log_"))
            raise ValueError(
                f"{name} needs a model with {method}(), and {given} has none; choose the parameterization that has it"
            )
        self.check_process(model.process)


def _new_generator(device: torch.device) -> torch.Generator:
    """Return a generator that torch's global one seeds, on a device that has float64."""
    seed = int(torch.randint(2**63 - 1, ()))
    return torch.Generator(device if device.type == "cuda" else "cpu").manual_seed(seed)


@dataclass(frozen=True)
class Integral(Objective[M], ABC):
    """An objective that is an integral over t from t_min to 1."""

    _: KW_ONLY
    t_min: float = 0.0
    """Time at which the integral begins; the loss at times below it is left out."""
    time_sampler: TimeSampler = field(default_factory=UniformTimes)
    """`schedule.UniformTimes` or, to importance-sample the times, `schedule.ImportanceTimes`."""

    def __post_init__(self) -> None:
        tensors.check_t_min(self.t_min)

    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """Map uniforms to times in [t_min, 1]."""
        return self.time_sampler(u, self.t_min)


@dataclass(frozen=True)
class Masked(Objective[M], ABC):
    """An objective on masked tokens without a schedule, for models that do not depend on time."""

    needs_mask: ClassVar[bool] = True
    has_schedule: ClassVar[bool] = False
    _: KW_ONLY
    time_sampler: TimeSampler = field(default_factory=UniformTimes)
    """The distribution of the masked fraction, which stands for the time."""

    def times(self, u: Float[Tensor, "*b"]) -> Times:
        """Map uniforms to masked fractions."""
        return self.time_sampler(u)

    def corruption_probability(self, noise: HasNoise, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return the masked fraction, which stands for the time."""
        return t
