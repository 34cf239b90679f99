"""A run in memory, with its checkpoints, and one training step: forward, loss, backward, clipping, optimizer, EMA.

Parallelism (DDP or FSDP), mixed precision, compilation, CUDA graphs and activation checkpointing are applied here.

Reference: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv 2304.11277.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from sedd import data, samplers, tokenizer
from sedd.likelihood import LikelihoodEstimate
from sedd.likelihood.precision_check import is_negligible
from sedd.nn.adapter import AdaptedNetwork
from sedd.nn.transformer import Transformer
from sedd.ops.fused_loss import fused_loss
from sedd.parameterization import DiscreteModel
from sedd.runtime import activation_checkpointing
from sedd.runtime.distributed import Ranks
from sedd.training import checkpoint, optimizer, validation
from sedd.training.batches import DROPOUT_STREAM, Batch, TrainingDataLoader, seeded_generator, use_one_core
from sedd.training.config import RunConfig
from sedd.training.setup import build_model, build_network, build_setup

TIME_BINS = 10  # number of equal intervals of time in which the loss is also logged
FIXED = ("model", "network", "noise", "objective", "optim.name", "data.val_fraction", "seed")
"""Options and sections that a resumed run must have as it was trained with."""
UNSAVED = "that step is not saved, and checkpoints before it are as they were. Try a lower optim.lr"


class NonFiniteError(RuntimeError):
    """A loss, gradient, weight or final bound was not finite; checkpoints from before that are kept."""


@dataclass
class TrainingState:
    """Counters of a run, stored as state.json in each checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # wall-clock seconds of training; see `loop.Clock`
    eval_seconds: float = 0.0  # of validation and of logged samples
    save_seconds: float = 0.0
    skipped: int = 0  # steps skipped because their loss or gradient was not finite
    best: float | None = None  # lowest validation bound of a checkpoint so far
    best_step: int | None = None
    above_best: bool = False  # whether the latest validation found a higher bound than that
    logged: int | None = None  # records in the log

    def update_best(self, bound: float, is_saved: bool = True) -> bool:
        """Store the bound of this step if it is the lowest so far and the step is to be saved; return whether it is."""
        is_lowest = math.isfinite(bound) and (self.best is None or bound < self.best)
        self.above_best = not is_lowest
        if is_lowest and is_saved:
            self.best, self.best_step = bound, self.step
        return is_lowest and is_saved


@final
class EMA:
    """A second network with the exponential moving average of the weights of the trained one.

    Step n (from 0) sets ``ema ← d·ema + (1 − d)·weight`` with ``d = min(decay, (1 + n)/(10 + n))``: early in training
    the average is short, so that the initial weights soon have no part in it.

    Reference: averaging of iterates, Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging",
    doi:10.1137/0330046; here with exponential weights.
    """

    def __init__(self, network: nn.Module, ema_network: nn.Module, decay: float) -> None:
        self.network, self.decay = ema_network.requires_grad_(False).eval(), decay
        # collected once: looking parameters up takes as long as launching a kernel for each
        self.source_weights: list[Tensor] = list(network.parameters())
        self.weights: list[Tensor] = list(ema_network.parameters())
        self.buffers = list(zip(ema_network.buffers(), network.buffers(), strict=True))

    def decay_at(self, step: int) -> float:
        """Return the decay of step ``step``, which rises from 0.1 to ``decay``."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Average the weights after optimizer step ``step``, and copy the buffers."""
        values = [value.to(mean.dtype) for mean, value in zip(self.weights, self.source_weights, strict=True)]
        torch._foreach_lerp_(self.weights, values, 1 - self.decay_at(step))  # one launch where a loop has hundreds
        for target, source in self.buffers:
            target.copy_(source)


class _ForwardOnly(nn.Module):
    """A network for inference whose `hidden` and `head` are hidden, with a ``forward`` of its own."""

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module, self._forward = module, forward

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self._forward(*args, **kwargs)


