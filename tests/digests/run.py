"""Digests of what the package computes from fixed seeds: training, checkpoints, samples and bounds.

    python tests/digests/run.py              compare with digests.json; the exit code is 1 where they differ
    python tests/digests/run.py --write      store those of this platform
    python tests/digests/run.py --only tiny  cases with this in their name

A change that should move no number must leave every digest as it is. Floating-point sums depend on the processor and
on the version of torch, so digests are compared only on the platform that wrote them.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
import torch
from safetensors.torch import load_file

import sedd

STORED = Path(__file__).with_name("digests.json")
TEXT = "the cat sat on a mat while seven dogs ran past two old red barns and sang of rain"
NETWORK = {"width": 32, "depth": 2, "heads": 2}
TRAINING = {"batch_size": 8, "eval_sequences": 8, "log_every": 1, "eval_every": 2, "precision": "float32"}
DIFFUSION_SAMPLERS = ("tweedie", "euler", "theta", "gibbs")
MASK_SAMPLERS = ("first-hitting", "ancestral", "remask", "confidence", "entropy")

RECORDS = ("dna", "molecules")
"""Recipes of short records."""

RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "text8": {},
    "text8-uniform": {},
    "english": {"tokenizer": "bpe:300"},
    "dna": {},
    "molecules": {},
    "small": {"tokenizer": "bpe:300"},
    "medium": {"tokenizer": "bpe:300"},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "score-entropy": {},
    "score-entropy uniform geometric": {
        "objective": "score-entropy", "process": "uniform", "noise": {"schedule": "geometric"},
    },
    "score-entropy of a denoiser": {"objective": "score-entropy", "model": {"parameterization": "mean"}},
    "score-entropy of a uniform denoiser": {
        "objective": "score-entropy", "process": "uniform", "model": {"parameterization": "mean"},
    },
    "concrete-score uniform": {"objective": "concrete-score", "process": "uniform"},
    "concrete-score of any sign": {"objective": "concrete-score", "model": {"parameterization": "signed-score"}},
    "ratio-matching uniform": {"objective": "ratio-matching", "process": "uniform"},
    "mean uniform": {"objective": "mean", "process": "uniform"},
    "mean": {},
    "d3pm": {},
    "d3pm uniform": {"objective": "d3pm", "process": "uniform"},
    "t-dce": {"noise": {"schedule": "cosine"}},
    "lambda-dce": {},
    "any-order": {},
    "autoregressive": {},
    "labels": {"objective": "lambda-dce", "label": "kind", "data": {"packing": "lines"}},
    "bell": {"objective": "score-entropy", "train": {"time_sampling": "bell"}},
    "muon": {"objective": "lambda-dce", "optim": {"name": "muon"}, "model": {"ngrams": 2, "embedding_norm": True}},
}  # fmt: skip


def digest(value: Any) -> str:
    """Hash tensors by their bytes, and everything else by its JSON."""
    hashed = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            hashed.update(f"{part.dtype}{tuple(part.shape)}".encode())
            hashed.update(part.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for name in sorted(part):
                hashed.update(name.encode())
                add(part[name])
        elif isinstance(part, list | tuple):
            for item in part:
                add(item)
        else:
            hashed.update(json.dumps(part).encode())

    add(value)
    return hashed.hexdigest()[:16]


def text(folder: Path, recipe: str, labelled: bool) -> Path:
    """Write data for a recipe: words, or records where it has lines."""
    generator = torch.Generator().manual_seed(0)

    def draw(letters: Any, count: int) -> list[str]:
        return [letters[i] for i in torch.randint(len(letters), (count,), generator=generator).tolist()]

    if recipe in RECORDS:
        letters = "ACGT" if recipe == "dna" else "CNOc1()="
        path = folder / f"{recipe}.txt"
        path.write_text("\n".join("".join(draw(letters, 24)) for _ in range(300)))
    elif labelled:
        path = folder / "labelled.csv"
        path.write_text(
            "text,kind\n" + "\n".join(f"{' '.join(draw(TEXT.split(), 5))},{kind}" for kind in draw(["a", "b"], 300))
        )
    else:
        path = folder / "words.txt"
        path.write_text(" ".join(draw(TEXT.split(), 6000)))
    return path


def trained(folder: Path, name: str, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Train a small network for four steps; yield what its log, checkpoint, samples and bounds hold."""
    is_recipe = name in RECIPES
    records = name in RECORDS or "label" in options
    merged = {"steps": 4, **options}
    merged["model"] = {**NETWORK, **({} if records else {"seq_len": 32}), **options.get("model", {})}
    merged["train"] = {**TRAINING, **options.get("train", {})}
    if is_recipe:
        merged["recipe"] = name
        if name in ("small", "medium"):
            merged["train"]["grad_accumulation"] = 2
    else:
        merged.setdefault("objective", name)
        merged.setdefault("tokenizer", "chars")
    out, events = folder / name.replace(" ", "-"), []
    source = text(folder, name, "label" in options)
    model = sedd.train(str(source), out=out, on_event=lambda kind, record: events.append((kind, record)), **merged)
    yield (
        "log",
        [
            {
                k: v
                for k, v in sorted(record.items())
                if k in ("step", "loss", "grad_norm", "bound", "bound_stderr", "lr")
            }
            for kind, record in events
            if kind == "log"
        ],
    )
    (checkpoint,) = (path for path in (out / "checkpoints").iterdir() if path.name.endswith("4"))
    for path in sorted(checkpoint.rglob("*.safetensors")):
        yield path.name, load_file(path)
    yield from used(model, name, options)


