"""A training run from start to end: the same for one process and many."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sedd import files
from sedd.runtime import distributed, run_log
from sedd.runtime.distributed import Ranks
from sedd.training import checkpoint, networks, optimizer
from sedd.training.config import RunConfig
from sedd.training.datasets import open_datasets, with_absolute_paths
from sedd.training.trainer import (
    UNSAVED,
    NonFiniteError,
    PendingStep,
    StepMetrics,
    Trainer,
    TrainingState,
    finish_step,
    start_copy,
    train_step,
)

Record = dict[str, Any]
Note = Callable[[str], None]
OnEvent = Callable[[str, Record], None]
"""Progress callback, called in every process: ("log", record) after each step, ("note", {"text": …}) for messages.

The record of a step has ``spent``, the fraction of the budget that is used, and what was measured at that step; on a
GPU the metrics of a logged step come in a second record, one step later.
"""
FEW_VALIDATIONS = 4  # a run that is validated at most so often is saved at each validation that is the best
PATIENCE = 3
"""Validations in a row that are above the lowest bound, by more than its standard error, when a run overfits."""


class TrainingResult(NamedTuple):
    """How a run ended."""

    state: TrainingState
    signal: int | None  # the signal that stopped the run, if one did
    validation: dict[str, float]  # the validation bound at the end; empty where a signal stopped the run


def run(
    config: RunConfig,
    prepare: Callable[[], Path],
    out: Path,
    resume: bool,
    on_event: OnEvent,
    device: str | None = None,
) -> TrainingResult:
    """Train until the budget is used up: from the last checkpoint in ``out`` if ``resume``, else from the start.

    One process per machine calls ``prepare``, which returns the folder of the run's shards.
    """

    def note(text: str) -> None:
        on_event("note", {"text": text})

    with (
        distributed.process_group(device) as ranks,
        files.locked_folder(out) if ranks.is_main else nullcontext(),
        ExitStack() as ends,
    ):
        ends.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        if config.train.deterministic:  # on a GPU too
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it is first used
            torch.use_deterministic_algorithms(True)
        trainer = Trainer(with_absolute_paths(config, out), *open_datasets(config, prepare, ranks), ranks)
        if trainer.blocks.padding is not None:
            note(trainer.blocks.padding)
        _resume_or_start(trainer, out, resume, note)
        with _signals() as caught, _open_log(trainer, out, note) as write, _all_written(trainer, note):
            validation = _train(trainer, out, caught, write, on_event, note)
        return TrainingResult(trainer.state, caught[-1] if caught else None, validation)


def _train(
    trainer: Trainer, out: Path, caught: list[int], write: Callable[[Record], None], on_event: OnEvent, note: Note
) -> dict[str, float]:
    """Train until the budget is used up or a signal is caught; return the validation bound at the end."""
    config, options, ranks, state = trainer.config, trainer.config.train, trainer.ranks, trainer.state

    def report(record: Record) -> None:
        write(record)
        on_event("log", {"spent": spent, **record})

    on_nonfinite = partial(_handle_nonfinite, trainer, out, note)
    clock, overfitting = Clock(state), ""
    bounds = [record for record in (run_log.read_log(out) if ranks.is_main else ()) if "bound" in record]
    validation: dict[str, float] = {}
    unread: Callable[[], Record] | None = None
    spent, stopping = _agree(config, state, ranks, False)
    if spent >= 1:
        note(f"{out} is finished: {config.budget.describe_spent(state.step, state.tokens, state.seconds)}")
        return _final_bound(trainer, out, report)
    for batch in trainer.dataloader.iterate(state.step):
        trainer.writer.check()
        lr = config.optim.lr * optimizer.lr_multiplier(config.optim, state.step, spent)
        metrics = train_step(trainer, batch, lr, on_nonfinite)
        if unread is not None:  # the record of the step before, for which train_step has waited
            report(unread())
            unread = None
        clock.count_training()
        spent, stopping = _agree(config, state, ranks, bool(caught))
        is_last = stopping or spent >= 1
        is_complete = spent >= 1 and not stopping  # the last step is logged and evaluated, whatever the intervals
        validates = is_complete or _is_due(state.step, config.eval_every)
        samples, saves = _is_due(state.step, options.sample_every), is_last or _is_due(state.step, options.save_every)
        is_finished = validates or samples or saves or ranks.device.type == "cpu"
        if is_finished:
            finish_step(trainer, on_nonfinite)  # else during the next step, so that a GPU is not waited for

        record: Record = {"step": state.step, "tokens": state.tokens}
        if is_complete or _is_due(state.step, options.log_every):
            unread = partial(_step_record, trainer, *start_copy(metrics), record | {"lr": lr} | clock.record())
        if is_finished and unread is not None:
            record, unread = unread(), None
        with clock.count_apart("eval_seconds") if validates or samples else nullcontext():
            validation = trainer.validation_bound() if validates else {}
            if samples:
                record["samples"] = trainer.sample_texts(4)
                note(f"step {state.step}: {record['samples'][0]!r}")
        record |= validation
        if validation and state.update_best(validation["bound"], saves or _saves_best(config, state.step)):
            saves = True
        if len(record) > 2:
            write(record)
        if is_complete:
            _check_bound(state.step, validation)
        if saves:
            with clock.count_apart("save_seconds"):
                trainer.save(out / checkpoint.CHECKPOINTS)
                if is_last:
                    trainer.writer.wait()
        if validation and not overfitting:  # which is reported once
            bounds.append(record)
            if overfitting := describe_overfitting(bounds, state.best_step):
                note(overfitting)
        on_event("log", {"spent": spent, **record})
        if is_last:
            break
    return validation


def _check_bound(step: int, validation: dict[str, float]) -> None:
    """Reject a final bound that is not finite."""
    if not math.isfinite(validation["bound"]):
        raise NonFiniteError(f"at step {step}, the last, the validation bound is {validation['bound']}; {UNSAVED}")


def _final_bound(trainer: Trainer, out: Path, report: Callable[[Record], None]) -> dict[str, float]:
    """Return the validation bound of a finished run: from its log or, if a signal stopped its last step, computed."""
    state = trainer.state

    def read() -> list[Record]:
        return [r for r in run_log.read_log(out) if r["step"] == state.step and "bound" in r]

    found = trainer.ranks.once_per_node(read)[-1:]  # the same in all processes
    fields = ("bound", "bound_stderr", "bound_bits_per_char")  # the last of text alone
    validation: dict[str, float] = {name: record[name] for record in found for name in fields if name in record}
    if not validation:
        with Clock(state).count_apart("eval_seconds"):
            validation = trainer.validation_bound()
        state.update_best(validation["bound"])
        report({"step": state.step, "tokens": state.tokens, **validation})
    _check_bound(state.step, validation)
    return validation


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _saves_best(config: RunConfig, step: int) -> bool:
    """Return whether to save a checkpoint that is the best: at the first validation after each half of ``save_every``.

    At the start every validation is the best, and saving a large network takes longer than validating it.
    """
    every, steps = config.train.save_every, config.budget.steps
    is_short = steps is not None and steps <= FEW_VALIDATIONS * config.eval_every
    return every > 0 and (is_short or step % max(1, every // 2) < config.eval_every)


def _agree(config: RunConfig, state: TrainingState, ranks: Ranks, stop: bool) -> tuple[float, bool]:
    """Return the used fraction of the budget, by the processes' mean time, and whether to stop; the same in all."""
    seconds, stops = ranks.all_reduce_sum(torch.tensor([state.seconds, float(stop)], dtype=torch.float64)).tolist()
    return config.budget.spent(state.step, state.tokens, seconds / ranks.world_size), stops > 0


