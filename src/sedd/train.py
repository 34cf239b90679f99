"""Training: from a configuration to a folder with a model, on one process or many.

What a step computes is a function of the configuration and the step's number alone: the order of the data, the times,
the noise, dropout. So a run that was stopped goes on exactly as if it had not been, and two processes compute what one
does.
"""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from sedd import build, checkpoint, data, distributed, ema, generate, likelihood, logs, optim, sampler
from sedd.config import Run
from sedd.distributed import Ranks
from sedd.objective import Autoregressive
from sedd.parameterization import Padded
from sedd.schedule import Times, stratified
from sedd.transformer import Transformer

NOISE_PARTS = 10
"""Into how many parts of time the loss by noise level is cut."""
_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SPREAD = StateDictOptions(full_state_dict=True)


class NonFiniteError(RuntimeError):
    """A loss or a gradient that is not a number; the weights were not touched."""


class Batch(NamedTuple):
    """What one step shows the model; rows of this process only, losses count among all ``tokens`` of the step."""

    x_0: Tensor
    x_t: Tensor
    t: Tensor
    weight: Tensor
    valid: Tensor
    tokens: Tensor


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    best: float | None = None
    best_step: int | None = None


def seeded(*key: int) -> torch.Generator:
    """A generator that is a function of the key."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) & (2**63 - 1))


class Trainer:
    """A run in memory: model, average, optimizers, data, and where it stands."""

    def __init__(self, config: Run, blocks: data.Blocks, held_out: data.Blocks, ranks: Ranks) -> None:
        self.config, self.blocks, self.held_out, self.ranks = config, blocks, held_out, ranks
        self.parts = build.parts(config, blocks.vocab_size)
        self.network, self.average = (self._place(build.run_network(config, self.parts)) for _ in range(2))
        self.average.requires_grad_(False).eval()
        self.optimizers = optim.make(self.network, config.optim)
        seen: nn.Module = self.network
        if ranks.world > 1 and not config.loop.shard:
            seen = nn.parallel.DistributedDataParallel(self.network)
        self.seen = seen
        if config.loop.compile:
            self.network.compile()
        self.model = build.run_model(config, seen, self.parts)
        self.ema_model = build.run_model(config, self.average, self.parts)
        self.progress = Progress()
        ranks.share(config.loop.batch)

    def _place(self, network: Transformer) -> Transformer:
        """On the device, in the precision of the run, cut into shards if asked."""
        network = network.to(self.ranks.device)
        if self.config.loop.shard:
            from torch.distributed.fsdp import fully_shard

            if self.ranks.world == 1:
                raise ValueError("loop.shard cuts the model over processes, and there is one; start it with torchrun")
            for block in network.blocks:
                fully_shard(block)
            fully_shard(network, reshard_after_forward=True)  # or an evaluation leaves it whole
        if self.config.loop.precision == "bfloat16":
            half = torch.autocast(self.ranks.device.type, torch.bfloat16)
            network.forward = half(network.forward)  # type: ignore[method-assign]
        return network

    # The data of a step ------------------------------------------------------------------------------------

    def batch_at(self, step: int) -> Batch:
        """The batch of a step: every process makes all of it, which is cheap, and keeps its rows."""
        size, seed = self.config.loop.batch, self.config.seed
        ids = data.order(seed, step * size, size, len(self.blocks))
        x_0, valid = (torch.from_numpy(a) for a in self.blocks.read(ids))
        generator = seeded(seed, step, 1)
        times = self.parts.objective.times(stratified(size, generator))
        x_t = torch.where(valid, self.parts.objective.corrupt(x_0, times.t, generator), x_0)
        rows = self.ranks.share(size)
        mine = (a[rows] for a in (x_0, x_t, times.t, times.weight, valid))
        return Batch(*(a.to(self.ranks.device, non_blocking=True) for a in (*mine, valid.sum())))

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """From where the run stands, without end; the next batch is made while this one is used."""
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self.batch_at, self.progress.step)
            while True:
                step, batch = self.progress.step, ahead.result()
                ahead = pool.submit(self.batch_at, step + 1)
                yield step, batch

    # One step ----------------------------------------------------------------------------------------------

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Weighted loss of every position, 0 at padding."""
        whole = bool(batch.valid.all())
        loss = self.parts.objective.loss(model if whole else Padded(model, batch.valid), batch.x_t, batch.x_0, batch.t)
        return torch.where(batch.valid, batch.weight.to(loss.dtype)[:, None] * loss, 0)

    def gradients(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Fill the gradients; the step's loss in nats a token, its norm, and the summed loss by time."""
        parts = self.config.loop.accumulate
        by_time = torch.zeros(2, NOISE_PARTS, device=self.ranks.device)
        columns = zip(*(a.chunk(parts) for a in batch[:-1]), strict=True)
        pieces = [Batch._make((*column, batch.tokens)) for column in columns]
        for i, piece in enumerate(pieces):
            with self._no_sync(last=i == len(pieces) - 1):
                rows = self.losses(self.model, piece).sum(-1)
                (rows.sum() / batch.tokens * self.ranks.world).backward()  # the average over processes is then the sum
            where = (piece.t * NOISE_PARTS).long().clamp_max(NOISE_PARTS - 1)
            by_time[0].index_add_(0, where, rows.detach().float())
            by_time[1].index_add_(0, where, piece.valid.sum(-1).float())
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optim.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        by_time = self.ranks.total(by_time)
        return by_time[0].sum() / batch.tokens, norm, by_time

    @contextmanager
    def _no_sync(self, last: bool) -> Iterator[None]:
        if self.config.loop.shard:
            self.network.set_requires_gradient_sync(last)  # type: ignore[operator]
        wait = isinstance(self.seen, nn.parallel.DistributedDataParallel) and not last
        with self.seen.no_sync() if wait else nullcontext():  # type: ignore[operator]
            yield

    def update(self, rate: float) -> None:
        """Move the weights and their average."""
        optim.set_rate(self.optimizers, rate)
        for optimizer in self.optimizers:
            optimizer.step()
        ema.update(self.average, self.network, ema.decay_at(self.progress.step, self.config.optim.ema))

    # Held-out bound, samples -------------------------------------------------------------------------------

    @torch.no_grad()
    def held_out_bound(self) -> dict[str, float]:
        """The bound of the averaged weights on held-out data, in nats a token, always with the same noise."""
        count = self.config.loop.eval_sequences  # more than there are: each is looked at more than once
        x_0, valid = (torch.from_numpy(a) for a in self.held_out.read(np.arange(count) % len(self.held_out)))
        generator = seeded(self.config.seed, 0, 2)
        times = likelihood.early_times(stratified(count, generator))
        process, schedule = self.parts.process, self.parts.schedule
        x_t, x_first = (
            torch.where(valid, process.corrupt(x_0, schedule.sigma(s), generator), x_0)
            for s in (times.t, torch.zeros_like(times.t))
        )
        mine = slice(self.ranks.rank, None, self.ranks.world)
        columns = [a[mine].to(self.ranks.device) for a in (x_0, x_t, x_first, *times, valid)]
        size = max(1, self.config.loop.batch // self.ranks.world // self.config.loop.accumulate)
        sums = torch.zeros(5, dtype=torch.float64, device=self.ranks.device)
        # processes must ask the network equally often: a sharded one gathers its weights each time
        rounds = math.ceil(math.ceil(count / self.ranks.world) / size)
        for i in range(rounds):
            piece = [a[i * size : (i + 1) * size] for a in columns]
            if not len(piece[0]):
                piece = [a[:1] for a in columns]
                piece[-1] = torch.zeros_like(piece[-1])
            sums += self._bound_sums(*piece)
        diffusion, prior, reconstruction, squares, tokens = self.ranks.total(sums).tolist()
        nats = (diffusion + prior + reconstruction) / tokens
        spread = max(0.0, squares / count - ((diffusion + prior + reconstruction) / count) ** 2)
        return {
            "bound": nats,
            "bound_stderr": (spread / count) ** 0.5 * count / tokens,
            "bound_bits_per_char": nats / np.log(2) / self.held_out.chars_per_token,
        }

    def _bound_sums(
        self, x_0: Tensor, x_t: Tensor, x_first: Tensor, t: Tensor, weight: Tensor, valid: Tensor
    ) -> Tensor:
        model = self.ema_model if bool(valid.all()) else Padded(self.ema_model, valid)
        if isinstance(self.parts.objective, Autoregressive):
            exact = torch.where(valid, self.parts.objective.loss(model, x_0, x_0, t), 0).sum(-1)
            terms = likelihood.Terms(exact, torch.zeros_like(exact), torch.zeros_like(exact))
        else:
            times, parts = Times(t, weight), self.parts
            terms = likelihood.terms(model, parts.process, parts.schedule, x_0, x_t, x_first, times, valid)
        return torch.stack([*(a.sum() for a in terms), (terms.total**2).sum(), valid.sum()]).double()

    def samples(self, count: int, steps: int = 64) -> list[str]:
        """Texts of the averaged model."""
        settings = generate.Settings(steps=steps, seed=self.config.seed)
        job = generate.Job(self.ema_model, self.parts.process, self.parts.schedule, settings)
        rows = generate.sample(job, sampler.empty(count, self.config.model.length, self.ranks.device))
        return [self.blocks.tokenizer.decode(row.ids) for row in rows]

    # Saving and resuming -----------------------------------------------------------------------------------

    def save(self, root: Path) -> None:
        """Everything that the next step depends on, by the first process."""
        weights: dict[str, Any] = {
            "model": get_model_state_dict(self.network, options=_GATHER),
            "ema": get_model_state_dict(self.average, options=_GATHER),
        }
        state: dict[str, Any] = get_optimizer_state_dict(self.network, self.optimizers, options=_GATHER)
        if self.ranks.first:
            moments = {f"{name}|{key}": v for name, values in state["state"].items() for key, v in values.items()}
            checkpoint.save(
                root,
                f"step-{self.progress.step:08d}",
                {**weights, "optimizer": moments},
                {
                    "config": {**self.config.as_dict(), "vocab_size": self.blocks.vocab_size},
                    "state": vars(self.progress),
                },
                extra=self.blocks.tokenizer.save,
            )
            best = self.progress.best_step
            for _ in checkpoint.prune(root, self.config.loop.keep, None if best is None else f"step-{best:08d}"):
                pass
        self.ranks.wait()

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint, at any number of processes."""
        stored = checkpoint.record(folder, "config")
        if stored["vocab_size"] != self.blocks.vocab_size:
            raise ValueError(
                f"{folder} has a vocabulary of {stored['vocab_size']} and the data one of {self.blocks.vocab_size}; "
                "resume with the tokenizer and data it was trained on"
            )
        for part in ("model", "noise"):
            if stored[part] != self.config.as_dict()[part]:
                raise ValueError(f"{folder} was trained with {part} {stored[part]}; it cannot go on as another")
        for module, stem in ((self.network, "model"), (self.average, "ema")):
            weights: dict[str, Any] = dict(checkpoint.tensors(folder, stem))
            set_model_state_dict(module, weights, options=_SPREAD)
        moments: dict[str, Any] = get_optimizer_state_dict(self.network, self.optimizers, options=_SPREAD)
        moments["state"] = {}  # the settings of the groups are those of this run's configuration
        for key, value in checkpoint.tensors(folder, "optimizer").items():
            name, _, moment = key.rpartition("|")
            moments["state"].setdefault(name, {})[moment] = value
        set_optimizer_state_dict(self.network, self.optimizers, moments, options=_SPREAD)
        self.progress = Progress(**checkpoint.record(folder, "state"))


@contextmanager
def _signals() -> Iterator[Callable[[], int | None]]:
    """What asked us to stop: SIGTERM and Ctrl-C are noted, and the step at hand is finished."""
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: caught[-1] if caught else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Outcome(NamedTuple):
    """How a run ended."""

    folder: Path
    progress: Progress
    signal: int | None
    bound: dict[str, float]


Hear = Callable[[str, dict[str, Any]], None]
"""Told what happens, by the first process alone: ("log", record), ("note", {"text": …})."""


def run(config: Run, prepare: Callable[[], Path], out: Path, resume: bool, hear: Hear) -> Outcome:
    """Run ``config`` on what ``prepare`` makes, from its last checkpoint or the start, to the end of its budget."""
    with distributed.group() as ranks, _signals() as stopped:
        tell = hear if ranks.first else (lambda kind, record: None)
        blocks, held_out = _open(config, prepare, ranks)
        trainer = Trainer(config, blocks, held_out, ranks)
        out.mkdir(parents=True, exist_ok=True)
        saves = out / "checkpoints"
        if found := _start(trainer, saves, resume, tell):
            tell("note", {"text": f"going on from {found.name}"})
        log = logs.Log(out, after=trainer.progress.step) if ranks.first else None
        if ranks.first:
            (out / "config.json").write_text(json.dumps(config.as_dict(), indent=1) + "\n")
        loop, since, tokens_since = config.loop, time.perf_counter(), 0
        bound: dict[str, float] = {}

        for step, batch in trainer.batches():
            if (spent := _spent(config, trainer.progress, ranks)) >= 1:
                break
            torch.manual_seed(int(seeded(config.seed, step, 3, ranks.rank).initial_seed()))  # dropout
            began = time.perf_counter()
            trainer.network.train()
            loss, norm, by_time = trainer.gradients(batch)
            if not (bool(loss.isfinite()) and bool(norm.isfinite())):
                _refuse(trainer, batch, step, out, tell)
            else:
                trainer.update(rate := config.optim.lr * optim.factor(config.optim, step, spent))
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
            done = trainer.progress
            done.step, done.tokens = step + 1, done.tokens + int(batch.tokens)
            tokens_since += int(batch.tokens)
            done.seconds += time.perf_counter() - began

            record: dict[str, Any] = {"step": done.step, "tokens": done.tokens}
            if done.step % loop.log_every == 0:
                seconds = time.perf_counter() - since
                levels = (by_time[0] / by_time[1].clamp_min(1)).tolist()
                record |= {
                    "loss": loss.item(),
                    "bits_per_char": loss.item() / np.log(2) / blocks.chars_per_token,
                    "grad_norm": norm.item(),
                    "lr": rate,
                    "loss_by_time": [round(v, 6) for v in levels],
                    "skipped": done.skipped or None,
                    "seconds": round(done.seconds, 3),
                    "tokens_per_second": round(tokens_since / seconds),
                    "spent": None,
                }
                since, tokens_since = time.perf_counter(), 0
            if loop.eval_every and done.step % loop.eval_every == 0:
                bound = trainer.held_out_bound()
                record |= bound
                if done.best is None or bound["bound"] < done.best:
                    done.best, done.best_step = bound["bound"], done.step
            if loop.sample_every and done.step % loop.sample_every == 0:
                texts = trainer.samples(2)
                tell("note", {"text": f"step {done.step}: {texts[0]!r}"})
            if len(record) > 2 and log:
                log.write(record)
            tell("log", {**record, "spent": spent})
            ending = ranks.any(stopped() is not None)
            if ending or (loop.save_every and done.step % loop.save_every == 0):
                trainer.save(saves)
            if ending:
                break
        if checkpoint.steps(saves)[:1] != [saves / f"step-{trainer.progress.step:08d}"]:
            trainer.save(saves)
        if not bound or trainer.progress.step % max(1, loop.eval_every):
            bound = trainer.held_out_bound()
        if log:
            log.close()
        return Outcome(out, trainer.progress, stopped(), bound)


def _open(config: Run, prepare: Callable[[], Path], ranks: Ranks) -> tuple[data.Blocks, data.Blocks]:
    """Training and held-out data; one process of each machine prepares them, the others wait."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        prepare()
    ranks.wait()
    folder, length, share = prepare(), config.model.length, config.data.validation
    return data.Blocks.open(folder, length, "train", share), data.Blocks.open(folder, length, "validation", share)


def plan(config: Run, prepare: Callable[[], Path], steps: int = 20) -> dict[str, float | int]:
    """What a run would cost on this machine, measured over ``steps`` steps."""
    with distributed.group() as ranks:
        blocks, held_out = _open(config, prepare, ranks)
        trainer = Trainer(config, blocks, held_out, ranks)
        parameters = sum(p.numel() for p in trainer.network.parameters())
        seconds = []
        for step, batch in trainer.batches():
            began = time.perf_counter()
            trainer.gradients(batch)
            trainer.update(0.0)
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            trainer.progress.step += 1
            if step == steps:  # the first is not counted: it warms up
                break
        each = sorted(seconds[1:])[len(seconds[1:]) // 2]
        tokens = config.loop.batch * config.model.length
        peak = torch.cuda.max_memory_allocated() if ranks.device.type == "cuda" else _resident()
        limits = [config.budget.steps or 0, (config.budget.tokens or 0) / tokens]
        finish = max(limits) * each / 60 if any(limits) else config.budget.minutes or 0.0
        if config.budget.minutes:
            finish = min(finish, config.budget.minutes) if any(limits) else config.budget.minutes
        return {
            "parameters": parameters,
            "training_tokens_at_hand": len(blocks) * config.model.length,
            "tokens_a_step": tokens,
            "weights_and_moments_MiB": parameters * 4 * 5 / 2**20,  # weights, gradients, two moments, average
            "peak_memory_MiB": peak / 2**20,
            "milliseconds_a_step": each * 1e3,
            "tokens_a_second": tokens / each,
            "minutes_to_finish": finish,
        }


def _resident() -> int:
    """The most memory this process has held, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _start(trainer: Trainer, saves: Path, resume: bool, tell: Callable[[str, dict[str, Any]], None]) -> Path | None:
    """Load the newest whole checkpoint when asked to; refuse to write over a run when not."""
    if not resume:
        if checkpoint.steps(saves):
            raise ValueError(f"{saves.parent} holds a run already; add --resume to go on, or choose another --out")
        return None
    found = checkpoint.newest(saves, lambda text: tell("note", {"text": text}))
    if found:
        trainer.resume(found)
    return found


def _spent(config: Run, progress: Progress, ranks: Ranks) -> float:
    """The share of the budget that is used up, by the limit that is nearest; the same for all processes."""
    budget = config.budget
    shares = [0.0]
    if budget.steps:
        shares.append(progress.step / budget.steps)
    if budget.tokens:
        shares.append(progress.tokens / budget.tokens)
    if budget.minutes:
        seconds = ranks.total(torch.tensor(progress.seconds, dtype=torch.float64, device=ranks.device)) / ranks.world
        shares.append(seconds.item() / 60 / budget.minutes)
    return max(shares)


def _refuse(trainer: Trainer, batch: Batch, step: int, out: Path, tell: Callable[[str, dict[str, Any]], None]) -> None:
    """Keep the batch for replay; then stop, or go on without it as long as that is rare."""
    folder = out / "nonfinite"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}-rank-{trainer.ranks.rank}.safetensors"
    save_file({name: value.contiguous() for name, value in batch._asdict().items()}, path)
    trainer.progress.skipped += 1
    loop, skipped = trainer.config.loop, trainer.progress.skipped
    if loop.on_nonfinite == "skip" and skipped <= loop.max_skips:
        tell(
            "note", {"text": f"step {step}: loss or gradient is not finite; skipped ({skipped} so far), kept in {path}"}
        )
        return
    trainer.save(out / "checkpoints")
    again = "" if loop.on_nonfinite == "stop" else f" {skipped} times, more than loop.max_skips allows"
    raise NonFiniteError(
        f"at step {step} the loss or its gradient is not finite{again}; weights from before it are saved, and the "
        f"batch is in {path}. Try a lower optim.lr, or --on-nonfinite skip"
    )
