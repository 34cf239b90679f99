"""Figures of the guides: a trace, a comparison of runs, a sweep of samples, and the demonstrations.

The package draws them, as its commands do. What takes more than seconds to compute is recorded once, with one thread.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from figures.animation import ROOT, weights_digest, without_padding
from figures.canvas import Picture
from figures.screenshots import browser_page, digests
from sedd import plot, trace
from sedd.evaluation import compare
from sedd.evaluation.quality.plots import plot_quality

sys.path.append(str(ROOT / "notebooks"))
from demos import all_masked, one_step, ratios, samplers, sentences

STORED = ROOT / "experiments/results/guide-figures.json"
SMALL = (
    "--recipe tiny --tokenizer chars --seq-len 64 --steps 240 --set model.width=64 --set model.depth=2 "
    "--set model.heads=2"
)
COMPARE = [
    f"sedd train book.txt {SMALL} --set train.eval_every=30 --out se",
    f"sedd train book.txt {SMALL} --set train.eval_every=30 --out denoiser --objective lambda-dce",
    f"sedd train book.txt {SMALL} --set train.eval_every=30 --out ar --objective autoregressive",
    "sedd compare se denoiser ar",
]
"""Commands of docs/guides/likelihood.md."""
SWEEP = [
    f"sedd train book.txt {SMALL} --out denoiser --objective lambda-dce",
    f"sedd train book.txt {SMALL} --out judge-run --objective autoregressive",
    "sedd quality denoiser --judge judge-run -n 32 --sweep steps=4,16,64 --sweep temperature=0.7,1 --out sweep.png "
    "--out sweep.jsonl",
]
"""Commands of docs/guides/quality.md."""
SWEPT = ("steps", "temperature")
TEMPLATE = "Once upon a time, there was a dog named Max. {60} Max was very happy. {20} The end."
TRACE: dict[str, Any] = {"steps": 128, "temperature": 0.6, "seed": 0}
COMPARED = ("run", "objective", "parameters", "trained_tokens", "seconds", "bits", "stderr_bits", "ppl_bound",
            "is_exact", "bits_per_char", "protocol")  # fmt: skip
SCORED = ("source", "judge", "first_token", "steps", "temperature", "nfe", "gen_ppl_by_token", "entropy_nats",
          "stderr_gen_ppl_by_token", "stderr_entropy_nats", "self_repetition_4")  # fmt: skip


@cache
def stored() -> Any:
    """Return what was recorded."""
    return json.loads(STORED.read_text(encoding="utf-8"))


def record(part: str, book: Path | None) -> None:
    """Compute one part anew and store it; runs are trained on ``book``, a text of about a megabyte."""
    torch.set_num_threads(1)
    if part == "runs":
        if book is None:
            raise SystemExit("runs are trained on a text of about a megabyte; name one with --book")
        new = record_runs(book)
    else:
        new = {"trace": record_trace, "demos": record_demos}[part]()
    found = (stored() if STORED.exists() else {}) | new
    head = {
        "what": "what the figures of the guides show: texts, runs and demonstrations",
        "command": f"python experiments/pictures.py --record {' '.join(PARTS)} --book book.txt",
        "threads": 1,
        "torch": torch.__version__.partition("+")[0],
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in
                       (head | {key: found[key] for key in sorted(found.keys() - head.keys())}).items())  # fmt: skip
    STORED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    stored.cache_clear()


# A trace of the model in the box ---------------------------------------------------------------------------


def record_trace() -> dict[str, Any]:
    """Fill the gaps of the template with the model in the box, on a CPU."""
    import sedd

    (filled,) = sedd.load("stories", device="cpu").infill(TEMPLATE, **TRACE)
    found = {"weights_sha256": weights_digest(), "template": TEMPLATE, "settings": TRACE}
    return {"trace": found | {"tokens": without_padding(filled)}}


@cache
def trace_data() -> dict[str, Any]:
    """What the trace shows, and what its look depends on."""
    sources = digests("templates/base.html.j2", "templates/macros.html.j2", "templates/trace*", "trace.py")
    return {**stored()["trace"], **sources}


def shoot_trace() -> bytes:
    """Write the page of the trace, and return its first screen as a PNG."""
    found = stored()["trace"]
    rows = [[trace.TracedToken(text, step) for text, step in found["tokens"]]]
    settings = found["settings"]
    about = f"Sampler first-hitting, {settings['steps']} steps, seed {settings['seed']}."
    with tempfile.TemporaryDirectory() as name, browser_page(900, 352) as page:
        file = Path(name) / "trace.html"
        file.write_text(trace.trace_page(rows, "A text of stories", about), encoding="utf-8")
        page.goto(file.as_uri())
        return bytes(page.screenshot())


# Runs ------------------------------------------------------------------------------------------------------


def record_runs(book: Path) -> dict[str, Any]:
    """Run the commands of both guides on a book, and store what the figures and the tables show."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copyfile(book, folder / "book.txt")
        compared = run(COMPARE, folder)
        curves = {row["run"]: compare.read_curve(folder / row["run"])._asdict() for row in compared}
    with tempfile.TemporaryDirectory() as name:
        shutil.copyfile(book, Path(name) / "book.txt")
        swept = run(SWEEP, Path(name))
    plain = {
        name: {key: np.round(values, 5).tolist() for key, values in curve.items()} for name, curve in curves.items()
    }
    kept = [{key: row[key] for key in COMPARED} for row in compared]
    return {
        "compare": {"commands": COMPARE, "rows": kept, "curves": plain},
        "sweep": {"commands": SWEEP, "rows": [{key: row[key] for key in SCORED} for row in swept]},
    }