class Trainer:
    """The network, EMA, optimizers, data and counters of a run; `train_step` advances them by a step."""

    def __init__(
        self, config: RunConfig, blocks: data.TokenBlocks, validation_blocks: data.TokenBlocks, ranks: Ranks
    ) -> None:
        options = config.train
        ranks.local_slice(options.batch_size, options.grad_accumulation)  # raises if it cannot be divided
        self.config, self.blocks, self.validation_blocks, self.ranks = config, blocks, validation_blocks, ranks
        self.token_counts = blocks.token_counts() if config.noise.process == "frequency" else None
        self.setup = build_setup(config, blocks.vocab_size, self.token_counts)
        self.ignores_padding = blocks.index.pad == "ignore"  # decided by the data, so a compiled graph has one case
        if self.ignores_padding and not self.setup.objective.allows_padding:
            raise ValueError(f"objective {config.objective} counts positions and cannot ignore padding; use lambda-dce")
        self.dataloader = TrainingDataLoader(
            blocks, self.setup, options.batch_size, config.seed, ranks, config.data.label_dropout
        )
        self.network = self._build_network(reshard_after_forward=False)  # the loss reads the head after `forward`
        ema_network = self._build_network(reshard_after_forward=True)  # no backward pass would free its weights
        self.ema = EMA(self.network, ema_network, config.optim.ema_decay)
        self.weights = self.ema.source_weights
        self.optimizers = optimizer.build_optimizers(self.network, config.optim)
        is_ddp = ranks.world_size > 1 and not options.fsdp
        self.ddp_model = nn.parallel.DistributedDataParallel(self.network) if is_ddp else self.network
        self._enable_optimizations()
        self.model = build_model(config, self.ddp_model, self.setup)
        if isinstance(adapted := self.model.network, AdaptedNetwork):
            for name in ("valid",) * self.ignores_padding + ("label",) * bool(blocks.labels):
                adapted.require(name)
        if options.fsdp:  # which gathers weights in `forward` alone
            ema_network = _ForwardOnly(ema_network, ema_network.__call__)
        self.validation_model = self.ema_model = build_model(config, ema_network, self.setup)
        self._float32_model: DiscreteModel | None = None  # until it was compared with mixed precision
        if options.precision != "float32" and not options.fsdp:
            without_autocast = partial(type(ema_network).forward, ema_network)
            self._float32_model = build_model(config, _ForwardOnly(ema_network, without_autocast), self.setup)
        self.state = TrainingState()
        self.pending_step: PendingStep | None = None
        self.writer = BackgroundWriter(in_background=ranks.device.type == "cuda")

    def _build_network(self, reshard_after_forward: bool) -> nn.Module:
        network = build_network(self.config, self.setup, len(self.blocks.labels)).to(self.ranks.device)
        if self.config.train.fsdp:
            if self.ranks.world_size == 1:
                raise ValueError("train.fsdp shards the model over processes, and there is one; start it with torchrun")
            from torch.distributed.fsdp import fully_shard

            for block in network.blocks if isinstance(network, Transformer) else ():
                fully_shard(block)
            fully_shard(network, reshard_after_forward=reshard_after_forward)
        if self.config.train.precision != "float32":
            autocast = torch.autocast(self.ranks.device.type, torch.bfloat16)
            network.forward = autocast(network.forward)
        return network

    def _enable_optimizations(self) -> None:
        """Apply fp8, activation checkpointing, compilation and CUDA graphs to the trained network, not to the EMA."""
        options = self.config.train
        if not isinstance(self.network, Transformer):
            return
        if options.precision == "float8":  # the EMA, which is evaluated, stays in bfloat16
            self.network.enable_fp8()
        self.network.activation_checkpointing = getattr(activation_checkpointing, options.activation_checkpointing)
        if options.compile:  # the EMA is evaluated seldom, and with several batch shapes
            if options.fsdp:  # gathering weights between blocks would break the graph of the whole trunk
                self.network.compile_blocks()
            else:
                self.network.compile_trunk()
        if options.cuda_graphs and self.ranks.world_size == 1:  # DDP sends gradients while the backward pass still runs
            self.network.enable_cuda_graphs()

    # Loss --------------------------------------------------------------------------------------------------

    def bind(self, model: DiscreteModel, valid: Tensor, label: Tensor) -> DiscreteModel:
        """Bind a model to the padding of a batch, if that is ignored, and to its labels, if there are any."""
        return model.bind(valid=valid if self.ignores_padding else None, label=label if self.blocks.labels else None)

    def batch_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch and, without gradient and ``train.loss_weighting``, that of each sequence.

        The loss weighting is (1 + p)(1 − e^−σ)^p, whose mean is 1 where 1 − e^−σ is uniform.
        """
        model, objective = self.bind(self.model, batch.valid, batch.label), self.setup.objective
        factor = torch.ones_like(batch.t)
        if p := self.config.train.loss_weighting:
            factor = (1 + p) * objective.corruption_probability(self.setup, batch.t).clamp_min(1e-9) ** p
        batch = batch._replace(weight=batch.weight * factor)
        count = int(batch.loss_count.sum())
        loss = fused_loss(objective, model, batch.x_t, batch.x_0, batch.t, batch.weight, model.valid, count)
        if loss is None:
            losses = self.position_losses(self.model, batch).sum(-1)
            return losses.sum(), losses.detach() / factor
        return loss.total, loss.positions.sum(-1) / factor

    def position_losses(self, model: DiscreteModel, batch: Batch) -> Tensor:
        """Return the weighted loss at each position, (b, L), 0 at padding."""
        bound = self.bind(model, batch.valid, batch.label)
        loss = self.setup.objective.loss(bound, batch.x_t, batch.x_0, batch.t)
        return torch.where(batch.valid, batch.weight.to(loss.dtype)[:, None] * loss, 0)

    # Validation and samples --------------------------------------------------------------------------------

    def validation_bound(self) -> dict[str, float]:
        """Return the bound of the EMA weights on validation data; see `validation.validation_bound`.

        With mixed precision the first bound is computed in float32 too, and ``bound_bfloat16_difference`` is how much
        they differ. If that is a tenth of the standard error or more, this bound and all later ones are in float32.
        """
        found, difference = self._bound_of(self.validation_model), {}
        if self._float32_model is not None:
            in_float32 = self._bound_of(self._float32_model)
            difference = {"bound_bfloat16_difference": found.nats - in_float32.nats}
            if not is_negligible(found.nats - in_float32.nats, 0.0, in_float32.stderr):
                found, self.validation_model = in_float32, self._float32_model
            self._float32_model = None
        ids = validation.sequence_ids(self.validation_blocks, self.config.train.eval_sequences)
        bits = self.validation_blocks.bits_per_char(found.nats, ids)
        record = {"bound": found.nats, "bound_stderr": found.stderr}
        return record | ({} if bits is None else {"bound_bits_per_char": bits}) | difference

    def _bound_of(self, model: DiscreteModel) -> LikelihoodEstimate[float]:
        options = self.config.train
        return validation.validation_bound(
            partial(self.bind, model),
            self.setup,
            self.validation_blocks,
            self.ranks,
            count=options.eval_sequences,
            batch_size=options.batch_size // self.ranks.world_size // options.grad_accumulation,
            seed=self.config.seed,
        )

    def sample_texts(self, count: int, steps: int = 64) -> list[str]:
        """Sample texts from the EMA weights."""
        settings = samplers.SamplingSettings(steps=steps, seed=self.config.seed)
        sampling_run = samplers.SamplingRun(self.ema_model, settings)
        prompt = samplers.empty(count, self.config.model.seq_len, self.ranks.device)
        return [self.blocks.tokenizer.decode(sequence.ids) for sequence in sampling_run.sample(prompt)]

    # Checkpoints -------------------------------------------------------------------------------------------

    def save(self, root: Path) -> None:
        """Save everything that the next step depends on, on a GPU in the background, and remove older checkpoints."""
        tensors = self._named_tensors()
        if self.ranks.is_main:
            index = self.blocks.index
            dataset = {"vocab_size": index.vocab_size, "labels": self.blocks.labels, "data_sha256": index.sha256}
            dataset |= {} if self.token_counts is None else {"token_counts": self.token_counts}
            records = {"config": {**self.config.as_dict(), **dataset}, "state": dict(vars(self.state))}
            self.writer.wait()  # before the copies: there is room for those of one checkpoint
            self.writer.submit(partial(self._write, root, copy_to_host(tensors), records))

    def _named_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return weights, EMA and moments by name; of sharded ones the first process gathers one tensor at a time."""
        # a run that stopped in its first step is resumed without moments
        optimizers = self.optimizers if all(optimizer.state for optimizer in self.optimizers) else []
        networks = {"model": self.network, "ema": self.ema.network}
        if self.config.train.fsdp:
            from torch.distributed.checkpoint import state_dict  # takes a second, and one process needs none of it

            gather = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
            gathered: dict[str, Any] = {}
            if optimizers:  # else torch would give them a state, as after a step
                gathered = state_dict.get_optimizer_state_dict(self.network, optimizers, options=gather)
            moments = gathered.get("state", {})  # processes but the first get nothing
            found = {stem: state_dict.get_model_state_dict(module, options=gather) for stem, module in networks.items()}
        else:
            moments = {
                name: optimizer.state[weight]
                for name, weight in self.network.named_parameters()
                for optimizer in optimizers
                if weight in optimizer.state
            }
            found = {stem: module.state_dict() for stem, module in networks.items()}
        return found | {
            "optimizer": {f"{name}|{key}": value for name, values in moments.items() for key, value in values.items()}
        }

    def _write(self, root: Path, tensors: dict[str, dict[str, Tensor]], records: dict[str, Any]) -> None:
        """Write a checkpoint unless one of its tensors is not finite, and remove older ones."""
        state = records["state"]
        for stem, values in tensors.items():
            if name := checkpoint.nonfinite(values):
                raise NonFiniteError(f"at step {state['step']} {name} of the {stem} is not finite; {UNSAVED}")
        checkpoint.save(root, checkpoint.step_name(state["step"]), tensors, records, self.blocks.tokenizer.files())
        checkpoint.prune(root, self.config.train.keep_checkpoints, state["best_step"])

    def resume(self, folder: Path) -> None:
        """Load a checkpoint, written by any number of processes."""
        from torch.distributed.checkpoint import state_dict

        self._check_compatible(folder)
        scatter = state_dict.StateDictOptions(full_state_dict=True)
        for module, stem in ((self.network, "model"), (self.ema.network, "ema")):
            weights: dict[str, Any] = dict(checkpoint.load_tensors(folder, stem))
            state_dict.set_model_state_dict(module, weights, options=scatter)
        if moments := checkpoint.load_tensors(folder, "optimizer"):  # none before the first step
            stored: dict[str, Any] = state_dict.get_optimizer_state_dict(self.network, self.optimizers, options=scatter)
            stored["state"] = {}  # the options of the parameter groups are those of this run's configuration
            for key, value in moments.items():
                name, _, moment = key.rpartition("|")
                stored["state"].setdefault(name, {})[moment] = value
            state_dict.set_optimizer_state_dict(self.network, self.optimizers, stored, options=scatter)
        self.state = TrainingState(**checkpoint.load_json(folder, "state"))

    def _check_compatible(self, folder: Path) -> None:
        """Reject a checkpoint of other data, or of a run with other `FIXED` options."""
        stored, blocks = checkpoint.read_stored_model(folder), self.blocks
        advice = "resume with the tokenizer and data it was trained on"
        if stored.labels != blocks.labels:
            raise ValueError(f"{folder} has the labels {stored.labels} and the data {blocks.labels}; {advice}")
        if tokenizer.load_tokenizer(folder) != blocks.tokenizer:
            raise ValueError(f"{folder} has another tokenizer than the data; {advice}")
        if stored.data_sha256 not in (None, digest := blocks.index.sha256):
            sources, was = ", ".join(self.config.data.sources), str(stored.data_sha256)
            raise ValueError(
                f"{folder} was trained on other data than {sources} holds now (SHA-256 {was[:12]} then, {digest[:12]} "
                "now), so it would train on held-out text; restore the data, or start a new run with another --out"
            )
        trained, current = stored.config.by_key(), self.config.by_key()
        for key in trained | current:
            then, now = trained.get(key), current.get(key)
            if then != now and any(f"{key}.".startswith(f"{name}.") for name in FIXED):
                advice = f"resume with --set {key}={'null' if then is None else then}"
                raise ValueError(f"{folder} was trained with {key} {then}, and {key} is {now}; {advice}")


