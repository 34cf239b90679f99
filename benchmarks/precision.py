"""The loss of quality by low precision: the validation bound of one network trained in several precisions.

python benchmarks/precision.py FILE                              on a GPU: 12 × 768, 400 steps of 128 × 256 characters
python benchmarks/precision.py FILE --recipe tiny --steps 9 --batch 8    anywhere, in seconds
python benchmarks/precision.py FILE --seeds 5 --json FILE        five runs of each, and a record after every run

Runs with one seed have the same initial weights, batches and noise, in training and in validation, so the difference
of two has a smaller error than either. The mean difference over seeds is given with its standard error.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import choose_device

from sedd.nn.transformer import Block
from sedd.training import loop
from sedd.training.datasets import prepare_data
from sedd.training.overrides import merge_config

HALF_STREAM = "bfloat16, stream too"
PRECISIONS = ("bfloat16", HALF_STREAM, "float8")
METRICS = ("bound_bits_per_char", "loss_bits_per_char")


@contextmanager
def residual_stream(half: bool) -> Iterator[None]:
    """Keep the residual stream in bfloat16, as float8 does, if ``half``."""
    forward = Block.forward
    if half:
        Block.forward = lambda self, x, *rest: forward(self, x.bfloat16(), *rest)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Block.forward = forward  # type: ignore[method-assign]


def train(precision: str, seed: int, file: str, recipe: str, steps: int, batch: int, sequences: int) -> dict[str, Any]:
    """Train once; return the validation bound and the loss of the last quarter in bits per character, and the time."""
    quiet = {"log_every": 1, "eval_every": 0, "sample_every": 0, "save_every": 0, "eval_sequences": sequences}
    options = {
        "sources": [file],
        "steps": steps,
        "seed": seed,
        "model": {"architecture": "reference"},
        "optim": {"warmup_steps": steps // 10, "lr_schedule": "cosine"},
        "train": {"precision": precision.split(",")[0], "batch_size": batch, **quiet},
    }
    config = merge_config(options, recipe=recipe)
    losses: list[float] = []

    def on_event(kind: str, record: dict[str, Any]) -> None:
        if "bits_per_char" in record and record["step"] > 3 * steps // 4:
            losses.append(record["bits_per_char"])

    with residual_stream(precision == HALF_STREAM), tempfile.TemporaryDirectory() as folder:
        end = loop.run(config, lambda: prepare_data(config), Path(folder), False, on_event)
    last = {"loss_bits_per_char": sum(losses) / len(losses), "losses": len(losses)}
    return {
        "precision": precision,
        "seed": seed,
        **end.validation,
        **last,
        "seconds": end.state.seconds,
        "skipped": end.state.skipped,
    }


def main() -> None:
    """Train in every precision and print the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="text file to train on")
    parser.add_argument("--recipe", default="text8", help="named configuration")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3, help="runs per precision")
    parser.add_argument("--sequences", type=int, default=4096, help="validation sequences")
    parser.add_argument("--json", type=Path, help="write a record to this file")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed, precision in itertools.product(range(args.seeds), PRECISIONS):
        rows.append(train(precision, seed, args.file, args.recipe, args.steps, args.batch, args.sequences))
        bound, loss, seconds = (rows[-1][key] for key in (*METRICS, "seconds"))
        print(
            f"{seed} {precision:22s} validation {bound:.4f}, last quarter {loss:.4f} bits/char, {seconds:.0f} s",
            flush=True,
        )
        record = {
            "command": " ".join(sys.argv),
            "device": choose_device(),
            "differences": differences(rows),
            "rows": rows,
        }
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    for difference in differences(rows):
        error = "" if difference["error"] is None else f" ± {difference['error']:.4f}"
        print("{precision} − bfloat16, {metric}: {mean:+.4f}{plus} over {seeds} seeds".format(**difference, plus=error))


def differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean difference of each precision from bfloat16 over seeds, with its standard error."""
    found = []
    for precision, metric in itertools.product(PRECISIONS[1:], METRICS):
        values, baseline = (
            {row["seed"]: row[metric] for row in rows if row["precision"] == name}
            for name in (precision, PRECISIONS[0])
        )
        deltas = [values[seed] - baseline[seed] for seed in values]
        if deltas:
            error = statistics.stdev(deltas) / len(deltas) ** 0.5 if len(deltas) > 1 else None
            names = {"precision": precision, "metric": metric, "seeds": len(deltas)}
            found.append({**names, "mean": statistics.mean(deltas), "error": error})
    return found


if __name__ == "__main__":
    main()
