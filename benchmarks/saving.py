"""What checkpoints cost a run: the time in which training waits for them, and in which they slow it down.

python benchmarks/saving.py TEXT8 --out FOLDER                       two runs: about two minutes on one GPU
python benchmarks/saving.py TEXT8 --out FOLDER --only text8 --seconds 20 --set model.width=64      on a CPU
python benchmarks/saving.py --table FOLDER/saving.json

`text8` is a run as users make it, by the recipe's own interval of checkpoints. `small` has 170 million parameters and
AdamW's moments, and is saved far more often than the recipe does; the table states what one checkpoint costs and what
share that is at the recipe's interval. On a GPU the files are written by a thread while training goes on: waiting is
the log's ``save_seconds``, and slowing is the seconds of training beyond those at the median rate, in the records from
a checkpoint until its files are there.
"""

import argparse
import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import describe_machine
from text8p import random_tokens, run_command, shell, training_text

from sedd.training.recipes import RECIPES

SMALL_EVERY = 60
"""Steps between checkpoints of the run `small`."""
SMALL = ["--recipe", "small", "--batch-size", "64", "--steps", "180", "--set", "train.grad_accumulation=1"]
SMALL += ["--set", f"train.save_every={SMALL_EVERY}", "--set", "train.eval_every=0", "--set", "train.log_every=5"]


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train with checkpoints, and return what they cost."""
    folder = args.out / name
    if name == "text8":
        words = ["train", training_text(args.text8, args.out), "--recipe", "text8", "--minutes", args.seconds / 60]
    else:
        words = ["train", random_tokens(args.out), "--tokenizer", "ints", *SMALL]
    words += [word for assignment in args.set for word in ("--set", assignment)]
    code, output, wall = run_command(*words, "--out", folder, "--json")
    if code:
        raise SystemExit(f"sedd train ended with code {code}")
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    config = json.loads((folder / "config.json").read_text())
    saved = sorted(folder.glob("checkpoints/step-*"))[-1]
    return {
        "command": shell(words),
        "date": datetime.date.today().isoformat(),
        "commit": args.machine["commit"],
        "wall_seconds": round(wall, 1),
        "training": json.loads(output) | {"run": name},
        "checkpoint_bytes": sum(file.stat().st_size for file in saved.iterdir()),
        "save_every": config["train"]["save_every"],
        **cost_of_saving(records),
    }


def cost_of_saving(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how often a run was saved, and the seconds in which it waited and was slowed, from its log.

    A record whose ``save_seconds`` are more than the one's before it follows a checkpoint; writing one slows what is
    between it and the next record with the median rate.
    """
    logged = [record for record in records if "tokens_per_second" in record]
    logged = logged[len(logged) // 10 :]  # without the compilation of kernels
    tokens, seconds, saving = (np.array([r[key] for r in logged]) for key in ("tokens", "seconds", "save_seconds"))
    spent, usual = np.diff(seconds), statistics.median(np.diff(seconds) / np.diff(tokens))
    excess = spent - usual * np.diff(tokens)
    spread = statistics.median(np.abs(excess))
    after, slowed = False, 0.0
    for late, saved in zip(excess, np.diff(saving) > 0, strict=True):
        after = bool(saved) or (after and late > 3 * spread)
        slowed += float(late) if after else 0.0
    return {
        "checkpoints": int((np.diff(saving) > 0).sum()),
        "measured_seconds": float(seconds[-1] - seconds[0]),
        "waited_seconds": float(saving[-1] - saving[0]),
        "slowed_seconds": max(0.0, slowed),
        "seconds_per_step": float(usual * (tokens[-1] - tokens[0]) / (logged[-1]["step"] - logged[0]["step"])),
    }


def print_table(record: Mapping[str, Any]) -> None:
    """Print the cost of one checkpoint, and of all at the interval of the recipe."""
    for name, run in record["runs"].items():
        training, cost = run["training"], run["waited_seconds"] + run["slowed_seconds"]
        each, every = cost / max(1, run["checkpoints"]), RECIPES[name]["train"]["save_every"]
        total = training["seconds"] + training["eval_seconds"] + training["save_seconds"]
        print(
            f"{name}: {run['checkpoints']} checkpoints of {run['checkpoint_bytes'] / 1e9:.2f} GB during "
            f"{run['measured_seconds']:.1f} s of training: {run['waited_seconds']:.2f} s waited, "
            f"{run['slowed_seconds']:.2f} s slowed, {each:.2f} s each. Saved every {every} steps, the recipe's "
            f"interval, that is {each / (each + every * run['seconds_per_step']):.2%} of the time. With the last one, "
            f"for which a run waits: {(training['save_seconds'] + run['slowed_seconds']) / total:.2%} of {total:.1f} s"
        )


def main() -> None:
    """Measure what is in ``--only``, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text8", type=Path, help="text8, also compressed; with --table, a file of results")
    parser.add_argument("--table", action="store_true", help="print the table of earlier results")
    parser.add_argument("--out", type=Path, help="folder of the runs and of saving.json")
    parser.add_argument("--only", default="text8,small", help="text8, small, with a comma between them")
    parser.add_argument("--seconds", type=float, default=75, help="seconds of training of the run text8")
    parser.add_argument("--set", action="append", default=[], help="configuration of the runs")
    args = parser.parse_args()
    if args.table:
        print_table(json.loads(args.text8.read_text()))
        return
    if args.out is None:
        parser.error("--out is needed")
    args.out.mkdir(parents=True, exist_ok=True)
    args.machine = describe_machine()._asdict()
    results = args.out / "saving.json"
    record: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {"runs": {}}
    for name in args.only.split(","):
        record["machine"], record["runs"][name] = args.machine, measure(name, args)
        results.write_text(json.dumps(record, indent=1) + "\n")
    print_table(record)


if __name__ == "__main__":
    main()
