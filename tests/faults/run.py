"""Try every fault on real processes and print one table: fault, tried, survived, lost.

    python tests/faults/run.py                     the long form, two faults at a time
    python tests/faults/run.py --only killed       those with this in their name
    python tests/faults/run.py --times 1           each as often as this (with each command or file)

The exit code is 1 if anything was lost. Moments are random, by --seed; it is printed.
"""

import argparse
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Place
from trials import FAULTS


class Row(NamedTuple):
    """A line of the table."""

    fault: str
    tried: int
    lost: list[str]
    seconds: float

    def __str__(self) -> str:
        lost = len(self.lost)
        return f"{self.fault:34s} {self.tried:6d} {self.tried - lost:9d} {lost:6d} {self.seconds:8.0f} s"


def try_fault(name: str, place: Place, seed: int, times: int | None = None) -> Row:
    """Try one fault as often as its table says, or ``times``."""
    fault, usual = FAULTS[name]
    start, tried, lost = time.monotonic(), 0, list[str]()
    place.random.seed(f"{seed} {name}")
    try:
        for problem in fault(place, usual if times is None else times):
            tried += 1
            lost += [problem] if problem else []
    except Exception:
        lost.append(f"the trial itself failed: {traceback.format_exc()}")
        tried += 1
    return Row(name, tried, lost, time.monotonic() - start)


def main() -> int:
    """Try the faults and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the faults to try")
    parser.add_argument("--times", type=int, help="how often; by default what the table of faults says")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    names = [name for name in FAULTS if arguments.only in name]
    if not names:
        parser.error(f"no fault has {arguments.only!r} in its name")
    print(f"seed {arguments.seed}\n{'fault':34s} {'tried':>6s} {'survived':>9s} {'lost':>6s}", flush=True)
    free = Queue[Place]()

    def try_somewhere(name: str) -> Row:
        place = free.get()
        try:
            return try_fault(name, place, arguments.seed, arguments.times)
        finally:
            free.put(place)

    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(arguments.workers) as pool:
        places = [Place(Path(folder) / str(number)) for number in range(arguments.workers)]
        for place in places:
            free.put(place)
        rows = []
        for row in pool.map(try_somewhere, names):
            rows.append(row)
            print(row, flush=True)
        for place in places:
            place.close()
    for row in rows:
        for reason in sorted(set(row.lost)):
            print(f"{row.fault}: {row.lost.count(reason)} × {reason}")
    print(
        Row(
            "all",
            sum(row.tried for row in rows),
            [x for row in rows for x in row.lost],
            sum(row.seconds for row in rows),
        )
    )
    return 1 if any(row.lost for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
