"""A run in memory: what a step does to the weights, and what is saved of them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from sedd import checkpoint, data, factory, generate, registry, sampling, tokenizer
from sedd.config import RunConfig
from sedd.diffusion.objective import AnyOrder
from sedd.diffusion.parameterization import Padded
from sedd.nn.labels import Labelled
from sedd.nn.transformer import Transformer
from sedd.runtime.distributed import Ranks
from sedd.training import optimizer
from sedd.training import validation as evaluation
from sedd.training.batches import Batch, Batches
from sedd.training.loss import Fused, fuses

NOISE_PARTS = 10
"""Into how many parts of time the loss by noise level is cut."""
_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SPREAD = StateDictOptions(full_state_dict=True)


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    best: float | None = None
    best_step: int | None = None

    def improves(self, bound: float) -> bool:
        """Whether a held-out bound is the best so far, which is then remembered."""
        better = math.isfinite(bound) and (self.best is None or bound < self.best)
        if better:
            self.best, self.best_step = bound, self.step
        return better


class Gradient(NamedTuple):
    """What one batch says of the weights, over all processes; the gradient itself lies at the parameters."""

    loss: Tensor
    """Nats a token."""
    norm: Tensor
    by_time: Tensor
    """Loss and tokens, summed over parts of time."""

    @property
    def finite(self) -> Tensor:
        """Whether loss and gradient are numbers; nobody has waited to know."""
        return self.loss.isfinite() & self.norm.isfinite()


class Moved(NamedTuple):
    """A step whose weights have moved, if its numbers were numbers: the device knows, and will have said so."""

    step: int
    tokens: int
    """Where the run stood before it."""
    batch: Batch
    finite: Tensor
    """On the CPU, once `said` is reached."""
    said: torch.cuda.Event | None
    """None: it has been."""

    @classmethod
    def now(cls, done: Progress, batch: Batch, finite: Tensor) -> "Moved":
        """The step that is being made."""
        if finite.device.type != "cuda":
            return cls(done.step, done.tokens, batch, finite, None)
        told = torch.empty((), dtype=torch.bool, pin_memory=True)
        told.copy_(finite, non_blocking=True)
        said = torch.cuda.Event()
        said.record()
        return cls(done.step, done.tokens, batch, told, said)

    def well(self) -> bool:
        """Whether they were numbers: waits for that step, not for those after it."""
        if self.said is not None:
            self.said.synchronize()
        return bool(self.finite)


class _Whole(nn.Module):
    """A network without parts to be asked."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *told: Tensor, **named: Tensor) -> Tensor:
        said: Tensor = self.network(*told, **named)
        return said


