"""What low precision costs in quality: the validation bound of one network trained in several precisions.

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

from sedd import training
from sedd.bench import device_defaults
from sedd.nn.blocks import Block

HALF_STREAM = "bfloat16, stream too"
PRECISIONS = ("bfloat16", HALF_STREAM, "float8")
MEASURED = ("bound_bits_per_char", "loss_bits_per_char")


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
    config = training.merge_config(options, recipe=recipe)
    losses: list[float] = []

    def on_event(kind: str, record: dict[str, Any]) -> None:
        if "bits_per_char" in record and record["step"] > 3 * steps // 4:
            losses.append(record["bits_per_char"])

    with residual_stream(precision == HALF_STREAM), tempfile.TemporaryDirectory() as folder:
        end = training.run(config, lambda: training.prepare_data(config), Path(folder), False, on_event)
    last = {"loss_bits_per_char": sum(losses) / len(losses), "losses": len(losses)}
    return {
        "way": precision,
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
        bound, loss, seconds = (rows[-1][key] for key in (*MEASURED, "seconds"))
        print(
            f"{seed} {precision:22s} validation {bound:.4f}, last quarter {loss:.4f} bits/char, {seconds:.0f} s",
            flush=True,
        )
        record = {
            "command": " ".join(sys.argv),
            "device": device_defaults(None).device,
            "apart": differences(rows),
            "rows": rows,
        }
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    for difference in differences(rows):
        error = "" if difference["error"] is None else f" ± {difference['error']:.4f}"
        print("{way} − bfloat16, {of}: {mean:+.4f}{plus} over {seeds} seeds".format(**difference, plus=error))


def differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean difference of each precision from bfloat16 over seeds, with its standard error."""
    found = []
    for way, of in itertools.product(PRECISIONS[1:], MEASURED):
        here, there = ({row["seed"]: row[of] for row in rows if row["way"] == name} for name in (way, PRECISIONS[0]))
        each = [here[seed] - there[seed] for seed in here]
        if each:
            error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
            found.append({"way": way, "of": of, "mean": statistics.mean(each), "error": error, "seeds": len(each)})
    return found


if __name__ == "__main__":
    main()
