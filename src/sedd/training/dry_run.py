"""A dry run, behind ``sedd plan``: measure a few steps and a part of a validation, and extrapolate to the whole run."""

import json
import math
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sedd import data
from sedd.data.readers import has_several_documents, read_chunks
from sedd.runtime import cuda_graphs, distributed
from sedd.runtime.distributed import Ranks
from sedd.terminal import warn
from sedd.training import sizing
from sedd.training.config import BudgetConfig, DataConfig, RunConfig
from sedd.training.datasets import open_datasets, prepare_data
from sedd.training.trainer import Trainer, finish_step, train_step

SAMPLE_CHARACTERS = 400_000
"""Characters of the data that are read for a plan; smaller sources are read as a whole."""
MAX_STEPS, MAX_SECONDS = 10, 4.0
"""Steps that are measured after the first, or as many as are finished in this time."""
STEP_SECONDS = 0.5
"""A batch whose step would take longer, by the speed of matrix products, is measured in part."""
OnProgress = Callable[[int, int], None]


def estimate_cost(
    config: RunConfig, on_progress: OnProgress = lambda done, total: None, device: str | None = None
) -> dict[str, Any]:
    """Measure memory and time of a few training steps, and extrapolate to the end of the budget.

    Args:
        on_progress: Called with the number of measurements done, and how many there are.
        device: The device that was given; None: the default.
    """
    with tempfile.TemporaryDirectory() as folder, distributed.process_group(device) as ranks:
        sample = prepare_sample(config, Path(folder))
        measured = _reduce_batch(config, ranks)
        blocks, validation_blocks = open_datasets(measured, lambda: sample.folder, ranks)
        trainer = Trainer(measured, blocks, validation_blocks, ranks)
        before = _peak_memory(ranks.device)
        whole = config.train.batch_size / measured.train.batch_size  # how many times as much a step of the run is
        seconds, tokens = (whole * value for value in _time_steps(trainer, on_progress))
        parameters = sum(p.numel() for p in trainer.network.parameters())
        peak = _peak_memory(ranks.device)
        activations = max(0, peak - before - 4 * 3 * parameters)  # gradients and AdamW's moments are as before
        parts = config.train.grad_accumulation / measured.train.grad_accumulation
        steps = _count_steps(config.budget, seconds, tokens)
        validation_seconds = _validation_seconds(trainer, config.train.eval_sequences, steps)
        on_progress(MAX_STEPS + 1, MAX_STEPS + 1)
        return {
            "parameters": parameters,
            "steps": steps,
            "tokens": round(steps * tokens),
            **_about_data(config, blocks, sample.fraction, steps * tokens),
            "tokens_per_step": round(tokens),
            "weights_and_optimizer_MiB": 4 * 5 * parameters / 2**20,  # weights, gradients, EMA, AdamW's moments
            "peak_memory_MiB": (peak + max(0.0, whole / parts - 1) * activations) / 2**20,
            "milliseconds_per_step": seconds * 1e3,
            "tokens_per_second": tokens / seconds,
            "training_minutes": steps * seconds / 60,
            "evaluation_minutes": validation_seconds / 60,
            "minutes_to_finish": (steps * seconds + validation_seconds) / 60,
            **_expectation(config, blocks, sample.fraction, steps * tokens),
        }


def _reduce_batch(config: RunConfig, ranks: Ranks) -> RunConfig:
    """Return the configuration with as many sequences per step as `STEP_SECONDS` are enough for, at least one each."""
    model, train = config.model, config.train
    flops = sizing.measure_flops(ranks.device.type) / 3  # reached by a network
    own = config.network
    weights = sizing.count_weights(config, model.seq_len) if own else sizing.block_weights((model.width, model.depth))
    per_sequence = 6 * weights * model.seq_len / flops
    fitting = max(1, int(STEP_SECONDS / per_sequence / ranks.world_size)) * ranks.world_size
    if fitting >= train.batch_size:
        return config
    smaller = replace(train, batch_size=fitting, grad_accumulation=1)
    return replace(config, train=smaller)


# Data ------------------------------------------------------------------------------------------------------


class DataSample(NamedTuple):
    """The beginning of a run's data, prepared."""

    folder: Path
    fraction: float
    """About how much of the data it is; NaN if the size of the data is unknown."""


def prepare_sample(config: RunConfig, folder: Path) -> DataSample:
    """Prepare the beginning of the data in ``folder``; small or prepared data is used as it is.

    The cost of a step depends on the data by its vocabulary and lengths alone, of which the beginning is an estimate.
    """
    options, size = config.data, sizing.source_bytes(config.data)
    prepared = len(options.sources) == 1 and data.is_prepared(options.sources[0])
    if prepared or size <= SAMPLE_CHARACTERS or any(".npy" in source for source in options.sources):
        return DataSample(prepare_data(config), 1.0)
    sample = _write_sample(options, folder)
    is_lines = options.packing == "lines"
    data.prepare(
        [sample.file],
        folder / "shards",
        data.fit_tokenizer(options.tokenizer, [sample.file], sample.column, options.packing),
        packing=options.packing,
        length=config.model.seq_len if is_lines else None,
        pad=options.pad if is_lines else None,
        column=sample.column,
        label=sample.label,
    )
    return DataSample(folder / "shards", sample.fraction)


class _SampleFile(NamedTuple):
    """The first records of the data: a text, or a table with columns of texts and labels."""

    file: Path
    column: str | None
    label: str | None
    fraction: float