def run(commands: list[str], folder: Path) -> list[dict[str, Any]]:
    """Run the commands of a guide with one thread; return the objects that the last of them prints."""
    for command in commands:
        words = [*command.split()[1:], *(["--json"] if command is commands[-1] else [])]
        done = subprocess.run(
            [sys.executable, "-m", "sedd", *words],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


@cache
def compare_data() -> dict[str, Any]:
    """What the comparison shows, and the code that draws it."""
    return {**stored()["compare"], **digests("evaluation/compare.py")}


def draw_compare() -> Figure:
    """Draw the comparison as ``sedd compare`` does."""
    found = stored()["compare"]
    curves = [
        compare.ValidationCurve(**{key: np.array(values) for key, values in found["curves"][row["run"]].items()})
        for row in found["rows"]
    ]
    return compare.plot_comparison(found["rows"], curves)


@cache
def sweep_data() -> dict[str, Any]:
    """What the sweep shows, and the code that draws it."""
    return {**stored()["sweep"], **digests("evaluation/quality/plots.py")}


def draw_sweep() -> Figure:
    """Draw the sweep as ``sedd quality`` does."""
    return plot_quality(stored()["sweep"]["rows"], SWEPT)


# Demonstrations: of docs/guides/demos.md -----------------------------------------------------------------


def record_demos() -> dict[str, Any]:
    """Compute the errors of samplers; train the networks of the demonstrations that have one, and evaluate them."""
    one = sentences.build_denoiser(one_step.PROCESS, 0, one_step.SCHEDULE)
    consume(sentences.train_denoiser(one, one_step.OBJECTIVE, 600, seed=0))
    masked = sentences.build_denoiser(all_masked.PROCESS, 0, all_masked.SCHEDULE)
    consume(sentences.train_denoiser(masked, all_masked.OBJECTIVE, 600, seed=0))
    return {
        "one-step": [row._asdict() for row in one_step.evaluate_reconstructions(one)],
        "one-step examples": one_step.reconstruct_examples(one, noise_level=0.75, count=8, seed=0),
        "all-masked": [row._asdict() for row in all_masked.sample_sentences(masked, 64, 4000, seed=0)],
        "samplers": [row._asdict() for row in samplers.sampler_errors(3, 3, "log-linear", 256, seed=0)],
    }


def consume(steps: Iterator[float]) -> None:
    """Take all steps of a training."""
    for _ in steps:
        pass


def rounded(value: float) -> float:
    """Round to five digits, so that the last bits of another processor are no other data."""
    return float(f"{value:.5g}") if abs(value) > 1e-9 else 0.0


def demo_digests(*names: str) -> dict[str, str]:
    """Return the hashes of modules of the demonstrations."""
    return digests(*(f"demos/{name}.py" for name in names), source=ROOT / "notebooks")


@cache
def found_ratios() -> list[ratios.RatioEstimate]:
    """Return the ratios that three objectives learn."""
    return list(ratios.learn_ratios(states=10, steps=100, seed=0))


@cache
def ratios_data() -> dict[str, Any]:
    """The errors of all steps and the matrices of those shown."""
    shown = ratios.shown_steps(100)
    matrices = [row.log_score.flatten().tolist() for row in found_ratios() if row.step in shown]
    return {
        "errors": [rounded(row.error) for row in found_ratios()],
        "matrices": [[rounded(value) for value in matrix] for matrix in matrices],
        **demo_digests("ratios"),
    }


def draw_ratios() -> Figure:
    """Draw the learned matrices beside the true one."""
    return ratios.plot_ratios(found_ratios(), ratios.true_log_ratios(states=10, seed=0))


def draw_samplers() -> Figure:
    """Draw error against steps."""
    return samplers.plot_samplers([samplers.SamplerError(**row) for row in stored()["samplers"]])


def draw_one_step() -> Figure:
    """Draw what one step restores, against noise."""
    return one_step.plot_one_step([one_step.Reconstruction(**row) for row in stored()["one-step"]])


def draw_all_masked() -> Figure:
    """Draw the frequencies of the sentences."""
    return all_masked.plot_all_masked([all_masked.SentenceFrequencies(**row) for row in stored()["all-masked"]])


def recorded_demo(name: str, *sources: str) -> Callable[[], dict[str, Any]]:
    """Return a function for the recorded data of a demonstration and the code that computes and draws them."""
    return lambda: {"rows": stored()[name], **demo_digests(*sources)}


def as_png(draw: Callable[[], Figure]) -> Callable[[], bytes]:
    """Return a function that draws a figure as the commands of the package save it."""

    def drawn() -> bytes:
        with tempfile.TemporaryDirectory() as name:
            return plot.save_png(draw(), Path(name) / "figure.png").read_bytes()

    return drawn


PARTS = ("trace", "runs", "demos")
"""What can be recorded by itself."""
SCREENSHOTS: Mapping[str, Picture] = {"trace": Picture(trace_data, shoot_trace)}
PICTURES: Mapping[str, Picture] = {
    "compare": Picture(compare_data, as_png(draw_compare)),
    "sweep": Picture(sweep_data, as_png(draw_sweep)),
    "demo-ratios": Picture(ratios_data, as_png(draw_ratios)),
    "demo-one-step": Picture(recorded_demo("one-step", "one_step", "sentences"), as_png(draw_one_step)),
    "demo-all-masked": Picture(recorded_demo("all-masked", "all_masked", "sentences"), as_png(draw_all_masked)),
    "demo-samplers": Picture(recorded_demo("samplers", "samplers"), as_png(draw_samplers)),
}
