"""Named runs: what differs from the defaults of `config`."""

from typing import Any

RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model": {"width": 128, "depth": 4, "heads": 4, "length": 128},
        "optim": {"lr": 2e-3, "ema": 0.99},
        "loop": {"batch": 32},
        "budget": {"steps": 1000},
    },
    "text8": {
        "data": {"tokenizer": "chars"},
        "model": {"width": 768, "depth": 12, "heads": 12, "length": 256},
        "optim": {"lr": 6e-4, "warmup": 500, "ema": 0.9999},
        "loop": {"batch": 512, "precision": "bfloat16", "save_every": 2000},
        "budget": {"steps": 100_000},
    },
    "dna": {
        "data": {"tokenizer": "chars", "records": "lines"},
        "model": {"width": 256, "depth": 6, "heads": 8, "length": 200},
        "optim": {"lr": 1e-3, "warmup": 200, "ema": 0.999},
        "loop": {"batch": 64},
        "objective": "lambda-dce",
        "budget": {"steps": 10_000},
    },
    "molecules": {
        "data": {"tokenizer": "chars", "records": "lines", "pad": "model"},
        "model": {"width": 256, "depth": 6, "heads": 8, "length": 64},
        "optim": {"lr": 1e-3, "warmup": 200, "ema": 0.999},
        "loop": {"batch": 128},
        "objective": "lambda-dce",
        "budget": {"steps": 20_000},
    },
    "small": {
        "data": {"tokenizer": "gpt2"},
        "model": {"style": "reference", "width": 768, "depth": 12, "heads": 12, "length": 1024, "dropout": 0.1},
        "optim": {"lr": 3e-4, "beta2": 0.999, "warmup": 2500, "decay": "constant", "ema": 0.9999},
        "loop": {"batch": 512, "accumulate": 8, "precision": "bfloat16", "save_every": 5000},
        "budget": {"steps": 400_000},
    },
    "medium": {
        "data": {"tokenizer": "gpt2"},
        "model": {"style": "reference", "width": 1024, "depth": 24, "heads": 16, "length": 1024, "dropout": 0.1},
        "optim": {"lr": 3e-4, "beta2": 0.999, "warmup": 2500, "decay": "constant", "ema": 0.9999},
        "loop": {"batch": 512, "accumulate": 16, "precision": "bfloat16", "save_every": 5000},
        "budget": {"steps": 400_000},
    },
}
