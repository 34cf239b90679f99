"""Time and memory of a training step (forward, backward, gradient clipping, optimizer, EMA): fused, and the reference.

python benchmarks/train.py                       sizes of published models on a GPU, small ones on a CPU
python benchmarks/train.py --recipe medium --precision float8 --batch 32 --set optim.name=muon --json

The reference computes objective, parameterization and probability tables as they are defined, without CUDA graphs; the
block kernels are the same for both.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import torch
from measure import (
    Machine,
    Measurement,
    build_parser,
    describe_machine,
    free_memory,
    print_measurements,
    read_setting,
    time_variant,
)
from torch import Tensor

from sedd.nn.transformer import Transformer
from sedd.ops.fused_loss import fused_loss
from sedd.parameterization import DiscreteModel
from sedd.runtime import activation_checkpointing
from sedd.schedule import stratified
from sedd.training import optimizer
from sedd.training.config import RunConfig
from sedd.training.overrides import merge_config
from sedd.training.setup import DiffusionSetup, build_model, build_network, build_setup
from sedd.training.trainer import EMA

TRAIN_FLOPS = (
    "per token, with f the fraction of tokens in the loss: 72 · (depth − ¾ · (1 − f)) · width² "
    "+ 12 · depth · length · width + 6 · f · width · vocabulary"
)

FLAGS = {
    "objective": "objective",
    "noise.process": "process",
    "model.parameterization": "parameterization",
    "model.seq_len": "length",
    "train.batch_size": "batch",
    "train.precision": "precision",
    "train.compile": "compile",
    "train.cuda_graphs": "cuda-graphs",
    "train.activation_checkpointing": "activation-checkpointing",
}
"""Configuration keys that are options of this script."""


@dataclass(frozen=True)
class TrainSetting:
    """The model and the training step to measure."""

    CPU: ClassVar[dict[str, Any]] = {"recipe": "tiny", "batch": 8, "vocab_size": 4096, "precision": "float32"}
    recipe: str = "small"
    process: str = "absorbing"
    objective: str = "score-entropy"
    parameterization: str | None = None
    batch: int = 64
    length: int | None = None
    """None: that of the recipe."""
    vocab_size: int = 50_257
    precision: str = "bfloat16"
    device: str = "cuda"
    compile: bool = False
    cuda_graphs: bool = True
    activation_checkpointing: str = "none"
    repeats: int = 20
    sets: tuple[str, ...] = ()
    """Other configuration keys, as in ``optim.name=muon``."""

    def run(self) -> RunConfig:
        """Return the run configuration."""
        for assignment in self.sets:
            if (key := assignment.partition("=")[0]) in FLAGS:
                raise ValueError(f"{key} was set; give it as --{FLAGS[key]}")
        flags = {
            "process": self.process,
            "objective": self.objective,
            "parameterization": self.parameterization,
            "model.seq_len": self.length,
        }
        return merge_config(flags, recipe=self.recipe, sets=self.sets)


class NoisyBatch(NamedTuple):
    """Clean and noisy tokens, times and weights of a training step."""

    x_t: Tensor
    x_0: Tensor
    t: Tensor
    weight: Tensor


def measure_training(setting: TrainSetting, machine: Machine) -> Iterator[Measurement]:
    """Measure a training step: fused, and the PyTorch reference."""
    run = setting.run()
    parts = build_setup(run, setting.vocab_size)
    generator = torch.Generator().manual_seed(0)
    cpu_batches = [random_batch(parts, setting, run.model.seq_len, generator) for _ in range(4)]
    counts = [count_in_loss(parts, b.x_t) for b in cpu_batches]
    batches = [NoisyBatch(*(a.to(setting.device) for a in b)) for b in cpu_batches]
    tokens = setting.batch * run.model.seq_len
    m, fraction = run.model, sum(counts) / len(counts) / tokens
    blocks = m.depth - 0.75 * (1 - fraction)  # three quarters of the last block run only on tokens in the loss
    flops_per_token = (
        72 * blocks * m.width**2 + 12 * m.depth * m.seq_len * m.width + 6 * fraction * m.width * setting.vocab_size
    )
    for variant in ("fused", "plain"):
        free_memory(setting.device)
        steps = TrainingSteps(run, parts, setting, variant == "fused", batches, counts)
        yield time_variant(variant, steps, machine, setting.repeats, tokens, flops_per_token * tokens)


def random_batch(parts: DiffusionSetup, setting: TrainSetting, length: int, generator: torch.Generator) -> NoisyBatch:
    """Return a batch of random tokens with noise."""
    times = parts.objective.times(stratified(setting.batch, generator))
    x_0 = torch.randint(setting.vocab_size, (setting.batch, length), generator=generator)
    return NoisyBatch(parts.objective.corrupt(parts, x_0, times.t, generator), x_0, *times)


def count_in_loss(parts: DiffusionSetup, x_t: Tensor) -> int:
    """Return the number of positions that count in the loss."""
    counts = parts.objective.counts(parts, x_t)
    return x_t.numel() if counts is None else int(counts.sum())


@final
class TrainingSteps:
    """Trains a network, one step per call, cycling through a few batches."""

    def __init__(
        self,
        run: RunConfig,
        parts: DiffusionSetup,
        setting: TrainSetting,
        fused: bool,
        batches: list[NoisyBatch],
        counts: list[int],
    ) -> None:
        self.batches, self.counts, self.step = batches, counts, 0
        networks = [build_network(run, parts).to(setting.device) for _ in range(2)]
        self.network, ema_network = (network for network in networks if isinstance(network, Transformer))
        self.ema = EMA(self.network, ema_network, run.optim.ema_decay)
        self.optimizers, self.grad_clip = optimizer.build_optimizers(self.network, run.optim), run.optim.grad_clip
        if setting.precision != "float32":
            autocast = torch.autocast(setting.device, torch.bfloat16)
            self.network.forward = autocast(self.network.forward)  # type: ignore[method-assign]
        if setting.precision == "float8":
            self.network.enable_fp8()
        model = build_model(run, self.network, parts)
        if fused:
            self.network.activation_checkpointing = getattr(activation_checkpointing, setting.activation_checkpointing)
            if setting.compile:
                self.network.compile_trunk()
            if setting.cuda_graphs:
                self.network.enable_cuda_graphs()
            self.loss = self._fused(parts, model)
        else:
            self.loss = self._plain(parts, model)

    def _fused(self, parts: DiffusionSetup, model: DiscreteModel) -> Callable[[int], Tensor]:
        def loss(i: int) -> Tensor:
            found = fused_loss(parts.objective, model, *self.batches[i], count=self.counts[i])
            if found is None:
                raise ValueError(
                    f"{type(parts.objective).__name__} of a {type(model).__name__} has no fused loss to measure; "
                    "choose objective score-entropy or lambda-dce"
                )
            return found.total

        return loss

    def _plain(self, parts: DiffusionSetup, model: DiscreteModel) -> Callable[[int], Tensor]:
        def loss(i: int) -> Tensor:
            x_t, x_0, t, weight = self.batches[i]
            nats = parts.objective.loss(model, x_t, x_0, t)
            return (weight.to(nats.dtype)[:, None] * nats).sum()

        return loss

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Run a step; return the loss in nats per token and the gradient norm, without synchronizing."""
        i = self.step % len(self.batches)
        loss = self.loss(i) / self.batches[i].x_0.numel()
        loss.backward()
        norm = optimizer.clip_grad_norm(self.ema.source_weights, self.grad_clip)
        optimizer.step_if_finite(self.optimizers, norm.isfinite())
        self.ema.update(self.step)
        for each in self.optimizers:
            each.zero_grad()
        self.step += 1
        return loss.detach(), norm


def main() -> None:
    """Measure and print."""
    parser = build_parser(__doc__, TrainSetting)
    args = parser.parse_args()
    setting = read_setting(parser, args, TrainSetting)
    machine = describe_machine(setting.device, setting.precision)
    print_measurements(setting.__dict__, machine, TRAIN_FLOPS, measure_training(setting, machine), args.json)


if __name__ == "__main__":
    main()