def _write_sample(options: DataConfig, folder: Path) -> _SampleFile:
    """Write the first records to a file in ``folder``; bytes that are not UTF-8 are replaced."""
    sources, size, fraction = data.expand_sources(options.sources), 0, math.nan
    total = sum(source.size for source in sources)
    encoding = data.TextEncoding.for_tokenizer(options.tokenizer, options.encoding)
    rows: list[dict[str, str | None]] = []
    for chunk in read_chunks(sources, options.column, options.packing, options.label, encoding):
        strings = (text if isinstance(text, str) else " ".join(map(str, text.tolist())) for text in chunk.texts)
        texts = [text.encode(errors="replace").decode() for text in strings]
        rows += [
            {"text": text, "label": label}
            for text, label in zip(texts, chain(chunk.labels, repeat(None)), strict=False)
        ]
        size += sum(map(len, texts))
        fraction = chunk.done / total if total else math.nan
        if size >= SAMPLE_CHARACTERS:
            break
    for message in encoding.messages():
        warn(message)
    if options.packing == "packed" and not has_several_documents(sources):
        (folder / "sample.txt").write_text("".join(str(row["text"]) for row in rows), encoding="utf-8")
        fraction = (folder / "sample.txt").stat().st_size / sizing.source_bytes(options)
        return _SampleFile(folder / "sample.txt", None, None, min(1.0, fraction))
    (folder / "sample.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return _SampleFile(folder / "sample.jsonl", "text", "label" if options.label else None, fraction)


def _about_data(config: RunConfig, blocks: data.TokenBlocks, fraction: float, tokens: float) -> dict[str, Any]:
    """Return the characters of training, if the tokens are text, the tokens of the data, and how often it is read."""
    available = len(blocks) * blocks.length / fraction
    known, (per_token, _) = math.isfinite(available), blocks.text_per_token()
    return {
        **({"characters": round(tokens * per_token)} if per_token is not None else {}),
        "training_tokens": round(available) if known else None,
        "passes_over_data": round(tokens / available, 2) if known else None,
    }


# Measurements ----------------------------------------------------------------------------------------------


def _time_steps(trainer: Trainer, on_progress: OnProgress) -> tuple[float, float]:
    """Return the mean seconds and tokens of steps at learning rate 0, after one that warms up.

    As in training, steps are queued without waiting for the device, and the next batch is built meanwhile.
    """
    tokens, steps, start = 0, 0, 0.0
    for steps, batch in enumerate(trainer.dataloader.iterate(0)):
        train_step(trainer, batch, 0.0, lambda pending: None)
        on_progress(steps, MAX_STEPS + 1)
        if steps == 0:
            finish_step(trainer, lambda pending: None)
            _synchronize(trainer)
            if trainer.ranks.device.type == "cuda":  # what CUDA graphs were captured with is in their pools from now on
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            continue
        tokens += int(batch.tokens)
        is_late = torch.tensor([float(time.perf_counter() - start > MAX_SECONDS)])
        if steps == MAX_STEPS or trainer.ranks.all_reduce_sum(is_late).item():
            break
    finish_step(trainer, lambda pending: None)
    _synchronize(trainer)
    return (time.perf_counter() - start) / steps, tokens / steps


def _peak_memory(device: torch.device) -> int:
    """Return the most bytes that were in use so far: of the GPU, else of this process."""
    if device.type == "cuda":
        return cuda_graphs.peak_memory()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _synchronize(trainer: Trainer) -> None:
    """Wait until all queued work is done."""
    if trainer.ranks.device.type == "cuda":
        torch.cuda.synchronize()


def _count_steps(budget: BudgetConfig, seconds_per_step: float, tokens_per_step: float) -> int:
    """Return the number of steps until the first limit of the budget is reached."""
    limits = [
        budget.steps or math.inf,
        math.inf if budget.tokens is None else budget.tokens / tokens_per_step,
        math.inf if budget.minutes is None else budget.minutes * 60 / seconds_per_step,
    ]
    return math.ceil(min(limits))


def _validation_seconds(trainer: Trainer, sequences: int, steps: int) -> float:
    """Return the seconds of all validations of a run of ``steps``, one of them at its end, from a part of one."""
    options = trainer.config.train
    part = min(sequences, options.batch_size)
    trainer.config = replace(trainer.config, train=replace(options, eval_sequences=part))
    seconds = []
    for _ in range(1 if options.precision == "float32" else 2):  # else the first is in both precisions
        start = time.perf_counter()
        trainer.validation_bound()
        seconds.append((time.perf_counter() - start) * sequences / part)
    return seconds[0] + seconds[-1] * ((steps - 1) // every if (every := trainer.config.eval_every) else 0)


# Expectation -----------------------------------------------------------------------------------------------


def _expectation(config: RunConfig, blocks: data.TokenBlocks, fraction: float, tokens: float) -> dict[str, float]:
    """Return the expected bits per character and their error, for text in words."""
    (per_token, _), formula = blocks.text_per_token(), sizing.formula_of(config)
    if per_token is None or formula is None or not sizing.is_prose(_first_text(blocks)):
        return {}
    weights = sizing.block_weights((config.model.width, config.model.depth))
    bits = formula.expected_bits(weights, tokens * per_token, blocks.index.characters / fraction)
    return {} if bits is None else {"expected_bits_per_char": round(bits, 2), "expected_bits_error": formula.error}


def _first_text(blocks: data.TokenBlocks) -> str:
    """Return the text of the first blocks."""
    rows, valid = blocks.read(torch.arange(min(len(blocks), 64)).numpy())
    return "".join(blocks.tokenizer.decode(row[mask]) for row, mask in zip(rows, valid, strict=True))
