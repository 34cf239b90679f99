"""Recipes: named configurations, as differences from the defaults of `config`."""

from typing import Any

_LINEAR_DECAY = {"warmup_steps": 50, "lr_schedule": "linear", "final_lr_fraction": 0.0, "ema_decay": 0.99}
_MUON = {"name": "muon", "lr": 4e-3, **_LINEAR_DECAY}
_TEXT8_MUON = {**_MUON, "decay_fraction": 0.5, "weight_decay": 0.1}
"""What won in runs of 230 seconds on characters; with GPT-2's tokens it was not measured."""
_HALF_GPU = {"width": 512, "depth": 8, "heads": 4}
_FAST = {"precision": "bfloat16", "save_every": 2000}


def _records(batch_size: int, steps: int) -> dict[str, Any]:
    """Return a recipe for records, one per line, whose length is that of the longest."""
    return {
        "data": {"tokenizer": "chars", "packing": "lines"},
        "model": {"width": 256, "depth": 6, "heads": 8},
        "optim": {"lr": 1e-3, "warmup_steps": 200, "ema_decay": 0.999},
        "train": {"batch_size": batch_size},
        "objective": "lambda-dce",
        "budget": {"steps": steps},
    }


def _published(width: int, depth: int, heads: int, grad_accumulation: int) -> dict[str, Any]:
    """Return the settings of a published SEDD model."""
    size = {"width": width, "depth": depth, "heads": heads}
    parts = {"batch_size": 512, "grad_accumulation": grad_accumulation}
    return {
        "data": {"tokenizer": "gpt2"},
        "model": {"architecture": "reference", **size, "seq_len": 1024, "dropout": 0.1},
        "optim": {"lr": 3e-4, "beta2": 0.999, "warmup_steps": 2500, "lr_schedule": "constant", "ema_decay": 0.9999},
        "train": {**parts, "precision": "bfloat16", "save_every": 5000},
        "budget": {"steps": 400_000},
    }


RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model": {"width": 128, "depth": 4, "heads": 4, "seq_len": 128},
        "optim": {"lr": 2e-3, "ema_decay": 0.99},
        "train": {"batch_size": 32},
        "budget": {"steps": 1000},
    },
    "text8": {
        "data": {"tokenizer": "chars"},
        "model": {**_HALF_GPU, "seq_len": 256, "ngrams": 3, "embedding_norm": True},
        "optim": _TEXT8_MUON,
        "train": {"batch_size": 256, "loss_weighting": 0.5, **_FAST},
        "objective": "lambda-dce",
        "budget": {"steps": 40_000},
    },
    "text8-uniform": {
        "data": {"tokenizer": "chars"},
        "noise": {"process": "uniform"},
        "model": {**_HALF_GPU, "seq_len": 256},
        "optim": _TEXT8_MUON,
        "train": {"batch_size": 256, "time_sampling": "low-noise", **_FAST},
        "budget": {"steps": 40_000},
    },
    "english": {
        "data": {"tokenizer": "gpt2"},
        "model": {**_HALF_GPU, "seq_len": 1024, "embedding_norm": True},
        "optim": _MUON,
        "train": {"batch_size": 64, "loss_weighting": 0.5, **_FAST},
        "objective": "lambda-dce",
        "budget": {"steps": 40_000},
    },
    "dna": _records(batch_size=64, steps=10_000),
    "molecules": _records(batch_size=128, steps=20_000),
    "small": _published(768, 12, 12, grad_accumulation=8),
    "medium": _published(1024, 24, 16, grad_accumulation=16),
}