def _handle_nonfinite(trainer: Trainer, out: Path, note: Note, pending: PendingStep) -> None:
    """Save the batch of a step that was not finite; then stop, or skip the step if ``train.max_skips`` allows."""
    options, state = trainer.config.train, trainer.state
    path = out / "nonfinite" / f"{checkpoint.step_name(pending.step)}-rank-{trainer.ranks.rank}.safetensors"
    checkpoint.write_tensors(path, pending.batch._asdict())
    state.skipped += 1
    if options.on_nonfinite == "skip" and state.skipped <= options.max_skips:
        skipped = f"skipped ({state.skipped} so far), its batch is in {path}"
        note(f"step {pending.step}: loss or gradient is not finite; {skipped}")
        return
    state.step, state.tokens = pending.step, pending.tokens
    trainer.save(out / checkpoint.CHECKPOINTS)
    trainer.writer.wait()
    repeated = "" if options.on_nonfinite == "stop" else f" {state.skipped} times, more than train.max_skips allows"
    raise NonFiniteError(
        f"at step {pending.step} the loss or its gradient is not finite{repeated}; weights from before it are saved, "
        f"and the batch is in {path}. Try a lower optim.lr, or --on-nonfinite skip"
    )


def _resume_or_start(trainer: Trainer, out: Path, resume: bool, note: Note) -> None:
    """Load the newest intact checkpoint if ``resume``; otherwise reject a folder that holds a run."""
    root = out / checkpoint.CHECKPOINTS
    if not resume and checkpoint.list_checkpoints(root):
        raise ValueError(f"{out} holds a run already; add --resume to continue it, or choose another --out")
    newest = checkpoint.newest(root, note) if resume else None
    if newest:
        trainer.resume(newest)
    if resume:
        note(f"resuming from {newest.name}" if newest else f"{out} has no checkpoint yet; starting from step 0")
    trainer.ranks.barrier()  # until all processes have read it
    if trainer.ranks.is_main:
        if (out / run_log.LOG).exists():
            run_log.read_log(out)  # raises if it is damaged, before anything is written
        if newest is None and (kept := run_log.set_aside_log(out)):
            note(f"the log of a run that saved no checkpoint is kept as {kept}")
        checkpoint.set_aside_corrupted(root, newest)
        checkpoint.prune(root, trainer.config.train.keep_checkpoints, trainer.state.best_step)


