"""Recipes: named configurations, as differences from the defaults of `config`."""

from typing import Any

_MUON = {
    "name": "muon",
    "lr": 4e-3,
    "warmup_steps": 50,
    "lr_schedule": "linear",
    "final_lr_fraction": 0.0,
    "ema_decay": 0.99,
}
_TEXT8_MUON = {**_MUON, "decay_fraction": 0.5, "weight_decay": 0.1}
"""What won in runs of 230 seconds on characters; with GPT-2's tokens it was not measured."""
RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model": {"width": 128, "depth": 4, "heads": 4, "seq_len": 128},
        "optim": {"lr": 2e-3, "ema_decay": 0.99},
        "train": {"batch_size": 32},
        "budget": {"steps": 1000},
    },
    "text8": {
        "data": {"tokenizer": "chars"},
        "model": {"width": 512, "depth": 8, "heads": 4, "seq_len": 256, "ngrams": 3, "embedding_norm": True},
        "optim": _TEXT8_MUON,
        "train": {"batch_size": 256, "precision": "bfloat16", "loss_weighting": 0.5, "save_every": 2000},
        "objective": "lambda-dce",
        "budget": {"steps": 40_000},
    },
    "text8-uniform": {
        "data": {"tokenizer": "chars"},
        "noise": {"process": "uniform"},
        "model": {"width": 512, "depth": 8, "heads": 4, "seq_len": 256},
        "optim": _TEXT8_MUON,
        "train": {"batch_size": 256, "precision": "bfloat16", "time_sampling": "low-noise", "save_every": 2000},
        "budget": {"steps": 40_000},
    },
    "english": {
        "data": {"tokenizer": "gpt2"},
        "model": {"width": 512, "depth": 8, "heads": 4, "seq_len": 1024, "embedding_norm": True},
        "optim": _MUON,
        "train": {"batch_size": 64, "precision": "bfloat16", "loss_weighting": 0.5, "save_every": 2000},
        "objective": "lambda-dce",
        "budget": {"steps": 40_000},
    },
    "dna": {
        "data": {"tokenizer": "chars", "packing": "lines"},
        "model": {"width": 256, "depth": 6, "heads": 8},  # of records, the length is that of the longest
        "optim": {"lr": 1e-3, "warmup_steps": 200, "ema_decay": 0.999},
        "train": {"batch_size": 64},
        "objective": "lambda-dce",
        "budget": {"steps": 10_000},
    },
    "molecules": {
        "data": {"tokenizer": "chars", "packing": "lines"},
        "model": {"width": 256, "depth": 6, "heads": 8},
        "optim": {"lr": 1e-3, "warmup_steps": 200, "ema_decay": 0.999},
        "train": {"batch_size": 128},
        "objective": "lambda-dce",
        "budget": {"steps": 20_000},
    },
    "small": {
        "data": {"tokenizer": "gpt2"},
        "model": {"architecture": "reference", "width": 768, "depth": 12, "heads": 12, "seq_len": 1024, "dropout": 0.1},
        "optim": {"lr": 3e-4, "beta2": 0.999, "warmup_steps": 2500, "lr_schedule": "constant", "ema_decay": 0.9999},
        "train": {"batch_size": 512, "grad_accumulation": 8, "precision": "bfloat16", "save_every": 5000},
        "budget": {"steps": 400_000},
    },
    "medium": {
        "data": {"tokenizer": "gpt2"},
        "model": {
            "architecture": "reference",
            "width": 1024,
            "depth": 24,
            "heads": 16,
            "seq_len": 1024,
            "dropout": 0.1,
        },
        "optim": {"lr": 3e-4, "beta2": 0.999, "warmup_steps": 2500, "lr_schedule": "constant", "ema_decay": 0.9999},
        "train": {"batch_size": 512, "grad_accumulation": 16, "precision": "bfloat16", "save_every": 5000},
        "budget": {"steps": 400_000},
    },
}