class Trainer:
    """Model, average, optimizers, data, and where the run stands."""

    def __init__(self, config: RunConfig, blocks: data.TokenBlocks, held_out: data.TokenBlocks, ranks: Ranks) -> None:
        ranks.local_slice(config.train.batch_size, config.train.grad_accumulation)
        self.config, self.blocks, self.held_out, self.ranks = config, blocks, held_out, ranks
        self.parts = factory.build_setup(config, blocks.vocab_size)
        self.padded = blocks.index.pad == "ignore"  # told of the data, not of a batch: a compiled graph sees one case
        if self.padded and isinstance(self.parts.objective, AnyOrder):
            raise ValueError(
                "objective any-order counts positions, so padding to be ignored does not go with it; use lambda-dce"
            )
        dropout = config.data.label_dropout if blocks.labels else 0.0
        objective, process = self.parts.objective, self.parts.process
        self.batches = Batches(blocks, objective, process, config.train.batch_size, config.seed, ranks, dropout)
        made = (factory.build_network(config, self.parts, len(blocks.labels)) for _ in range(2))
        self.network, self.average = map(self._place, made)
        self.average.requires_grad_(False).eval()
        self.mover = optimizer.mover(self.network, self.average, config.optim)
        self.seen: nn.Module = self.network
        if ranks.world_size > 1 and not config.train.fsdp:
            self.seen = nn.parallel.DistributedDataParallel(self.network)
        if config.train.precision == "float8":  # the average, which is evaluated, stays in bfloat16
            self.network.narrow()
        self.network.pass_through = registry.ACTIVATION_CHECKPOINTING.load(config.train.activation_checkpointing)
        if config.train.compile:  # the average is not: it is asked seldom, for rows of several shapes
            if config.train.fsdp:  # where weights are gathered the graph of a whole trunk would break
                self.network.compile_blocks()
            else:
                self.network.compile_trunk()
        if (
            config.train.cuda_graphs and ranks.world_size == 1
        ):  # several send gradients while the way back still goes on
            self.network.record()
        # a sharded network gathers its weights when it is called as a whole, not when a part of it is
        self.seen_average: nn.Module = _Whole(self.average) if config.train.fsdp else self.average
        self.progress = Progress()
        self.moved: Moved | None = None

    def _place(self, network: Transformer) -> Transformer:
        """On the device, in the precision of the run, cut into shards if asked."""
        network = network.to(self.ranks.device)
        if self.config.train.fsdp:
            from torch.distributed.fsdp import fully_shard

            if self.ranks.world_size == 1:
                raise ValueError("train.fsdp cuts the model over processes, and there is one; start it with torchrun")
            for block in network.blocks:
                fully_shard(block)
            fully_shard(network, reshard_after_forward=True)  # or an evaluation leaves it whole
        if self.config.train.precision != "float32":
            half = torch.autocast(self.ranks.device.type, torch.bfloat16)
            network.forward = half(network.forward)  # type: ignore[method-assign]
        return network

    # One step ----------------------------------------------------------------------------------------------

    def model(self, network: nn.Module, label: Tensor) -> nn.Module:
        """The model of rows with these labels."""
        return factory.build_model(self.config, Labelled(network, label) if self.blocks.labels else network, self.parts)

    def told(self, network: nn.Module, valid: Tensor, label: Tensor) -> Any:
        """The same, told also where rows end."""
        model = self.model(network, label)
        return Padded(model, valid) if self.padded else model

    def losses(self, network: nn.Module, batch: Batch) -> Tensor:
        """Weighted loss of every position, 0 at padding."""
        told = self.told(network, batch.valid, batch.label)
        loss = self.parts.objective.loss(told, batch.x_t, batch.x_0, batch.t)
        return torch.where(batch.valid, batch.weight.to(loss.dtype)[:, None] * loss, 0)

    def _total(self, part: Batch) -> tuple[Tensor, Tensor]:
        """The loss of a part of a batch, and what each row has of it: through kernels, where there are some for it."""
        objective, model = self.parts.objective, self.model(self.seen, part.label)
        if not fuses(objective, model):
            rows = self.losses(self.seen, part).sum(-1)
            return rows.sum(), rows.detach()
        valid, count = part.valid if self.padded else None, int(part.unknown.sum())
        said = Fused(objective, model)(part.x_t, part.x_0, part.t, part.weight, valid, count)
        return said.total, said.positions.sum(-1)

    def gradients(self, batch: Batch) -> Gradient:
        """Fill the gradients."""
        self.network.train()
        by_time = torch.zeros(2, NOISE_PARTS, device=self.ranks.device)
        *_, last = parts = batch.parts(self.config.train.grad_accumulation)
        for part in parts:
            with self._no_sync(last=part is last):
                total, rows = self._total(part)
                (total / batch.tokens * self.ranks.world_size).backward()  # the average over processes is then the sum
            where = (part.t * NOISE_PARTS).long().clamp_max(NOISE_PARTS - 1)
            by_time[0].index_add_(0, where, rows.float())
            by_time[1].index_add_(0, where, part.valid.sum(-1).float())
        norm, by_time = self.mover.norm(), self.ranks.all_reduce_sum(by_time)
        return Gradient(by_time[0].sum() / batch.tokens, norm, by_time)

    @contextmanager
    def _no_sync(self, last: bool) -> Iterator[None]:
        if self.config.train.fsdp:
            self.network.set_requires_gradient_sync(last)  # type: ignore[operator]
        wait = isinstance(self.seen, nn.parallel.DistributedDataParallel) and not last
        with self.seen.no_sync() if wait else nullcontext():  # type: ignore[operator]
            yield

    def update(self, rate: float, batch: Batch, found: Gradient) -> None:
        """Move the weights, unless the step's numbers are none; `settle` does the rest."""
        finite = found.finite
        optimizer.set_rate(self.mover.optimizers, rate)
        self.mover.move(self.progress.step, found.norm, finite)
        self.moved = Moved.now(self.progress, batch, finite)

    def settle(self) -> Moved | None:
        """What the average still lacks of the last step; that step, if it was none and nothing was moved."""
        moved, self.moved = self.moved, None
        if moved is not None and moved.well():
            self.mover.follow(moved.step)
            return None
        return moved

    # Held-out bound, samples -------------------------------------------------------------------------------

    def held_out_bound(self) -> dict[str, float]:
        """The bound of the averaged weights on held-out data, in nats a token, always with the same noise.

        Rows that have labels are scored given them.
        """
        options, ranks = self.config.train, self.ranks
        size = options.batch_size // ranks.world_size // options.grad_accumulation
        return evaluation.bound(
            partial(self.told, self.seen_average),
            self.parts,
            self.held_out,
            ranks,
            count=options.eval_sequences,
            size=size,
            seed=self.config.seed,
        )

    def samples(self, count: int, steps: int = 64) -> list[str]:
        """Texts of the averaged model."""
        settings = generate.SamplingSettings(steps=steps, seed=self.config.seed)
        model = factory.build_model(self.config, self.seen_average, self.parts)
        job = generate.SamplingRun(model, self.parts.process, self.parts.schedule, settings)
        rows = generate.sample(job, sampling.empty(count, self.config.model.seq_len, self.ranks.device))
        return [self.blocks.tokenizer.decode(row.ids) for row in rows]

    # Saving and resuming -----------------------------------------------------------------------------------

    def save(self, root: Path) -> None:
        """Everything that the next step depends on, by the first process; then older ones go."""
        weights: dict[str, Any] = {
            "model": get_model_state_dict(self.network, options=_GATHER),
            "ema": get_model_state_dict(self.average, options=_GATHER),
        }
        state: dict[str, Any] = get_optimizer_state_dict(self.network, self.mover.optimizers, options=_GATHER)
        if self.ranks.is_main:
            done = self.progress
            moments = {f"{name}|{key}": v for name, values in state["state"].items() for key, v in values.items()}
            records = {
                "config": {**self.config.as_dict(), "vocab_size": self.blocks.vocab_size, "labels": self.blocks.labels},
                "state": vars(done),
            }
            tensors = {**weights, "optimizer": moments}
            checkpoint.save(root, _name(done.step), tensors, records, extra=self.blocks.tokenizer.save)
            self.prune(root)
        self.ranks.barrier()

    def prune(self, root: Path) -> None:
        """Remove all checkpoints but the last few and the best."""
        best = self.progress.best_step
        checkpoint.prune(root, self.config.train.keep_checkpoints, None if best is None else _name(best))

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint, at any number of processes."""
        self._refuse_another(folder)
        for module, stem in ((self.network, "model"), (self.average, "ema")):
            weights: dict[str, Any] = dict(checkpoint.tensors(folder, stem))
            set_model_state_dict(module, weights, options=_SPREAD)
        moments: dict[str, Any] = get_optimizer_state_dict(self.network, self.mover.optimizers, options=_SPREAD)
        moments["state"] = {}  # the settings of the groups are those of this run's configuration
        for key, value in checkpoint.tensors(folder, "optimizer").items():
            name, _, moment = key.rpartition("|")
            moments["state"].setdefault(name, {})[moment] = value
        set_optimizer_state_dict(self.network, self.mover.optimizers, moments, options=_SPREAD)
        self.progress = Progress(**checkpoint.record(folder, "state"))

    def _refuse_another(self, folder: Path) -> None:
        """Weights mean nothing to another model, nor with another vocabulary."""
        stored, mine = checkpoint.record(folder, "config"), self.config.as_dict()
        if stored["vocab_size"] != self.blocks.vocab_size:
            raise ValueError(
                f"{folder} has a vocabulary of {stored['vocab_size']} and the data one of {self.blocks.vocab_size}; "
                "resume with the tokenizer and data it was trained on"
            )
        if (labels := tuple(stored.get("labels", ()))) != self.blocks.labels:
            raise ValueError(
                f"{folder} has the labels {labels} and the data {self.blocks.labels}; resume with the data it was "
                "trained on"
            )
        if tokenizer.load_tokenizer(folder) != self.blocks.tokenizer:
            raise ValueError(f"{folder} has another tokenizer than the data; resume with the one it was trained on")
        stored = RunConfig.from_dict(
            {key: value for key, value in stored.items() if key not in ("vocab_size", "labels")}
        ).as_dict()
        for part in ("model", "noise", "objective"):
            if stored[part] != mine[part]:
                raise ValueError(f"{folder} was trained with {part} {stored[part]}; it cannot go on as another")


def _name(step: int) -> str:
    return f"step-{step:08d}"
