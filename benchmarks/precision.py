"""What low precision costs in quality: the validation bound of one network trained in several precisions.

python benchmarks/precision.py FILE                              on a GPU: 12 × 768, 400 steps of 128 × 256 characters
python benchmarks/precision.py FILE --recipe tiny --steps 9 --batch 8    anywhere, in seconds
python benchmarks/precision.py FILE --seeds 5 --json FILE        five runs of each, and a record after every run

Runs with one seed see the same weights, batches and noise, in training and when they are evaluated, so the difference
of two is smaller than the error of either. Over seeds it has a mean, and an error of its own.
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

HALF = "bfloat16, stream too"
WAYS = ("bfloat16", HALF, "float8")
MEASURED = ("bound_bits_per_char", "loss_bits_per_char")


@contextmanager
def stream(half: bool) -> Iterator[None]:
    """A stream in bfloat16, as float8 has it, if asked."""
    forward = Block.forward
    if half:
        Block.forward = lambda self, x, *rest: forward(self, x.bfloat16(), *rest)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Block.forward = forward  # type: ignore[method-assign]


def trained(way: str, seed: int, file: str, recipe: str, steps: int, batch: int, sequences: int) -> dict[str, Any]:
    """The held-out bound at the end and the loss of the last quarter, in bits a character, and the seconds."""
    quiet = {"log_every": 1, "eval_every": 0, "sample_every": 0, "save_every": 0, "eval_sequences": sequences}
    words = {
        "sources": [file],
        "steps": steps,
        "seed": seed,
        "model": {"style": "reference"},
        "optim": {"warmup": steps // 10, "decay": "cosine"},
        "train": {"precision": way.split(",")[0], "batch_size": batch, **quiet},
    }
    config = training.merge_config(words, recipe=recipe)
    losses: list[float] = []

    def on_progress(kind: str, record: dict[str, Any]) -> None:
        if "bits_per_char" in record and record["step"] > 3 * steps // 4:
            losses.append(record["bits_per_char"])

    with stream(way == HALF), tempfile.TemporaryDirectory() as folder:
        end = training.run(config, lambda: training.prepare_data(config), Path(folder), False, on_progress)
    last = {"loss_bits_per_char": sum(losses) / len(losses), "losses": len(losses)}
    return {
        "way": way,
        "seed": seed,
        **end.validation,
        **last,
        "seconds": end.state.seconds,
        "skipped": end.state.skipped,
    }


def main() -> None:
    """Train in every way and print the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a text")
    parser.add_argument("--recipe", default="text8", help="what differs from the defaults of a run")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3, help="how many runs of each")
    parser.add_argument("--sequences", type=int, default=4096, help="of held-out text")
    parser.add_argument("--json", type=Path, help="write a record to this file")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed, way in itertools.product(range(given.seeds), WAYS):
        rows.append(trained(way, seed, given.file, given.recipe, given.steps, given.batch, given.sequences))
        bound, loss, seconds = (rows[-1][key] for key in (*MEASURED, "seconds"))
        print(f"{seed} {way:22s} held out {bound:.4f}, last quarter {loss:.4f} bits/char, {seconds:.0f} s", flush=True)
        record = {
            "command": " ".join(sys.argv),
            "device": device_defaults(None).device,
            "apart": apart(rows),
            "rows": rows,
        }
        if given.json:
            given.json.write_text(json.dumps(record, indent=1) + "\n")
    for difference in apart(rows):
        error = "" if difference["error"] is None else f" ± {difference['error']:.4f}"
        print("{way} − bfloat16, {of}: {mean:+.4f}{plus} over {seeds} seeds".format(**difference, plus=error))


def apart(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How far each way is from bfloat16 in the mean over seeds, and the error of that."""
    found = []
    for way, of in itertools.product(WAYS[1:], MEASURED):
        here, there = ({row["seed"]: row[of] for row in rows if row["way"] == name} for name in (way, WAYS[0]))
        each = [here[seed] - there[seed] for seed in here]
        if each:
            error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
            found.append({"way": way, "of": of, "mean": statistics.mean(each), "error": error, "seeds": len(each)})
    return found


if __name__ == "__main__":
    main()
