"""Helpers for tests of training runs."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

TIMING_FIELDS = ("seconds", "eval_seconds", "save_seconds", "tokens_per_second")
"""Fields of the log that depend on the machine; all others are a function of the configuration."""
Sedd = Callable[..., subprocess.CompletedProcess[str]]
SMALL = [
    *("--set", "model.width=32", "--set", "model.depth=2", "--set", "model.heads=2", "--set", "model.seq_len=32"),
    *("--set", "train.batch_size=8", "--set", "train.log_every=1", "--set", "train.eval_every=5"),
    *("--set", "train.eval_sequences=16", "--set", "optim.warmup_steps=3"),
]


def log(run: Path) -> list[dict[str, object]]:
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMING_FIELDS} for record in records]


def same(a: Path, b: Path, step: int) -> None:
    """Assert that weights, EMA, optimizer state and log of two runs are equal bit for bit."""
    for stem in ("model", "ema", "optimizer"):
        one, two = (load_file(run / "checkpoints" / f"step-{step:08d}" / f"{stem}.safetensors") for run in (a, b))
        assert one.keys() == two.keys()
        assert one
        for key in one:
            assert torch.equal(one[key], two[key]), f"{stem} {key}"
    assert log(a) == log(b)


def ok(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
