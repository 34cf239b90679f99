"""Choose a network that fits the device, the data and the budget, for a run without a recipe."""

import math
import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sedd import data
from sedd.data.readers import read_chunks
from sedd.data.token_files import holds_ids
from sedd.runtime.device import resolve_device
from sedd.training import networks
from sedd.training.config import DataConfig, RunConfig

DEFAULT_MINUTES = 5.0  # budget of a run that has none
SIZES = ((64, 2), (96, 2), (128, 2), (128, 3), (192, 3), (256, 4), (384, 6), (512, 8), (768, 12))
"""Widths and depths to choose from."""
TOKENS_PER_WEIGHT = {"cpu": 1, "cuda": 4}  # minimum of training tokens per weight of the blocks; see the log
WEIGHTS_PER_BYTE = 7  # maximum of weights of the blocks per byte of data, against memorizing short texts; an estimate
MAX_LOSS = 2  # errors of the formula by which the best size may be expected to be better than the one chosen
BPE_CHARACTERS = 3.0  # about how many characters a token of byte-pair encoding has, before the tokenizer is fitted
OWN_SPEED = 0.2  # fraction of the speed of a matrix product that a network of the user's own is taken to reach; a guess
STEPS = 4000  # steps that the budget should last for, as far as batches of 1024 to 65,536 tokens allow
MAX_NGRAMS, MAX_NGRAM_ROWS = 3, 4096
"""Longest n-grams, and most of one length, whose embeddings a network on a CPU has; see the log."""
LOSS_WEIGHTING = 0.5
"""Loss weighting under absorbing noise: weights of the bound, 1/t, give the noisiest gradients; see the log."""
BOUND_OBJECTIVES = ("score-entropy", "lambda-dce", "t-dce", "any-order")
"""Objectives whose value is the bound, with which loss weighting and expected bits were measured."""
CHARACTERS, RECORD_CHARACTERS = 32, 64
"""Most characters of an alphabet that has a token for each: of packed text, and of records, one per line or row.

Records of SMILES, proteins or moves have fewer than 64, sentences with capital letters and digits have more.
"""
MIN_BPE_BYTES = 200_000
"""Shorter texts are read as bytes: too few of the pairs that byte-pair encoding joins would occur often enough."""


