"""A whole training step: loss, gradients, clipping, AdamW, average."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from sedd import factory, registry
from sedd.bench.measure import Machine, Row, forget, row
from sedd.config import RunConfig
from sedd.diffusion.schedule import stratified
from sedd.recipes import RECIPES
from sedd.training import optimizer
from sedd.training.ema import EMA
from sedd.training.loss import FusedLoss

TRAIN_FLOPS = (
    "a token, share is of those that count: 72 · (depth − ¾ · (1 − share)) · width² + 12 · depth · length · width "
    "+ 6 · share · width · vocabulary"
)


@dataclass(frozen=True)
class TrainSetting:
    """A training step: loss, gradients, clipping, AdamW, average."""

    recipe: str = "small"
    process: str = "absorbing"
    objective: str = "score-entropy"
    parameterization: str | None = None
    batch: int = 64
    length: int | None = None
    """That of the recipe, if None."""
    vocab_size: int = 50_257
    precision: str = "bfloat16"
    device: str = "cuda"
    compile: bool = False
    record: bool = True
    recompute: str = "none"
    repeats: int = 20

    def run(self) -> RunConfig:
        """The configuration of such a run."""
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe is {self.recipe!r}; choose one of {', '.join(RECIPES)}")
        run = RunConfig.from_dict(RECIPES[self.recipe] | {"objective": self.objective})
        run.noise.process, run.model.parameterization = self.process, self.parameterization
        run.model.seq_len = self.length or run.model.seq_len
        return run.resolved()


class Batch(NamedTuple):
    """What a step is given."""

    x_t: Tensor
    x_0: Tensor
    t: Tensor
    weight: Tensor


def train(s: TrainSetting, on: Machine) -> Iterator[Row]:
    """Time of a training step, fused and plain."""
    run = s.run()
    parts = factory.build_setup(run, s.vocab_size)
    generator = torch.Generator().manual_seed(0)
    made = [batch(parts, s, run.model.seq_len, generator) for _ in range(4)]
    counts = [int(parts.process.unknown(b.x_t).sum()) for b in made]
    batches = [Batch(*(a.to(s.device) for a in b)) for b in made]
    tokens = s.batch * run.model.seq_len
    m, share = run.model, sum(counts) / len(counts) / tokens
    blocks = m.depth - 0.75 * (1 - share)  # of the last one, three quarters are for the rows that count alone
    each = 72 * blocks * m.width**2 + 12 * m.depth * m.seq_len * m.width + 6 * share * m.width * s.vocab_size
    for way in ("fused", "plain"):
        forget(s.device)
        yield row(way, Steps(run, parts, s, way == "fused", batches, counts), on, s.repeats, tokens, each * tokens)


def batch(parts: factory.DiffusionSetup, s: TrainSetting, length: int, generator: torch.Generator) -> Batch:
    """Random tokens, noised."""
    times = parts.objective.times(stratified(s.batch, generator))
    x_0 = torch.randint(s.vocab_size, (s.batch, length), generator=generator)
    return Batch(parts.objective.corrupt(x_0, times.t, generator), x_0, *times)


@final
class Steps:
    """A network in training; every call is a step on the next of a few batches."""

    def __init__(
        self,
        run: RunConfig,
        parts: factory.DiffusionSetup,
        s: TrainSetting,
        small: bool,
        batches: list[Batch],
        counts: list[int],
    ) -> None:
        self.batches, self.counts, self.done = batches, counts, 0
        self.network, ema_network = (factory.build_network(run, parts).to(s.device) for _ in range(2))
        self.ema = EMA(self.network, ema_network, run.optim.ema_decay)
        self.optimizers, self.grad_clip = optimizer.build_optimizers(self.network, run.optim), run.optim.grad_clip
        if s.precision != "float32":
            half = torch.autocast(s.device, torch.bfloat16)
            self.network.forward = half(self.network.forward)  # type: ignore[method-assign]
        if s.precision == "float8":
            self.network.narrow()
        model = factory.build_model(run, self.network, parts)
        if small:
            self.network.pass_through = registry.ACTIVATION_CHECKPOINTING.load(s.recompute)
            if s.compile:
                self.network.compile_trunk()
            if s.record:
                self.network.record()
            self.loss = self._fused(FusedLoss(parts.objective, model))
        else:
            self.loss = self._plain(parts, model)

    def _fused(self, loss: FusedLoss) -> Callable[[int], Tensor]:
        return lambda i: loss(*self.batches[i], count=self.counts[i]).total

    def _plain(self, parts: factory.DiffusionSetup, model: nn.Module) -> Callable[[int], Tensor]:
        def loss(i: int) -> Tensor:
            x_t, x_0, t, weight = self.batches[i]
            each = parts.objective.loss(model, x_t, x_0, t)
            return (weight.to(each.dtype)[:, None] * each).sum()

        return loss

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The loss in nats a token and the norm of the gradient, for which nobody has waited."""
        i = self.done % len(self.batches)
        loss = self.loss(i) / self.batches[i].x_0.numel()
        loss.backward()
        norm = optimizer.clip_grad_norm(self.ema.source_weights, self.grad_clip)
        optimizer.step_if_finite(self.optimizers, norm.isfinite())
        self.ema.update(self.done)
        optimizer.zero_grad(self.optimizers)
        self.done += 1
        return loss.detach(), norm
