"""Seconds from typing a command to its first line and to its end, beside those of `import torch` alone.

python benchmarks/startup.py TEXT --json startup.json

TEXT is any text, also compressed. Every command is started twice; the second finds its files in the memory of the
operating system. The commands that sample and score are then run to their end, with eight steps or draws.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import describe_machine

COMMANDS = {
    "sample": ["sample", "stories", "-n", "1", "--steps", "8"],
    "infill": ["infill", "stories", "Tom had {5} dog.", "--steps", "8"],
    "score": ["score", "stories", "Tom found a red ball in the park.", "--draws", "8"],
    "eval": ["eval", "stories", "TEXT", "--draws", "2"],
    "train": ["train", "TEXT", "--recipe", "text8", "--steps", "1", "--out", "RUN"],
    "info": ["info", "stories"],
}
RUN_TO_THE_END = ("sample", "infill", "score", "info")


def seconds_to_first_line(words: list[str]) -> tuple[float, str]:
    """Start a command, return the seconds until its first line on either stream and that line, and stop it."""
    start = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    elapsed = time.perf_counter() - start
    process.kill()
    process.communicate()
    return elapsed, line.strip()


def seconds_of(words: list[str]) -> float:
    """Run a command to its end and return its seconds."""
    start = time.perf_counter()
    subprocess.run(words, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure all commands and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    torch_only = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    rows = {"import torch": [seconds_to_first_line(torch_only)[0] for _ in range(2)]}
    lines = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, words in COMMANDS.items():
            words = [{"TEXT": str(args.text), "RUN": f"{folder}/run"}.get(word, word) for word in words]
            found = [seconds_to_first_line([sys.executable, "-m", "sedd", *words]) for _ in range(2)]
            rows[f"sedd {name}"], lines[name] = [seconds for seconds, _ in found], found[-1][1]
    whole = {f"sedd {name}": seconds_of([sys.executable, "-m", "sedd", *COMMANDS[name]]) for name in RUN_TO_THE_END}
    for name, seconds in whole.items():
        print(f"{name:14s} {seconds:6.2f} s to its end")
    for name, both in rows.items():
        print(f"{name:14s} {both[0]:6.2f} {both[1]:6.2f} s   {lines.get(name.removeprefix('sedd '), '')[:90]}")
    if args.json:
        machine = describe_machine()._asdict()
        record = {"machine": machine, "date": datetime.date.today().isoformat(), "seconds_to_first_line": rows}
        record["seconds_to_the_end"] = whole
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