# Copies to the host ----------------------------------------------------------------------------------------


def start_copy(values: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
    """Begin to copy tensors to the host; return the copies, and the event after which they can be read, if any."""
    if values[0].device.type != "cuda":
        return list(values), None
    copies = [_pinned_copy(value) for value in values]
    copied = torch.cuda.Event()
    copied.record()
    return copies, copied


def _pinned_copy(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


def copy_to_host(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Copy tensors to the host, from a GPU through pinned memory, so that training may change them."""

    def copy(value: Tensor) -> Tensor:
        return _pinned_copy(value) if value.is_cuda else value.clone(memory_format=torch.contiguous_format)

    copies = {stem: {name: copy(value.detach()) for name, value in values.items()} for stem, values in groups.items()}
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return copies


@final
class BackgroundWriter:
    """Runs one write at a time, in a thread or at once; the error of a write is raised by the next call."""

    def __init__(self, in_background: bool) -> None:
        self._threads = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        if self._threads is not None:
            use_one_core(self._threads)
        self._pending: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Begin a write once the one before it has ended."""
        self.wait()
        if self._threads is None:
            write()
        else:
            self._pending = self._threads.submit(write)

    def check(self) -> None:
        """Raise the error of a write that has failed; do not wait for one that is not done."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until everything is written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


# A step ----------------------------------------------------------------------------------------------------


class PendingStep(NamedTuple):
    """A step whose finiteness flag may still be on the GPU; a step that is not finite has changed no weight."""

    step: int
    tokens: int  # training tokens before this step
    batch: Batch
    finite: Tensor  # on the CPU; to be read once `copied` is reached
    copied: torch.cuda.Event | None  # None: `finite` can be read at once


class StepMetrics(NamedTuple):
    """Metrics of a step over all processes, on the device: reading one waits for the step and those queued after it."""

    loss: Tensor  # in nats per token
    grad_norm: Tensor  # before clipping
    by_time: Tensor  # summed loss and number of tokens in each time bin, (2, TIME_BINS)


def train_step(trainer: Trainer, batch: Batch, lr: float, on_nonfinite: Callable[[PendingStep], None]) -> StepMetrics:
    """Train on one batch.

    The weights are updated only if loss and gradient are finite. On a GPU the optimizer reads that flag on the device;
    the host reads it one step later, in `finish_step`, when the next forward and backward pass are queued, so that the
    device is never idle.

    ``on_nonfinite`` is called if the loss or gradient of the previous step, on a CPU of this one, was not finite; it
    raises an error to stop the run.
    """
    config, state, ranks = trainer.config, trainer.state, trainer.ranks
    _seed_dropout(ranks.device, seeded_generator(config.seed, state.step, DROPOUT_STREAM, ranks.rank).initial_seed())
    trainer.network.train()

    by_time = torch.zeros(2, TIME_BINS, device=ranks.device)
    micro_batches = batch.micro_batches(config.train.grad_accumulation)
    for micro_batch in micro_batches:
        is_last = micro_batch is micro_batches[-1]  # gradients are summed over processes once per step
        if config.train.fsdp:
            trainer.network.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        elif trainer.ddp_model is not trainer.network:
            trainer.ddp_model.require_backward_grad_sync = is_last  # type: ignore[assignment]
        total, sequence_losses = trainer.batch_loss(micro_batch)  # forward pass and loss
        # gradients are averaged over processes; the factor makes that average their sum
        (total / batch.tokens * ranks.world_size).backward()
        time_bin = (micro_batch.t * TIME_BINS).long().clamp_max(TIME_BINS - 1)
        by_time[0].index_add_(0, time_bin, sequence_losses.float())
        by_time[1].index_add_(0, time_bin, micro_batch.valid.sum(-1).float())

    grad_norm = optimizer.clip_grad_norm(trainer.weights, config.optim.grad_clip)
    by_time = ranks.all_reduce_sum(by_time)
    loss = by_time[0].sum() / batch.tokens
    finite = loss.isfinite() & grad_norm.isfinite()

    finish_step(trainer, on_nonfinite)  # the step before this one, whose EMA update must precede new weights
    optimizer.set_learning_rate(trainer.optimizers, lr)
    optimizer.step_if_finite(trainer.optimizers, finite)
    (on_host,), copied = start_copy([finite])
    trainer.pending_step = PendingStep(state.step, state.tokens, batch, on_host, copied)
    if copied is None:
        finish_step(trainer, on_nonfinite)
    for each in trainer.optimizers:
        each.zero_grad()

    state.step, state.tokens = state.step + 1, state.tokens + int(batch.tokens)
    return StepMetrics(loss, grad_norm, by_time)


def _seed_dropout(device: torch.device, seed: int) -> None:
    """Seed the generator of one device; `torch.manual_seed` makes a traceback for each kind that is not there."""
    (torch.cuda if device.type == "cuda" else torch.default_generator).manual_seed(seed)


def finish_step(trainer: Trainer, on_nonfinite: Callable[[PendingStep], None]) -> None:
    """Update the EMA once the last step is known to have been finite; else call ``on_nonfinite``."""
    pending, trainer.pending_step = trainer.pending_step, None
    if pending is None:
        return
    if pending.copied is not None:  # wait for this step, not for later ones
        pending.copied.synchronize()
    if bool(pending.finite):
        trainer.ema.update(pending.step)
    else:
        on_nonfinite(pending)
