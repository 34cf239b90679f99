"""The run, from top to bottom: the same for one process and many; every "once in a while" is a line."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from sedd import checkpoint
from sedd.config import RunConfig, TrainConfig
from sedd.runtime import distributed, run_log
from sedd.runtime.distributed import Ranks
from sedd.training import optimizer
from sedd.training.batches import Batch, open_data, seeded
from sedd.training.trainer import Gradient, Moved, Progress, Trainer

SAVES = "checkpoints"
Record = dict[str, Any]
OnEvent = Callable[[str, Record], None]
"""Told what happens, by the first process alone: ("log", record), ("note", {"text": …}).

The record of a step has ``spent``, the share of the budget that is used up, and what was measured there.
"""


class NonFiniteError(RuntimeError):
    """A loss or a gradient that is not a number; the weights were not touched."""


class Outcome(NamedTuple):
    """How a run ended."""

    folder: Path
    progress: Progress
    signal: int | None
    bound: dict[str, float]
    """On held-out data, at the end; empty where a signal came first."""


def run(config: RunConfig, prepare: Callable[[], Path], out: Path, resume: bool, on_event: OnEvent) -> Outcome:
    """Run ``config`` on what ``prepare`` makes, from its last checkpoint or the start, to the end of its budget."""
    with distributed.process_group() as ranks, _deterministic(config.train.deterministic):
        tell = on_event if ranks.is_main else _unheard
        blocks, held_out = open_data(config, prepare, ranks)
        trainer = Trainer(config, blocks, held_out, ranks)
        _start(trainer, out, resume, tell)
        with _signals() as stopped, _log(trainer, out) as write:
            bound = _loop(trainer, out, stopped, write, tell)
        return Outcome(out, trainer.progress, stopped(), bound)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """The same bits every time, on a GPU too."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it is first used
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def writable(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before any work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to ({error.strerror}); choose another --out") from None


def _loop(
    trainer: Trainer, out: Path, stopped: Callable[[], int | None], write: Callable[[Record], None], tell: OnEvent
) -> dict[str, float]:
    """Step until the budget is spent or a signal came; the held-out bound at the end."""
    config, options, ranks, done = trainer.config, trainer.config.train, trainer.ranks, trainer.progress
    bound: dict[str, float] = {}
    speed, spent, ending = _Speed(done), _spent(config, done, ranks), False
    began = time.perf_counter()
    for batch in trainer.batches.since(done.step):
        if spent >= 1 or ending:
            break
        rate = config.optim.lr * optimizer.factor(config.optim, done.step, spent)
        found = _step(trainer, batch, rate, out, tell)
        done.seconds += time.perf_counter() - began  # with the wait for the batch: where a GPU is late, it is there
        spent, ending = _spent(config, done, ranks), ranks.any(stopped() is not None)
        if ending or spent >= 1 or _looked_at(options, done):
            _settle(trainer, out, tell)  # else while the next step runs: a GPU is not waited for

        bound = trainer.held_out_bound() if _due(done, options.eval_every) else {}
        best = bool(bound) and done.improves(bound["bound"])
        record = (_measured(trainer, found, rate) | speed.read() if _due(done, options.log_every) else {}) | bound
        if _due(done, options.sample_every):
            record["samples"] = trainer.samples(4)
            tell("note", {"text": f"step {done.step}: {record['samples'][0]!r}"})
        if record:
            write({"step": done.step, "tokens": done.tokens, **record})
        tell("log", {"step": done.step, "tokens": done.tokens, "spent": min(spent, 1.0), **record})
        if ending or spent >= 1 or _due(done, options.save_every) or (best and options.save_every):
            trainer.save(out / SAVES)
        began = time.perf_counter()
    return bound if bound or ending else trainer.held_out_bound()


def _step(trainer: Trainer, batch: Batch, rate: float, out: Path, tell: OnEvent) -> Gradient:
    """One batch; the weights move, unless its loss or gradient is no number."""
    done, seed = trainer.progress, trainer.config.seed
    torch.manual_seed(seeded(seed, done.step, 3, trainer.ranks.rank).initial_seed())  # dropout
    found = trainer.gradients(batch)
    _settle(trainer, out, tell)
    trainer.update(rate, batch, found)
    if trainer.ranks.device.type == "cpu":
        _settle(trainer, out, tell)
    trainer.mover.forget()
    done.step, done.tokens = done.step + 1, done.tokens + int(batch.tokens)
    return found


def _settle(trainer: Trainer, out: Path, tell: OnEvent) -> None:
    """What is left of the last step: its average, or what to do if its loss or gradient was no number."""
    if (refused := trainer.settle()) is not None:
        _refuse(trainer, refused, out, tell)


def _looked_at(options: TrainConfig, done: Progress) -> bool:
    """Whether the average or the log is wanted after this step."""
    return any(
        _due(done, every) for every in (options.log_every, options.eval_every, options.sample_every, options.save_every)
    )


def _due(done: Progress, every: int) -> bool:
    return every > 0 and done.step % every == 0


def _spent(config: RunConfig, done: Progress, ranks: Ranks) -> float:
    """The share of the budget that is used up, by the limit that is nearest; the same for all processes."""
    budget = config.budget
    shares = [0.0]
    if budget.steps:
        shares.append(done.step / budget.steps)
    if budget.tokens:
        shares.append(done.tokens / budget.tokens)
    if budget.minutes:
        seconds = (
            ranks.all_reduce_sum(torch.tensor(done.seconds, dtype=torch.float64, device=ranks.device))
            / ranks.world_size
        )
        shares.append(seconds.item() / 60 / budget.minutes)
    return max(shares)


def _measured(trainer: Trainer, found: Gradient, rate: float) -> Record:
    """What a step says of the model."""
    loss, levels = found.loss.item(), found.by_time[0] / found.by_time[1].clamp_min(1)
    return {
        "loss": loss,
        "bits_per_char": loss / math.log(2) / trainer.blocks.chars_per_token,
        "grad_norm": found.norm.item(),
        "lr": rate,
        "loss_by_time": [round(level, 6) for level in levels.tolist()],
        "skipped": trainer.progress.skipped or None,
    }


class _Speed:
    """Tokens a second since it was last read."""

    def __init__(self, done: Progress) -> None:
        self.done, self.since, self.tokens = done, time.perf_counter(), done.tokens

    def read(self) -> Record:
        now, tokens = time.perf_counter(), self.done.tokens
        a_second = (tokens - self.tokens) / (now - self.since)
        self.since, self.tokens = now, tokens
        return {"seconds": round(self.done.seconds, 3), "tokens_per_second": round(a_second)}


def _unheard(kind: str, record: Record) -> None:
    """The other processes say nothing."""


@contextmanager
def _signals() -> Iterator[Callable[[], int | None]]:
    """What asked us to stop: SIGTERM and Ctrl-C are noted, and the step at hand is finished."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which alone hears of signals
        yield lambda: None
        return

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: caught[-1] if caught else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _log(trainer: Trainer, out: Path) -> Iterator[Callable[[Record], None]]:
    """Where records go: the log of the run, kept by the first process."""
    if not trainer.ranks.is_main:
        yield lambda record: None
        return
    checkpoint.write_json(out / "config.json", trainer.config.as_dict())
    checkpoint.write_json(out / "environment.json", run_log.environment())
    with checkpoint.written(out / "log.jsonl"):
        log = run_log.RunLog(out, after=trainer.progress.step)

    def write(record: Record) -> None:
        with checkpoint.written(log.path):
            log.write(record)

    with _raised_once():
        try:
            yield write
        except BaseException:
            with suppress(OSError):  # what came first is what to say
                log.close()
            raise
        with checkpoint.written(log.path):
            log.close()


@contextmanager
def _raised_once() -> Iterator[None]:
    """TensorBoard's thread raises what keeps it from writing, and raises it again when it is next written to."""
    before = threading.excepthook
    threading.excepthook = lambda given: None if issubclass(given.exc_type, OSError) else before(given)
    try:
        yield
    finally:
        threading.excepthook = before


def _start(trainer: Trainer, out: Path, resume: bool, tell: OnEvent) -> None:
    """Load the newest whole checkpoint when asked to; refuse to write over a run when not."""
    saves = out / SAVES
    if not resume and checkpoint.steps(saves):
        raise ValueError(f"{out} holds a run already; add --resume to go on, or choose another --out")
    found = checkpoint.newest(saves, lambda text: tell("note", {"text": text})) if resume else None
    if found:
        trainer.resume(found)
        tell("note", {"text": f"going on from {found.name}"})
    trainer.ranks.barrier()  # until all have looked
    if trainer.ranks.is_main:
        out.mkdir(parents=True, exist_ok=True)
        checkpoint.set_aside(saves, found)
        trainer.prune(saves)


def _refuse(trainer: Trainer, refused: Moved, out: Path, tell: OnEvent) -> None:
    """Keep the batch for replay; then stop, or go on without it as long as that is rare."""
    options, done = trainer.config.train, trainer.progress
    path = out / "nonfinite" / f"step-{refused.step:08d}-rank-{trainer.ranks.rank}.safetensors"
    checkpoint.write_tensors(path, refused.batch._asdict())
    done.skipped += 1
    if options.on_nonfinite == "skip" and done.skipped <= options.max_skips:
        so_far = f"skipped ({done.skipped} so far), kept in {path}"
        tell("note", {"text": f"step {refused.step}: loss or gradient is not finite; {so_far}"})
        return
    done.step, done.tokens = refused.step, refused.tokens
    trainer.save(out / SAVES)
    again = "" if options.on_nonfinite == "stop" else f" {done.skipped} times, more than train.max_skips allows"
    raise NonFiniteError(
        f"at step {refused.step} the loss or its gradient is not finite{again}; weights from before it are saved, "
        f"and the batch is in {path}. Try a lower optim.lr, or --on-nonfinite skip"
    )
