"""Bits per character of short runs by the size of the network and the characters of training, for `training.sizing`.

python benchmarks/scaling.py --out benchmarks/results/scaling.jsonl text8.txt shakespeare.txt …

Every run is one that `sedd train` makes without a recipe on a CPU (`training.sizing`), but for its size and number of
steps. The budget is in steps, so that the results do not depend on the speed of the machine. One JSON record per run;
those with a `source` are earlier runs, from the log and from ablations on a GPU.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sedd.data import Index
from sedd.runtime import run_log
from sedd.training import loop
from sedd.training.datasets import prepare_data
from sedd.training.overrides import merge_config

RUNS = ((64, 2, 250), (64, 2, 1000), (64, 2, 4000), (128, 2, 500), (128, 2, 1500))
"""Width, depth and steps, in characters for an alphabet of at most 32, else in bytes."""
BPE_RUNS = ((64, 2, 500), (64, 2, 1000), (128, 2, 500))
"""The same for byte-pair encoding, if the alphabet is larger."""


def settings(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs on a text."""
    is_small = len(set(file.read_text()[:100_000])) <= 32
    for tokenizer, runs in {"chars": RUNS}.items() if is_small else {"bytes": RUNS, "bpe:1024": BPE_RUNS}.items():
        for width, depth, steps in runs:
            yield {"tokenizer": tokenizer, "width": width, "depth": depth, "steps": steps}


def measure(file: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """Train one run and return its record."""
    width, depth = setting["width"], setting["depth"]
    config = merge_config(
        {"sources": [str(file)], "tokenizer": setting["tokenizer"], "steps": setting["steps"]},
        sets=[
            *(f"model.width={width}", f"model.depth={depth}", "model.heads=2", "model.seq_len=64"),
            *("optim.name=muon", f"optim.lr={1e-2 if width <= 128 else 5e-3}", "optim.warmup_steps=50"),
            *("optim.lr_schedule=linear", "optim.final_lr_fraction=0", "optim.ema_decay=0.99"),
            *("train.batch_size=16", "train.eval_every=0", "train.eval_sequences=1024", "train.save_every=0"),
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        shards = prepare_data(config)
        end = loop.run(config, lambda: shards, Path(folder) / "run", False, lambda kind, record: None)
    if end.signal is not None:
        raise SystemExit("stopped by a signal; call it again for the runs that are missing")
    index = Index.read(shards)
    return {
        "corpus": file.name,
        **setting,
        "weights": 12 * depth * width**2,
        "tokens": end.state.tokens,
        "characters": round(end.state.tokens * index.characters / index.tokens),
        "passes": round(end.state.tokens / index.tokens, 3),
        "bits": round(end.validation["bound_bits_per_char"], 4),
        "stderr": round(
            end.validation["bound_stderr"] / end.validation["bound"] * end.validation["bound_bits_per_char"], 4
        ),
        "seconds": round(end.state.seconds, 1),
    }


def main() -> None:
    """Measure all runs that the results do not have yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    done = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    if not done:
        head = {"command": " ".join(sys.argv), "environment": run_log.environment()}
        arguments.out.write_text(json.dumps(head) + "\n")
    for file in arguments.files:
        for setting in settings(file):
            if not any({"corpus": file.name, **setting}.items() <= record.items() for record in done):
                record = measure(file, setting)
                print(json.dumps(record), file=sys.stderr)
                with arguments.out.open("a") as out:
                    out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