@contextmanager
def _all_written(trainer: Trainer, note: Note) -> Iterator[None]:
    """Wait at the end for background writes; raise their error, or only print it if there is another one."""
    try:
        yield
    except BaseException:
        try:
            trainer.writer.wait()
        except Exception as error:
            note(str(error))
        raise
    trainer.writer.wait()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Catch SIGTERM, SIGHUP and Ctrl-C until everything is saved; yield the list of what was caught."""
    caught: list[int] = []
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
        numbers.append(signal.SIGHUP)
    with ExitStack() as ends:
        if threading.current_thread() is threading.main_thread():  # the only thread that may handle signals
            for number in numbers:
                before = signal.signal(number, lambda number, frame: caught.append(number))
                ends.callback(signal.signal, number, before)
        yield caught


def _step_record(trainer: Trainer, metrics: list[Tensor], copied: torch.cuda.Event | None, record: Record) -> Record:
    """Return ``record`` with the metrics of its step, which is waited for."""
    if copied is not None:
        copied.synchronize()
    loss, grad_norm, by_time = StepMetrics(*metrics)
    loss_by_time = by_time[0] / by_time[1].clamp_min(1)
    return record | {
        "loss": loss.item(),
        "bits_per_char": trainer.blocks.bits_per_char(loss.item()),
        "grad_norm": grad_norm.item(),
        "loss_by_time": [round(value, 6) for value in loss_by_time.tolist()],
        "skipped": trainer.state.skipped or None,
    }


class Clock:
    """Divides wall-clock time between ``seconds``, ``eval_seconds`` and ``save_seconds`` of a run's state.

    What is not evaluation or saving is training: also the wait for data, for the device and for log files. On a GPU the
    host queues at most one step ahead, so its clock is the device's up to one step.
    """

    def __init__(self, state: TrainingState, now: Callable[[], float] = time.perf_counter) -> None:
        self.state, self._now, self._since = state, now, now()
        self._recorded = state.tokens, state.seconds

    def count_training(self, counter: str = "seconds") -> None:
        """Count the time since the last call as training."""
        before, self._since = self._since, self._now()
        setattr(self.state, counter, getattr(self.state, counter) + self._since - before)

    @contextmanager
    def count_apart(self, counter: str) -> Iterator[None]:
        """Count the time inside as ``eval_seconds`` or ``save_seconds``; queued steps must have ended before."""
        self.count_training()
        try:
            yield
        finally:
            self.count_training(counter)

    def record(self) -> Record:
        """Return the times, and the training tokens per second of training since the last record."""
        state, (tokens, seconds) = self.state, self._recorded
        self._recorded = state.tokens, state.seconds
        times = {name: round(getattr(state, name), 3) for name in ("seconds", "eval_seconds", "save_seconds")}
        return times | {"tokens_per_second": round((state.tokens - tokens) / max(state.seconds - seconds, 1e-9))}


def describe_overfitting(records: Sequence[Record], saved_step: int | None) -> str:
    """Return what to say if the last validation bounds of a run are above the lowest; empty if they are not.

    All of them have the same sequences, times and noise.
    """
    found = [record for record in records if math.isfinite(record["bound"])]
    lowest = min(found, key=lambda record: float(record["bound"]), default=None)
    later = [record["bound"] for record in found[found.index(lowest) + 1 :]][-PATIENCE:] if lowest else []
    if lowest is None or len(later) < PATIENCE or min(later) <= lowest["bound"] + lowest["bound_stderr"]:
        return ""
    saved = "No checkpoint is saved before the end; set train.save_every to keep the best"
    if saved_step is not None:
        is_best = saved_step == lowest["step"]
        others = "" if is_best else ", the best that was saved; a lower train.save_every saves more"
        saved = f"Commands use the checkpoint of step {saved_step:,}{others}"
    return (
        f"the run overfits: its validation bound was {lowest['bound']:.3f} nats per token at step {lowest['step']:,}, "
        f"the last {PATIENCE} were higher, and now it is {later[-1]:.3f}. {saved}; stop, and train on more text, a "
        "smaller network, or with --set model.dropout=0.1"
    )


@contextmanager
def _open_log(trainer: Trainer, out: Path, note: Note) -> Iterator[Callable[[Record], None]]:
    """Write config.json and environment.json, and yield a function that appends to the log; first process only."""
    if not trainer.ranks.is_main:
        yield lambda record: None
        return
    checkpoint.write_json(out / "config.json", trainer.config.as_dict())
    checkpoint.write_json(out / "environment.json", run_log.environment())
    networks.remember(out, trainer.config.network)
    with checkpoint.explain_write_errors(out / run_log.LOG):
        log = run_log.RunLog(out, after=trainer.state.step)
    if log.torn:
        note(f"the last line of {log.path} was not completely written; it was dropped")
    if (expected := trainer.state.logged) is not None and log.records < expected:
        lost = f"{log.path} has {log.records} of the {expected} records up to step {trainer.state.step}"
        note(f"{lost}; the others are lost, and what is computed does not depend on them")
    trainer.state.logged = log.records

    def write(record: Record) -> None:
        with checkpoint.explain_write_errors(log.path):
            log.write(record)
        trainer.state.logged = log.records

    with ExitStack() as ends:
        # TensorBoard's thread raises an OSError again at its next write: its traceback is suppressed
        before = threading.excepthook
        ends.callback(setattr, threading, "excepthook", before)
        threading.excepthook = lambda args: None if issubclass(args.exc_type, OSError) else before(args)
        try:
            yield write
        except BaseException:
            with suppress(OSError):  # the first error is the one to report
                log.close()
            raise
        with checkpoint.explain_write_errors(log.path):
            log.close()
