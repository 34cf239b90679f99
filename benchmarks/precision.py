"""What precision costs in quality: the same network on the same batches, trained in each, and its held-out bound.

python benchmarks/precision.py FILE                            on a GPU: 12 × 768, 400 steps of 512 × 256 characters
python benchmarks/precision.py FILE --recipe tiny --steps 9    anywhere, in seconds
python benchmarks/precision.py FILE --json FILE                and a record, after every run

All runs see the same batches and the same noise, in training and when they are evaluated, so differences are smaller
than their errors. The last run is one again: on a GPU, how far apart runs are that differ in nothing.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sedd import training
from sedd.bench import place
from sedd.transformer import ReferenceBlock

HALF = "bfloat16, stream too"
WAYS = ("bfloat16", HALF, "float8", "bfloat16, again")


@contextmanager
def stream(half: bool) -> Iterator[None]:
    """A stream in bfloat16, as float8 has it, if asked."""
    forward = ReferenceBlock.forward
    if half:
        ReferenceBlock.forward = lambda self, x, *rest: forward(self, x.bfloat16(), *rest)  # type: ignore[method-assign]
    try:
        yield
    finally:
        ReferenceBlock.forward = forward  # type: ignore[method-assign]


def trained(way: str, file: str, recipe: str, steps: int, sequences: int) -> dict[str, Any]:
    """The held-out bound at the end and the loss of the last quarter, in bits a character, and the seconds."""
    quiet = {"log_every": 1, "eval_every": 0, "sample_every": 0, "save_every": 0, "eval_sequences": sequences}
    words = {
        "sources": [file],
        "steps": steps,
        "model": {"style": "reference"},
        "optim": {"warmup": steps // 10, "decay": "cosine"},
        "loop": {"precision": way.split(",")[0], **quiet},
    }
    config = training.configured(words, recipe=recipe)
    losses: list[float] = []

    def hear(kind: str, record: dict[str, Any]) -> None:
        if "bits_per_char" in record and record["step"] > 3 * steps // 4:
            losses.append(record["bits_per_char"])

    with stream(way == HALF), tempfile.TemporaryDirectory() as folder:
        end = training.run(config, lambda: training.prepared(config), Path(folder), False, hear)
    last = {"loss_bits_per_char": sum(losses) / len(losses), "losses": len(losses)}
    return {"way": way, **end.bound, **last, "seconds": end.progress.seconds, "skipped": end.progress.skipped}


def main() -> None:
    """Train in every way and print the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a text")
    parser.add_argument("--recipe", default="text8", help="what differs from the defaults of a run")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sequences", type=int, default=4096, help="of held-out text")
    parser.add_argument("--json", type=Path, help="write a record to this file")
    given = parser.parse_args()
    rows = []
    for way in WAYS:
        rows.append(trained(way, given.file, given.recipe, given.steps, given.sequences))
        bound, loss, seconds = (rows[-1][key] for key in ("bound_bits_per_char", "loss_bits_per_char", "seconds"))
        print(f"{way:30s} held out {bound:.4f}, last quarter {loss:.4f} bits/char, {seconds:.0f} s", flush=True)
        record = {"command": " ".join(sys.argv), "device": place(None).device, "rows": rows}
        if given.json:
            given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
