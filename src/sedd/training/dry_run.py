"""A dry run, behind ``sedd plan``: measure a few steps and a part of a validation, and extrapolate to the whole run."""

import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import torch

from sedd import data
from sedd.data.readers import has_several_documents, read_chunks
from sedd.runtime import cuda_graphs, distributed
from sedd.runtime.distributed import Ranks
from sedd.terminal import warn
from sedd.training import sizing
from sedd.training.config import DataConfig, RunConfig
from sedd.training.datasets import open_datasets, prepare_data
from sedd.training.trainer import Trainer, finish_step, train_step

SAMPLE_CHARACTERS = 400_000  # characters of the data that are read for a plan; smaller sources are read as a whole
MAX_STEPS, MAX_SECONDS = 10, 4.0  # steps that are measured after the first, or as many as are finished in this time
STEP_SECONDS = 0.5  # a batch whose step would take longer, by the speed of matrix products, is measured in part
OnProgress = Callable[[int, int], None]


def estimate_cost(
    config: RunConfig, on_progress: OnProgress = lambda done, total: None, device: str | None = None
) -> dict[str, Any]:
    """Measure memory and time of a few training steps, and extrapolate to the end of the budget.

    ``on_progress`` is called with the number of measurements done, and how many there are.
    """
    with tempfile.TemporaryDirectory() as folder, distributed.process_group(device) as ranks:
        shards, fraction = prepare_sample(config, Path(folder))
        measured = _reduce_batch(config, ranks)
        blocks, validation_blocks = open_datasets(measured, lambda: shards, ranks)
        trainer = Trainer(measured, blocks, validation_blocks, ranks)
        before = _peak_memory(ranks.device)
        whole = config.train.batch_size / measured.train.batch_size  # how many times as much a step of the run is
        seconds, tokens_per_step = (whole * value for value in _time_steps(trainer, on_progress))
        parameters = sum(p.numel() for p in trainer.network.parameters())
        peak = _peak_memory(ranks.device)
        activations = max(0, peak - before - 4 * 3 * parameters)  # gradients and AdamW's moments are as before
        parts = config.train.grad_accumulation / measured.train.grad_accumulation
        budget, inf = config.budget, math.inf
        limits = ((budget.tokens or inf) / tokens_per_step, (budget.minutes or inf) * 60 / seconds)
        steps = math.ceil(min(budget.steps or inf, *limits))
        validation_seconds = _validation_seconds(trainer, config.train.eval_sequences, steps)
        on_progress(MAX_STEPS + 1, MAX_STEPS + 1)
        tokens, available = steps * tokens_per_step, len(blocks) * blocks.length / fraction
        is_known, (per_token, _) = math.isfinite(available), blocks.text_per_token()
        return {
            "parameters": parameters,
            "steps": steps,
            "tokens": round(tokens),
            **({} if per_token is None else {"characters": round(tokens * per_token)}),
            "training_tokens": round(available) if is_known else None,
            "passes_over_data": round(tokens / available, 2) if is_known else None,
            "tokens_per_step": round(tokens_per_step),
            "weights_and_optimizer_MiB": 4 * 5 * parameters / 2**20,  # weights, gradients, EMA, AdamW's moments
            "peak_memory_MiB": (peak + max(0.0, whole / parts - 1) * activations) / 2**20,
            "milliseconds_per_step": seconds * 1e3,
            "tokens_per_second": tokens_per_step / seconds,
            "training_minutes": steps * seconds / 60,
            "evaluation_minutes": validation_seconds / 60,
            "minutes_to_finish": (steps * seconds + validation_seconds) / 60,
            **_expectation(config, blocks, fraction, tokens),
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
    return replace(config, train=replace(train, batch_size=fitting, grad_accumulation=1))


def prepare_sample(config: RunConfig, folder: Path) -> tuple[Path, float]:
    """Prepare the beginning of the data in ``folder``; small or prepared data is used as it is.

    Return the folder of shards, and about which fraction of the data it holds, NaN if the size of the data is unknown.
    The cost of a step depends on the data by its vocabulary and lengths alone, of which the beginning is an estimate.
    """
    options, size = config.data, sizing.source_bytes(config.data)
    prepared = len(options.sources) == 1 and data.is_prepared(options.sources[0])
    if prepared or size <= SAMPLE_CHARACTERS or any(".npy" in source for source in options.sources):
        return prepare_data(config), 1.0
    file, fraction = _write_sample(options, folder)
    is_lines, is_table = options.packing == "lines", file.suffix == ".jsonl"
    column = "text" if is_table else None
    data.prepare(
        [file],
        folder / "shards",
        data.fit_tokenizer(options.tokenizer, [file], column, options.packing),
        packing=options.packing,
        length=config.model.seq_len if is_lines else None,
        pad=options.pad if is_lines else None,
        column=column,
        label="label" if is_table and options.label else None,
    )
    return folder / "shards", fraction


def _write_sample(options: DataConfig, folder: Path) -> tuple[Path, float]:
    """Write the first records to a text or a table in ``folder``; return it, and how much of the data it is."""
    sources, size, fraction = data.expand_sources(options.sources), 0, math.nan
    total = sum(source.size for source in sources)
    encoding = data.TextEncoding.for_tokenizer(options.tokenizer, options.encoding)
    rows: list[dict[str, str | None]] = []
    for chunk in read_chunks(sources, options.column, options.packing, options.label, encoding):
        strings = (text if isinstance(text, str) else " ".join(map(str, text.tolist())) for text in chunk.texts)
        texts = [text.encode(errors="replace").decode() for text in strings]
        labelled = zip(texts, chain(chunk.labels, repeat(None)), strict=False)
        rows += [{"text": text, "label": label} for text, label in labelled]
        size += sum(map(len, texts))
        fraction = chunk.done / total if total else math.nan
        if size >= SAMPLE_CHARACTERS:
            break
    for message in encoding.messages():
        warn(message)
    if options.packing == "lines" or has_several_documents(sources):
        (folder / "sample.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder / "sample.jsonl", fraction
    (folder / "sample.txt").write_text("".join(str(row["text"]) for row in rows), encoding="utf-8")
    return folder / "sample.txt", min(1.0, (folder / "sample.txt").stat().st_size / sizing.source_bytes(options))


def _time_steps(trainer: Trainer, on_progress: OnProgress) -> tuple[float, float]:
    """Return the mean seconds and tokens of steps at learning rate 0, after one that warms up.

    As in training, steps are queued without waiting for the device, and the next batch is built meanwhile.
    """
    tokens, steps, start = 0, 0, 0.0

    def finish() -> float:
        finish_step(trainer, lambda pending: None)
        if trainer.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for steps, batch in enumerate(trainer.dataloader.iterate(0)):
        train_step(trainer, batch, 0.0, lambda pending: None)
        on_progress(steps, MAX_STEPS + 1)
        if steps == 0:
            start = finish()
            if trainer.ranks.device.type == "cuda":  # what CUDA graphs were captured with is in their pools from now on
                torch.cuda.reset_peak_memory_stats()
            continue
        tokens += int(batch.tokens)
        is_late = torch.tensor([float(time.perf_counter() - start > MAX_SECONDS)])
        if steps == MAX_STEPS or trainer.ranks.all_reduce_sum(is_late).item():
            break
    return (finish() - start) / steps, tokens / steps


def _peak_memory(device: torch.device) -> int:
    """Return the most bytes that were in use so far: of the GPU, else of this process."""
    return cuda_graphs.peak_memory() if device.type == "cuda" else 1024 * getrusage(RUSAGE_SELF).ru_maxrss


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


def _expectation(config: RunConfig, blocks: data.TokenBlocks, fraction: float, tokens: float) -> dict[str, float]:
    """Return the expected bits per character and their error, for text in words."""
    (per_token, _), formula = blocks.text_per_token(), sizing.formula_of(config)
    rows, valid = blocks.read(np.arange(min(len(blocks), 64)))
    text = "".join(blocks.tokenizer.decode(row[mask]) for row, mask in zip(rows, valid, strict=True))
    if per_token is None or formula is None or not sizing.is_prose(text):
        return {}
    weights = sizing.block_weights((config.model.width, config.model.depth))
    bits = formula.expected_bits(weights, tokens * per_token, blocks.index.characters / fraction)
    return {} if bits is None else {"expected_bits_per_char": round(bits, 2), "expected_bits_error": formula.error}
