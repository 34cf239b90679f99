"""Data preparation: peak memory on a gigabyte of text, and speed compared with the tokenizer alone.

.venv/bin/python benchmarks/data.py --text corpus.txt     a table; the corpus is repeated to a gigabyte
.venv/bin/python benchmarks/data.py --text corpus.txt --json     a JSON record, as in benchmarks/results/

The speed of the tokenizer alone is `encode_batch` over the same pieces, already in memory. Speeds are megabytes of text
per second of processor time, so that other processes do not distort them; ``busy`` is the number of cores used.
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
from sedd.tokenizer import build_tokenizer, load_tokenizer


def measure(work: Callable[[], object]) -> dict[str, float]:
    """Measure wall-clock seconds, and processor seconds over all threads."""
    start, before = time.perf_counter(), time.process_time()
    work()
    wall, processor = time.perf_counter() - start, time.process_time() - before
    return {"seconds": wall, "processor_seconds": processor, "busy": processor / wall}


def tokenize_only(text: Path, tokenizer: Path) -> dict[str, float]:
    """Time the tokenizer alone, in a pool of threads as in `prepare`, for two processor seconds or more."""
    pieces, loaded = list(data.read_documents([text])), load_tokenizer(tokenizer)
    passes: list[dict[str, float]] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while sum(run["processor_seconds"] for run in passes) < 2:
            passes.append(measure(lambda: sum(pool.map(lambda piece: loaded.encode_batch([piece])[0].size, pieces))))
    return {name: sum(run[name] for run in passes) / len(passes) for name in passes[0]}


def prepare_all(text: Path, tokenizer: Path, out: Path) -> dict[str, float]:
    """Time reading, encoding, hashing and writing; and the peak memory of the process."""
    found = measure(lambda: data.prepare([text], out, load_tokenizer(tokenizer)))
    return {**found, "peak_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def in_new_process(work: Callable[..., dict[str, float]], *arguments: Path) -> dict[str, float]:
    """Run ``work`` in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


@contextmanager
def corpus(text: Path, megabytes: int) -> Iterator[Path]:
    """Repeat ``text`` to the given size in a temporary file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.txt"
        content = text.read_bytes()
        with path.open("wb") as file:
            while file.tell() < megabytes * 1e6:
                file.write(content)
        yield path


def compare(spec: str, text: Path, large: Path) -> dict[str, float]:
    """Measure one tokenizer."""
    folder = large.parent
    build_tokenizer(spec, lambda: data.read_documents([text])).save(folder / spec)
    small = in_new_process(tokenize_only, text, folder / spec)
    whole = in_new_process(prepare_all, large, folder / spec, folder / f"{spec}-out")
    speed, whole_speed = (
        path.stat().st_size / 1e6 / found["processor_seconds"] for path, found in ((text, small), (large, whole))
    )
    return {
        "tokenizer_MB_per_processor_second": round(speed, 2),
        "prepare_MB_per_processor_second": round(whole_speed, 2),
        "fraction_of_tokenizer_speed": round(whole_speed / speed, 3),
        "busy_tokenizer": round(small["busy"], 2),
        "busy_prepare": round(whole["busy"], 2),
        "seconds": round(whole["seconds"], 1),
        "peak_MiB": round(whole["peak_MiB"]),
    }


def main() -> None:
    """Measure the tokenizers and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text of about ten megabytes")
    parser.add_argument("--megabytes", type=int, default=1000, help="size to repeat it to")
    parser.add_argument("--tokenizers", default="bytes,chars,bpe:4096", help="comma-separated tokenizers")
    parser.add_argument("--json", action="store_true", help="print one JSON record")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "command": f"python benchmarks/data.py --text TEXT --tokenizers {args.tokenizers} --json",
        "commit": commit.stdout.strip(),
        "tokenizers": tokenizers.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "text": f"{args.text.stat().st_size / 1e6:.1f} MB, repeated to {args.megabytes} MB",
    }
    with corpus(args.text, args.megabytes) as large:
        found = {spec: compare(spec, args.text, large) for spec in args.tokenizers.split(",")}
    if args.json:
        print(json.dumps({**about, "measured": found}, indent=1))
        return
    print("  ".join(f"{key}: {value}" for key, value in about.items()))
    for spec, row in found.items():
        print(f"\n{spec}")
        for name, value in row.items():
            print(f"  {name.replace('_', ' '):32s} {value:9.2f}")


if __name__ == "__main__":
    main()
