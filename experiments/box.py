"""From data to a model in the box, in steps that can be run on different machines.

A `Study` has a folder: the run, the exported model folder, samples, and ``results.json`` with every command, its
seconds and what it printed. Each step is a command of ``sedd``; the card of the model is written from the results.
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sedd import hub

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from measure import describe_machine

SHOWN_SAMPLES = 10
"""Samples in the card: the first ones."""


def shell(words: Sequence[object]) -> str:
    """Return a command of ``sedd`` as it is typed, without the folders of files."""
    return shlex.join(["sedd", *(word.name if isinstance(word, Path) else str(word) for word in words)])


class Study:
    """The steps from data to the model ``name`` in the box, in the folder ``out``."""

    def __init__(self, name: str, out: Path) -> None:
        self.name, self.out = name, out
        self.run, self.model, self.samples = out / "run", out / name, out / "samples.jsonl"
        self.results_file = out / "results.json"
        out.mkdir(parents=True, exist_ok=True)

    @property
    def results(self) -> dict[str, Any]:
        """What the steps so far have measured."""
        stored: dict[str, Any] = json.loads(self.results_file.read_text()) if self.results_file.exists() else {}
        return stored

    def store(self, step: str, record: Mapping[str, Any]) -> None:
        """Add the record of a step to the results; files of the study are named without its folder."""
        text = json.dumps(self.results | {step: record}, indent=1)
        for folder in {str(self.out), str(self.out.resolve())}:
            text = text.replace(f'"{folder}/', '"')
        self.results_file.write_text(text + "\n")

    def measure(self, step: str, *words: object, **facts: Any) -> dict[str, Any]:
        """Run ``sedd`` with ``--json`` and store what it printed as the result of ``step``, with ``facts``."""
        start = time.perf_counter()
        command = [sys.executable, "-m", "sedd", *map(str, words), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{shell(words)} ended with code {done.returncode}")
        printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
        seconds = round(time.perf_counter() - start, 1)
        self.store(step, {"command": shell(words), "wall_seconds": seconds, **facts, "result": printed})
        return printed

    def train(self, source: Path, *options: object) -> None:
        """Train on ``source``, or resume; store the machine and the configuration too."""
        machine = describe_machine()._asdict()
        resume = ["--resume"] if (self.run / "checkpoints").is_dir() else []
        self.measure("train", "train", source, *options, "--out", self.run, *resume, machine=machine)
        self.store("config", json.loads((self.run / "config.json").read_text()) | {"out": None})

    def export(self, held_out: Path, dtype: str, draws: int) -> None:
        """Export the run in ``dtype``; measure the bounds of both forms on ``held_out``, and their difference."""
        shutil.rmtree(self.model, ignore_errors=True)
        self.measure("run", "eval", self.run, held_out, "--draws", draws)
        words = ("export", self.run, "--out", self.model, "--dtype", dtype, "--eval", held_out, "--draws", draws)
        self.measure("export", *words)
        size = sum(file.stat().st_size for file in self.model.iterdir())
        self.store("export", self.results["export"] | {"folder_bytes": size})

    def sample(self, count: int, *options: object, to: Path | None = None) -> None:
        """Draw ``count`` samples from the exported model: those of the card, or others into the file ``to``."""
        start = time.perf_counter()
        words = ("sample", self.model, "-n", count, *options, "--out", to or self.samples)
        subprocess.run([sys.executable, "-m", "sedd", *map(str, words)], check=True)
        record = {"command": shell(words), "wall_seconds": round(time.perf_counter() - start, 1)}
        self.store("sample" if to is None else to.stem, record)

    def write_card(self, facts: hub.CardFacts, dataset: str) -> Path:
        """Write the card of the exported model from ``facts`` and the results; ``dataset`` names the held-out data."""
        export = self.results["export"]["result"]
        texts = [json.loads(line)["text"] for line in self.samples.read_text().splitlines()[:SHOWN_SAMPLES]]
        stated = replace(
            facts,
            results=[{**export["evaluation"], "dataset": dataset}],
            weights_cost={**export["cost"], "data": dataset},
            sample_metrics=self.results.get("quality", {}).get("result"),
            samples=texts,
        )
        return hub.write_card(self.model, self.name, stated)

    def install(self, box: Path, results: Path) -> None:
        """Copy the exported model into the box, and the results beside those of other studies."""
        target = box / self.name
        if target.resolve() == self.model.resolve():
            raise SystemExit(f"{box} is where the model is already; name another folder")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for file in sorted(self.model.iterdir()):
            shutil.copyfile(file, target / file.name)  # not the permissions: a temporary file's are its owner's alone
        results.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.results_file, results / f"{self.name}.json")
