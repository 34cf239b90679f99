"""Models on spaces small enough to enumerate, on which a loss that claims to be a bound is evaluated."""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sedd import registry
from sedd.exact import Distribution, Score, Table
from sedd.parameterization import MeanModel, ScoreModel
from sedd.process import Process
from sedd.schedule import Schedule


class AuditModel(NamedTuple):
    """A model of all sequences of ``length`` tokens."""

    name: str
    model: Any
    process: Process
    length: int
    is_time_free: bool
    """Whether p(x_0 | x_t) does not depend on σ, which objectives without a schedule need."""
    distribution: Distribution | None = None
    """The distribution whose exact score it is; None: it is no exact score."""

    def with_schedule(self, schedule: Schedule) -> Any:
        """Return the model with a different schedule; it shares the weights."""
        model = copy.copy(self.model)
        model.schedule = schedule
        return model


@final
class TimeDependentTable(nn.Module):
    """A network of two tables: one without noise, the other at much noise, and a mixture of their outputs between."""

    def __init__(self, num_states: int, length: int) -> None:
        super().__init__()
        self.clean, self.noisy = Table(num_states, length), Table(num_states, length)

    def forward(self, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """Return the mixture with weights e^−σ and 1 − e^−σ."""
        weight = torch.exp(-sigma.double())[..., None, None]
        mixed: Tensor = weight * self.clean(x, sigma) + (1 - weight) * self.noisy(x, sigma)
        return mixed


@final
class PerturbedDenoiser(nn.Module):
    """The exact denoiser of a distribution with errors in its logits, one for every sequence, position and token."""

    def __init__(self, exact_score: Score, errors: Table) -> None:
        super().__init__()
        self.exact_score, self.errors = exact_score, errors
        self.process, self.schedule = exact_score.process, exact_score.schedule

    def log_mean(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L N"]:
        """Return log p(x_0 | x_t)."""
        logits = self.exact_score.log_mean(x_t, sigma)
        errors: Tensor = self.errors(x_t, sigma)[..., : logits.shape[-1]]
        return (logits + errors).log_softmax(-1)

    def forward(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """Return the log-score of the denoiser."""
        return self.process.mean_score(self.log_mean(x_t, sigma), x_t, sigma)


def _randomize(network: nn.Module, scale: float, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.requires_grad_(False).normal_(std=scale, generator=generator)
    return network


def audit_distributions() -> dict[str, Distribution]:
    """Return the distributions whose exact scores are used: dependent and independent tokens, low and high entropy."""
    generator = torch.Generator().manual_seed(0)
    likely = torch.full((3, 3), 0.03 / 8, dtype=torch.float64)
    likely[1, 2] = 0.97
    return {
        "a random distribution": Distribution.random(3, 2, generator),
        "two tokens that are nearly always equal": Distribution(0.02 / 9 + 0.98 / 3 * torch.eye(3).double()),
        "one sequence of probability 0.97": Distribution(likely),
        "a random distribution of length 3": Distribution.random(2, 3, generator),
    }


def build_audited_process(name: str, vocab_size: int) -> Process:
    """Build a noise process; tokens have the frequencies 1, 2, 3 … where it needs some."""
    options = {"frequencies": range(1, vocab_size + 1)} if name == "frequency" else {}
    process: Process = registry.PROCESSES.build(name, vocab_size, **options)
    return process


def audit_models(process_name: str) -> Iterator[AuditModel]:
    """Yield exact scores, perturbed and random denoisers, and random scores, which imply no normalised denoiser."""
    distributions = audit_distributions()
    for name, p in distributions.items():
        process = build_audited_process(process_name, p.vocab_size)
        is_time_free = process_name == "absorbing"
        yield AuditModel(f"the exact score of {name}", Score(p, process), process, p.length, is_time_free, p)
    for (name, p), seed in zip(distributions.items(), range(2), strict=False):
        process = build_audited_process(process_name, p.vocab_size)
        errors = _randomize(Table(process.num_states, p.length), 0.5, seed)
        perturbed = PerturbedDenoiser(Score(p, process), errors)  # type: ignore[arg-type]
        yield AuditModel(f"the denoiser of {name}, perturbed", perturbed, process, p.length, is_time_free)
    for seed, (vocab_size, length) in enumerate([(3, 2), (2, 3)]):
        process = build_audited_process(process_name, vocab_size)
        for wrapper, name in ((MeanModel, "denoiser"), (ScoreModel, "score")):
            free, dependent = (
                _randomize(network(process.num_states, length), 1.5, seed) for network in (Table, TimeDependentTable)
            )
            yield AuditModel(f"a random {name}, number {seed}", wrapper(free, process), process, length, True)
            model = wrapper(dependent, process)
            yield AuditModel(f"a random {name} that depends on σ, number {seed}", model, process, length, False)