def used(model: Any, name: str, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield samples, infilled texts and bounds of a model."""

    def ids(texts: Any) -> Any:
        return [(text.ids, text.steps) for text in texts]

    guided = {"label": "a", "guidance": 2.0} if "label" in options else {}
    yield "sample", ids(model.sample(3, steps=8, seed=1, **guided))
    yield "sample warped", ids(model.sample(2, steps=8, seed=2, temperature=0.7, top_p=0.9, **guided))
    if not {"autoregressive"} & {name, options.get("objective")}:
        yield "infill", ids(model.infill("CC{6}C" if name in RECORDS else "the c{6} on", 2, steps=6, seed=3, **guided))
    for sampler in (*DIFFUSION_SAMPLERS, *MASK_SAMPLERS):
        try:
            texts = model.sample(2, steps=6, seed=4, sampler=sampler, **guided)
        except ValueError as error:
            yield f"sampler {sampler}", f"{type(error).__name__}"
        else:
            yield f"sampler {sampler}", ids(texts)
    label = {"label": "a"} if "label" in options else {}
    bounds = model.bound("CC" if name in RECORDS else ["the cat sat", "two old dogs"], draws=8, **label)
    yield "bound", [(bound.nats, bound.stderr) for bound in bounds]
    record = model.evaluate(draws=2, **label)
    yield "evaluate", [record[field] for field in ("nats_per_token", "stderr_nats_per_token") if field in record]


def bundled(name: str) -> Iterator[tuple[str, Any]]:
    """Yield what a bundled model generates and how probable it finds texts."""
    model = sedd.load(name)
    given = {"stories": "Mia had a {12} and went home.", "molecules": "CC{5}O"}[name]
    yield "sample", [text.ids for text in model.sample(2, steps=16, seed=3, temperature=0.8)]
    yield "infill", [text.ids for text in model.infill(given, steps=8, seed=1)]
    bounds = model.bound(given.replace("{12}", "dog").replace("{5}", "CCC"), draws=8)
    yield "bound", [(bound.nats, bound.stderr) for bound in bounds]


def cases(folder: Path) -> dict[str, Callable[[], Iterator[tuple[str, Any]]]]:
    """Return what there is to compute, by name."""
    runs = {**RECIPES, **OBJECTIVES}
    found = {name: lambda n=name, o=options: trained(folder, n, o) for name, options in runs.items()}
    return found | {f"bundled {name}": lambda n=name: bundled(n) for name in ("stories", "molecules")}


def platform() -> str:
    """Return what the bits of a sum depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown processor")
    return f"torch {torch.__version__.partition('+')[0]}, {torch.backends.cpu.get_cpu_capability()}, {processor}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    by_platform = json.loads(STORED.read_text()) if STORED.exists() else {}
    stored = by_platform.get(platform(), {})
    if not options.write and not stored:
        print(f"there are digests of {'; '.join(by_platform)}; this is {platform()}, where sums may round differently")
        return 0
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SEDD_CACHE"] = folder
        for name, compute in cases(Path(folder)).items():
            if options.only in name:
                found |= {f"{name}: {what}": digest(value) for what, value in compute()}
                print(f"{name}: {len(found)} digests so far", file=sys.stderr)
    if options.write:
        by_platform[platform()] = {**(stored if options.only else {}), **found}
        STORED.write_text(json.dumps(by_platform, indent=1) + "\n")
        return 0
    expected = {what: value for what, value in stored.items() if options.only in what.partition(": ")[0]}
    different = [what for what in sorted(expected.keys() | found.keys()) if expected.get(what) != found.get(what)]
    for what in different:
        print(f"{what}: {expected.get(what, 'not stored')} is now {found.get(what, 'missing')}")
    print(f"{len(expected) - len(different)} of {len(expected)} digests are as stored")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