def choose_features(config: RunConfig, given: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    """Return n-grams, norm and loss weighting of a run without a recipe; the expected bits depend on them."""
    values: dict[str, Any] = {}
    is_modern = config.model.architecture == "modern" and not config.network
    if _kind(device) == "cpu" and is_modern and config.objective != "ratio-matching":
        rows = (_vocabulary_size(config.data) or MAX_NGRAM_ROWS) + 2
        ngrams = next((n for n in range(MAX_NGRAMS, 0, -1) if rows**n <= MAX_NGRAM_ROWS), 0)
        values["model"] = {"ngrams": ngrams, "embedding_norm": True}
    if config.noise.process == "absorbing" and config.objective in BOUND_OBJECTIVES:
        values["train"] = {"loss_weighting": LOSS_WEIGHTING}
    return values


def choose_sizing(config: RunConfig, given: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    """Return values of the keys that decide size and speed, for the device, data and budget of ``config``.

    ``config`` has the values of `choose_features`. Heads and batch fit the keys of the model that were given.
    """
    kind, kept = _kind(device), given.get("model", {})
    flops = 60 * (config.budget.minutes or DEFAULT_MINUTES) * measure_flops(kind)
    is_fixed = "seq_len" in kept or config.data.packing == "lines"
    seq_len = config.model.seq_len if is_fixed else 64 if kind == "cpu" else 256
    values: dict[str, dict[str, Any]] = {
        "model": {"seq_len": seq_len},
        "optim": {"warmup_steps": 50, "lr_schedule": "linear", "final_lr_fraction": 0.0, "ema_decay": 0.99},
    }
    if config.network:  # its size is given, and AdamW's learning rate fits more networks than Muon's
        affordable = OWN_SPEED * flops / 6 / count_weights(config, seq_len)
    else:
        width, depth = _choose_size(config, kind, flops)
        width = config.model.width if "width" in kept else width
        depth = config.model.depth if "depth" in kept else depth
        heads = next((n for n in range(max(2, width // 64), 0, -1) if width % (2 * n) == 0), 1)
        values["model"] |= {"width": width, "depth": depth, "heads": heads}
        values["optim"] |= {"name": "muon", "lr": 1e-2 if width <= 128 else 5e-3}
        affordable = affordable_tokens((width, depth), flops, kind)
    sequences = 2 ** round(math.log2(max(1024, min(affordable / STEPS, 65_536)) / seq_len))
    values["train"] = {"batch_size": max(4, sequences), "precision": "float32" if kind == "cpu" else "bfloat16"}
    if config.budget.minutes is config.budget.steps is config.budget.tokens is None:
        values["budget"] = {"minutes": DEFAULT_MINUTES}
    return values


def _choose_size(config: RunConfig, device: str, flops: float) -> tuple[int, int]:
    """Return the width and depth of the network that ``sedd train`` chooses.

    ``flops``, the budget's seconds times the measured speed of matrix products, are the arithmetic that can be spent: 6
    operations per weight and token. Of the sizes that can then be trained on enough tokens, and have not too many
    weights for the data, it is the largest; where the bits of these sizes can be expected, the largest that is at most
    `MAX_LOSS` errors worse than the best.
    """
    available = source_bytes(config.data)
    tokens = {size: affordable_tokens(size, flops, device) for size in SIZES}
    fitting = [
        size
        for size in SIZES
        if tokens[size] >= TOKENS_PER_WEIGHT[device] * block_weights(size)
        and block_weights(size) <= WEIGHTS_PER_BYTE * available
    ] or [SIZES[0]]
    formula = formula_of(config)
    if formula is None or not (_is_local_text(config.data) and is_prose(_first_text(config.data)[0] or "")):
        return fitting[-1]
    per_token = BPE_CHARACTERS if config.data.tokenizer.startswith("bpe") else 1.0
    found = {size: formula.expected_bits(block_weights(size), per_token * tokens[size], available) for size in fitting}
    expected = {size: bits for size, bits in found.items() if bits is not None}
    if fitting[-1] not in expected:  # it is unlike what was measured
        return fitting[-1]
    return [size for size in expected if expected[size] <= min(expected.values()) + MAX_LOSS * formula.error][-1]


def choose_tokenizer(config: RunConfig, given: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    """Return a tokenizer for local data: characters of a small alphabet, BPE of long text, else bytes; or integers."""
    options = config.data
    if not _is_local_text(options):
        return {}
    (text, found), size, is_packed = _first_text(options), source_bytes(options), options.packing == "packed"
    if text is None:
        tokenizer = "ints"
    elif found.has_many_odd:
        tokenizer = "bytes"
    elif not found.odd_bytes and len(set(text)) <= (CHARACTERS if is_packed else RECORD_CHARACTERS):
        tokenizer = "chars"
    elif is_packed and size >= MIN_BPE_BYTES:
        tokenizer = f"bpe:{min(8192 if _kind(device) == 'cuda' else 2048, max(512, 2 ** round(math.log2(size / 500))))}"
    else:
        tokenizer = "bytes"
    return {"data": {"tokenizer": tokenizer}}


def describe_sizing(config: RunConfig, device_name: str | None = None) -> str:
    """Return one line that says what a run without a recipe trains, and for what it was chosen."""
    size, threads = source_bytes(config.data), torch.get_num_threads()
    is_cpu = _kind(device_name) == "cpu"
    device = f"a CPU with {threads} thread{'s' * (threads > 1)}" if is_cpu else torch.cuda.get_device_name()
    return (
        f"without a recipe: {config.describe_sizes()}; chosen for "
        f"{config.budget.minutes or DEFAULT_MINUTES:g} minutes on {device} and "
        f"{f'{size / 1e6:,.1f} MB of data' if size < math.inf else 'data of unknown size'}; change it by --recipe, or "
        "--set as in model.width=256"
    )


def _kind(device: str | None) -> str:
    return "cuda" if resolve_device(device).type == "cuda" else "cpu"


def block_weights(size: tuple[int, int]) -> int:
    """Return the weights of the blocks: 12 matrices of width × width in each."""
    width, depth = size
    return 12 * depth * width**2


def count_weights(config: RunConfig, seq_len: int) -> int:
    """Return about how many weights a network of the user's own has; its vocabulary may not be known yet."""
    states = (_vocabulary_size(config.data) or 256) + 1
    with torch.random.fork_rng(devices=[]):
        network = networks.build(config.network, states, seq_len, labels=int(config.data.label is not None))
    return max(1, sum(p.numel() for p in network.parameters()))


def affordable_tokens(size: tuple[int, int], flops: float, device: str) -> float:
    """Return the training tokens that ``flops`` at the speed of a matrix product are enough for.

    Narrow networks are far from that speed. The fractions were measured, on a GPU at widths of 512 and 768.
    """
    fraction = min(0.45, size[0] / 300) if device == "cpu" else min(0.5, size[0] / 1250)
    return fraction * flops / 6 / block_weights(size)


@cache
def measure_flops(device: str) -> float:
    """Measure the floating-point operations per second of a matrix product, in a fraction of a second, once."""
    size, dtype = (4096, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        a @ a
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def _is_local_text(options: DataConfig) -> bool:
    """Return whether the sources are files of text: no prepared data, data sets of the Hub or arrays of ids."""
    if data.is_prepared(options.sources[0]) or any(source.startswith("hf:") for source in options.sources):
        return False
    return not holds_ids([file for source in data.expand_sources(options.sources) for file in source.files])


def source_bytes(options: DataConfig) -> float:
    """Return about how many bytes the sources hold, of a compressed file three times its size; infinity if unknown."""
    if len(options.sources) == 1 and data.is_prepared(options.sources[0]):
        return float(data.Index.read(Path(options.sources[0])).bytes)
    if any(source.startswith("hf:") for source in options.sources):
        return math.inf
    files = [file for source in data.expand_sources(options.sources) for file in source.files]
    compressed = (".gz", ".xz", ".bz2", ".zst")
    return sum(os.path.getsize(file) * (3.0 if file.suffix.lower() in compressed else 1.0) for file in files)


def _vocabulary_size(options: DataConfig) -> int | None:
    """Return about how many tokens there are; None if that is unknown."""
    kind, _, size = options.tokenizer.partition(":")
    if data.is_prepared(options.sources[0]):
        return data.Index.read(Path(options.sources[0])).vocab_size
    if not _is_local_text(options):
        return None
    if kind == "chars":
        return len(set(_first_text(options)[0] or ""))
    return 256 if kind == "bytes" else int(size) if kind == "bpe" else None


def _first_text(options: DataConfig) -> tuple[str | None, data.TextEncoding]:
    """Return the first 2^18 characters of the data, None for integers, and what their encoding counted."""
    text, encoding = "", data.TextEncoding.for_tokenizer("bytes", options.encoding)
    sources = data.expand_sources(options.sources)
    for chunk in read_chunks(sources, options.column, options.packing, encoding=encoding):
        for part in chunk.texts:
            if not isinstance(part, str):
                return None, encoding
            text += part[: max(0, 2**18 - len(text))]
        if len(text) >= 2**18 and not encoding.odd_bytes:  # else their share of all of the data decides
            break
    return text, encoding


def is_prose(text: str) -> bool:
    """Return whether a text is in words, of letters with spaces between them, as DNA and molecules are not."""
    letters, spaces = sum(map(str.isalpha, text)), sum(map(str.isspace, text))
    return letters + spaces > 0.75 * len(text) and 0.05 * len(text) < spaces < 0.35 * len(text)


RANGE = 1.5  # how far outside the measured weights, characters and characters per weight a run may be, as a factor
MAX_PASSES = 10.0  # passes over the data from which repeated characters are expected to be worth less


class Formula(NamedTuple):
    """E + A N^−α + B C^−β (Hoffmann et al. 2022, arXiv 2203.15556), fitted to runs of one kind, and their ranges."""

    e: float
    a: float
    alpha: float
    b: float
    beta: float
    error: float  # root mean square of the errors for runs that were left out of the fit
    weights: tuple[float, float]
    characters: tuple[float, float]
    characters_per_weight: tuple[float, float]

    def expected_bits(self, weights: int | float, characters: int | float, available: int | float) -> float | None:
        """Return the expected bits per character, or None where nothing comparable was measured.

        Many passes over the ``available`` characters of the data, NaN if unknown, are not comparable.
        """
        values = weights, characters, characters / weights
        ranges = self.weights, self.characters, self.characters_per_weight
        is_near = all(low / RANGE <= value <= high * RANGE for value, (low, high) in zip(values, ranges, strict=True))
        if not is_near or characters > MAX_PASSES * available:
            return None
        return self.e + self.a * math.pow(weights, -self.alpha) + self.b * math.pow(characters, -self.beta)


GENERAL = Formula(
    *(1.1008, 2.6752, 0.25, 35.065, 0.20),
    error=0.13,
    weights=(98_304, 56_623_104),
    characters=(256_000, 474_873_856),
    characters_per_weight=(16_449_536 / 56_623_104, 4_096_000 / 98_304),
)
SIZED = Formula(
    *(1.3981, 2.9896, 0.25, 16.155, 0.20),
    error=0.14,
    weights=(98_304, 1_327_104),
    characters=(1_176_003, 8_376_078),
    characters_per_weight=(2_352_005 / 1_327_104, 5_709_988 / 98_304),
)


def formula_of(config: RunConfig) -> Formula | None:
    """Return the formula of runs of this kind: of text, absorbing noise, and objectives whose value is the bound."""
    tokenizer = config.data.tokenizer.partition(":")[0]
    is_text = config.data.packing == "packed" and tokenizer in ("bytes", "chars", "bpe")
    if config.network or not is_text or config.noise.process != "absorbing" or config.objective not in BOUND_OBJECTIVES:
        return None
    is_sized = tokenizer == "bpe" and config.model.ngrams and config.train.loss_weighting
    return SIZED if is_sized else GENERAL
