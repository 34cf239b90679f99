"""Preparing text on this machine: memory with a gigabyte of it, and speed beside the tokenizer's own.

.venv/bin/python benchmarks/data.py --text corpus.txt     a table; the corpus is repeated to a gigabyte
.venv/bin/python benchmarks/data.py --text corpus.txt --json     a record, as kept in benchmarks/results/

A tokenizer's own speed is `encode_batch` over the same pieces, already in memory, and nothing else. Speeds are
megabytes of text for each second of processor time, so that they mean the same on a busy machine; ``busy`` says how
many cores a measurement had.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from sedd import data
from sedd.tokenizer import load, named


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Seconds on the clock and of the processor, over all threads."""
    began, before = time.perf_counter(), time.process_time()
    work()
    wall, processor = time.perf_counter() - began, time.process_time() - before
    return {"seconds": wall, "processor_seconds": processor, "busy": processor / wall}


def own(text: Path, tokenizer: Path) -> dict[str, float]:
    """The tokenizer alone, each thread of a pool with a piece at a time, as `prepare` has it; over two seconds."""
    pieces, made = list(data.documents([text])), load(tokenizer)
    passes: list[dict[str, float]] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while sum(one["processor_seconds"] for one in passes) < 2:
            passes.append(measured(lambda: sum(pool.map(lambda piece: made.encode_batch([piece])[0].size, pieces))))
    return {name: sum(one[name] for one in passes) / len(passes) for name in passes[0]}


def prepared(text: Path, tokenizer: Path, out: Path) -> dict[str, float]:
    """All of it: read, encoded, hashed, written; and the most memory the process held."""
    found = measured(lambda: data.prepare([text], out, load(tokenizer)))
    return {**found, "peak_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def alone(work: Callable[..., dict[str, float]], *given: Path) -> dict[str, float]:
    """In a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


@contextmanager
def corpus(text: Path, megabytes: int) -> Iterator[Path]:
    """``text`` again and again, in a folder that goes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.txt"
        content = text.read_bytes()
        with path.open("wb") as file:
            while file.tell() < megabytes * 1e6:
                file.write(content)
        yield path


def compare(spec: str, text: Path, large: Path) -> dict[str, float]:
    """One tokenizer."""
    folder = large.parent
    named(spec, lambda: data.documents([text])).save(folder / spec)
    small = alone(own, text, folder / spec)
    whole = alone(prepared, large, folder / spec, folder / f"{spec}-out")
    speed, whole_speed = (
        path.stat().st_size / 1e6 / found["processor_seconds"] for path, found in ((text, small), (large, whole))
    )
    return {
        "own_MB_a_processor_second": round(speed, 2),
        "prepare_MB_a_processor_second": round(whole_speed, 2),
        "share_of_own_speed": round(whole_speed / speed, 3),
        "busy_own": round(small["busy"], 2),
        "busy_prepare": round(whole["busy"], 2),
        "seconds": round(whole["seconds"], 1),
        "peak_MiB": round(whole["peak_MiB"]),
    }


def main() -> None:
    """Measure every tokenizer and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text, some ten megabytes of it")
    parser.add_argument("--megabytes", type=int, default=1000, help="how much of it to prepare")
    parser.add_argument("--tokenizers", default="bytes,chars,bpe:4096", help="which, with commas; gpt2 needs its file")
    parser.add_argument("--json", action="store_true", help="print one JSON record")
    given = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "command": f"python benchmarks/data.py --text TEXT --tokenizers {given.tokenizers} --json",
        "commit": commit.stdout.strip(),
        "tokenizers": tokenizers.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "text": f"{given.text.stat().st_size / 1e6:.1f} MB, repeated to {given.megabytes} MB",
    }
    with corpus(given.text, given.megabytes) as large:
        found = {spec: compare(spec, given.text, large) for spec in given.tokenizers.split(",")}
    if given.json:
        print(json.dumps({**about, "measured": found}, indent=1))
        return
    print("  ".join(f"{key}: {value}" for key, value in about.items()))
    for spec, row in found.items():
        print(f"\n{spec}")
        for name, value in row.items():
            print(f"  {name.replace('_', ' '):32s} {value:9.2f}")


if __name__ == "__main__":
    main()
