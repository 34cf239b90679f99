"""What a user's minutes buy: runs on text8p through the command line, beside the reference, and the table of them.

python benchmarks/text8p.py TEXT8 --out FOLDER                      everything: about 32 minutes on one GPU
python benchmarks/text8p.py TEXT8 --out FOLDER --only absorbing,uniform,speed
python benchmarks/text8p.py TEXT8 --out FOLDER --only long --stop-after 590    again and again, until it has finished
python benchmarks/text8p.py TEXT8 --out FOLDER --seconds 5 --draws 2 --set model.width=64      on a CPU
python benchmarks/text8p.py --table FOLDER/results.json

TEXT8 is the first 74M characters of text8, or all of it. text8p: the first 64M are for training, the next 5M for
validation, the next 5M for the test, in windows of 256 that do not overlap. Every run is `sedd train` with a
recipe and so many seconds of training by the wall clock, and then `sedd eval --protocol text8p`: the strict bound.
"""

import argparse
import datetime
import json
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import describe_machine

from sedd.data import text_file

TRAIN_CHARACTERS, VALIDATION_CHARACTERS = 64_000_000, 5_000_000
LARGER = [
    *("--batch-size", "512", "--set", "model.width=768", "--set", "model.heads=6", "--set", "optim.lr=2.5e-3"),
    *("--set", "train.save_every=5000"),
]
"""For five times the seconds: more than twice the weights, trained on larger batches at a lower rate."""
RUNS: dict[str, tuple[list[str], float, float | None, float]] = {
    "absorbing": (["--recipe", "text8"], 230, 2.2005, 1.75),
    "uniform": (["--recipe", "text8-uniform"], 230, 2.3856, 1.95),
    "long": (["--recipe", "text8", *LARGER], 1200, None, 1.55),
}
"""Options of ``sedd train``, seconds of training, bits per character of the reference after as long, and the goal."""
SPEED: dict[str, list[str]] = {
    f"{name}, {optimizer}": [*options, "--set", f"optim.name={optimizer}"]
    for name, options in {
        "8 × 768, 27 tokens": ["--recipe", "text8", "--set", "model.width=768", "--set", "model.depth=8"],
        "12 × 768, 27 tokens": ["--recipe", "text8", "--set", "model.width=768", "--set", "model.depth=12"],
        "12 × 768, 50,257 tokens": ["--recipe", "small"],
    }.items()
    for optimizer in ("adamw", "muon")
}


def run_command(*words: object, program: str = "-msedd", stop_after: float | None = None) -> tuple[int, str, float]:
    """Run ``sedd`` or a script, stopped after ``stop_after`` seconds; return its exit code, output and seconds."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, program, *map(str, words)], stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=stop_after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
    return process.returncode, output, time.perf_counter() - start


def measure_run(name: str, args: argparse.Namespace, data: Path) -> dict[str, Any] | None:
    """Train and evaluate; None if it was stopped and can be continued. Wall time is summed over the parts."""
    options, seconds, reference, goal = RUNS[name]
    seconds, folder = args.seconds or seconds, args.out / name
    share = VALIDATION_CHARACTERS / (TRAIN_CHARACTERS + VALIDATION_CHARACTERS)
    sets = [f"data.val_fraction={share}", f"train.precision={args.precision}", *args.set]
    words: list[object] = ["train", data, *options, "--minutes", seconds / 60, "--out", folder]
    words += [word for assignment in sets for word in ("--set", assignment)]
    words += ["--resume"] if (folder / "checkpoints").is_dir() else []
    code, output, wall = run_command(*words, "--json", stop_after=args.stop_after)
    parts = args.out / f"{name}-parts.json"
    seconds_of_parts = [*(json.loads(parts.read_text()) if parts.exists() else []), round(wall, 1)]
    parts.write_text(json.dumps(seconds_of_parts))
    if code == 128 + signal.SIGTERM:
        return None
    if code:
        raise SystemExit(f"sedd train ended with code {code}")
    evaluation = ["eval", folder, args.text8, "--protocol", "text8p", "--draws", args.draws, "--json"]
    code, evaluated, eval_wall = run_command(*evaluation)
    if code:
        raise SystemExit(f"sedd eval ended with code {code}")
    return {
        "command": shell(words),
        "date": datetime.date.today().isoformat(),
        "seconds": seconds,
        "wall_seconds": sum(seconds_of_parts),
        "parts": seconds_of_parts,
        "training": json.loads(output),
        "config": json.loads((folder / "config.json").read_text()),
        "eval_command": shell(evaluation),
        "eval_wall_seconds": round(eval_wall, 1),
        "evaluation": json.loads(evaluated),
        "reference": reference,
        "goal": goal,
    }


def measure_speed(name: str, args: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Measure tokens per second of ``sedd train`` and of ``benchmarks/train.py`` with the same settings."""
    is_text8 = "text8" in SPEED[name]
    batch, vocab = ("256", "27") if is_text8 else ("64", "50257")
    common = [*SPEED[name], "--objective", args.objective]
    bench = [*common, "--batch", batch, "--vocab", vocab, "--precision", args.precision, "--json"]
    folder = args.out / f"speed-{name.replace(' ', '').replace(',', '-')}"
    shutil.rmtree(folder, ignore_errors=True)
    source = [data] if is_text8 else [random_tokens(args.out), "--tokenizer", "ints"]
    sets = [f"train.precision={args.precision}", "train.grad_accumulation=1", "train.eval_every=0"]
    words = ["train", *source, *common, "--batch-size", batch, "--steps", args.speed_steps, "--out", folder]
    words += [word for assignment in sets for word in ("--set", assignment)]
    outputs = []
    for program, command in ((str(Path(__file__).with_name("train.py")), bench), ("-msedd", [*words, "--json"])):
        code, output, wall = run_command(*command, program=program)
        if code:
            raise SystemExit(f"{program} {shlex.join(map(str, command))} ended with code {code}")
        outputs.append(output)
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    rates = [record["tokens_per_second"] for record in records if "tokens_per_second" in record][3:]
    fused = json.loads(outputs[0])["rows"][0]["tokens_per_second"]
    return {
        "bench_command": shlex.join(["python", "benchmarks/train.py", *bench]),
        "command": shell(words),
        "bench": fused,
        "train": statistics.median(rates),
        "ratio": statistics.median(rates) / fused,
        "wall_seconds": round(wall, 1),
    }


def random_tokens(folder: Path) -> Path:
    """Write random tokens of a vocabulary of 50,257."""
    import numpy as np

    path = folder / "tokens.npy"
    if not path.exists():
        tokens = np.random.default_rng(0).integers(0, 50_257, 20_000_000)
        tokens[0] = 50_256  # so that the vocabulary is complete
        np.save(path, tokens)
    return path


def training_text(text8: Path, folder: Path) -> Path:
    """Write the characters to train and validate on, once."""
    path = folder / "train.txt"
    if not path.exists():
        with text8.open("rb") as raw, text_file.open_decompressed(text8, raw) as file:
            path.write_bytes(file.read(TRAIN_CHARACTERS + VALIDATION_CHARACTERS))
    return path


def shell(words: list[Any]) -> str:
    """Return a command of ``sedd`` as it is typed, without the folders of files."""
    return shlex.join(["sedd", *(Path(w).name if isinstance(w, Path) else str(w) for w in words)])


def print_table(record: dict[str, Any]) -> None:
    """Print the results beside the reference and the goals."""
    for name, run in record.get("runs", {}).items():
        bits = run["evaluation"]["bits_per_char"]
        error = run["evaluation"]["stderr_nats_per_token"] * bits / run["evaluation"]["nats_per_token"]
        training = run["training"]
        print(
            f"{name:12s} {run['seconds']:6.0f} s: {bits:.4f} ± {error:.4f} bits/char (reference {run['reference']}, "
            f"goal {run['goal']}), {training['tokens'] / 1e6:.0f}M characters in {training['seconds']:.1f} s, "
            f"{run['wall_seconds']:.0f} s in all; evaluation {run['eval_wall_seconds']:.0f} s in "
            f"{run['evaluation']['precision']}"
        )
    for name, row in record.get("speed", {}).items():
        print(f"{name:32s} {row['train']:12,.0f} tokens/s, {row['ratio']:.3f} of the benchmark's {row['bench']:12,.0f}")


def main() -> None:
    """Run everything in ``--only``, store each result at once, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text8", type=Path, help="text8, also compressed; with --table, a file of results")
    parser.add_argument("--table", action="store_true", help="print the table of earlier results")
    parser.add_argument("--out", type=Path, help="folder of the runs and of results.json")
    parser.add_argument("--only", help="absorbing, uniform, long, speed, with commas between them")
    parser.add_argument("--seconds", type=float, help="seconds of training, instead of those of each run")
    parser.add_argument(
        "--stop-after", type=float, help="stop training after so many seconds; start it again to resume"
    )
    parser.add_argument("--draws", type=int, default=8, help="draws per sequence of the evaluation")
    parser.add_argument("--objective", default="lambda-dce", help="objective of the rows of speed")
    parser.add_argument("--precision", default="bfloat16", help="precision of training: float8 on an H100 or newer")
    parser.add_argument("--rows", help=f"rows of speed, with ; between them: {'; '.join(SPEED)}")
    parser.add_argument("--speed-steps", type=int, default=150, help="steps of the rows of speed")
    parser.add_argument("--set", action="append", default=[], help="configuration of all runs but the rows of speed")
    args = parser.parse_args()
    if args.table:
        print_table(json.loads(args.text8.read_text()))
        return
    if args.out is None:
        parser.error("--out is needed")
    rows = [row.strip() for row in args.rows.split(";")] if args.rows else list(SPEED)
    if unknown := [row for row in rows if row not in SPEED]:
        parser.error(f"rows is {args.rows}; choose from {'; '.join(SPEED)}, not {'; '.join(unknown)}")
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "results.json"
    record: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    record["machine"] = describe_machine()._asdict()
    data = training_text(args.text8, args.out)
    only = args.only.split(",") if args.only else [*RUNS, "speed"]
    for name in only:
        if name == "speed":
            for row in rows:
                record.setdefault("speed", {})[row] = measure_speed(row, args, data)
                results.write_text(json.dumps(record, indent=1) + "\n")
        elif (measured := measure_run(name, args, data)) is None:
            print(f"{name} was stopped; start this again to continue it", file=sys.stderr)
        else:
            record.setdefault("runs", {})[name] = measured
        results.write_text(json.dumps(record, indent=1) + "\n")
    print_table(record)


if __name__ == "__main__":
    main()
