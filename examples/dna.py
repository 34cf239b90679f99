"""DNA: learn a Markov chain of bases whose entropy is known, and compare samples with it.

A G after a C is rare, as in the genomes of mammals. The entropy of the chain is known exactly, and no model can have a
bound below it.
"""

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np

from sedd import data, samplers
from sedd.loading import load_model
from sedd.tokenizer import build_tokenizer
from sedd.training import loop
from sedd.training.config import BudgetConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig

BASES, LENGTH, SEQUENCES = "ACGT", 40, 8000
NEXT = np.array([[0.3, 0.2, 0.3, 0.2], [0.35, 0.3, 0.05, 0.3], [0.25, 0.25, 0.3, 0.2], [0.15, 0.2, 0.3, 0.35]])
"""Probability of a base (column) given the one before it (row)."""


def stationary() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the stationary distribution of the chain."""
    p: np.ndarray[tuple[int], np.dtype[np.float64]] = np.linalg.matrix_power(NEXT, 200)[0]
    return p


def entropy() -> float:
    """Return the entropy in nats per base."""
    each = -(NEXT * np.log(NEXT)).sum(1)
    return float((-(stationary() * np.log(stationary())).sum() + (LENGTH - 1) * stationary() @ each) / LENGTH)


def sequence(draw: np.random.Generator) -> str:
    """Draw one sequence."""
    bases = [draw.choice(4, p=stationary())]
    while len(bases) < LENGTH:
        bases.append(draw.choice(4, p=NEXT[bases[-1]]))
    return "".join(BASES[base] for base in bases)


def frequency_after_c(texts: list[str]) -> float:
    """Return how often a G follows a C."""
    after = [b for text in texts for a, b in pairwise(text) if a == "C"]
    return after.count("G") / max(1, len(after))


def main(out: Path, steps: int) -> None:
    """Write the sequences, train, and compare samples with the chain."""
    draw = np.random.default_rng(0)
    (out / "dna.txt").write_text("".join(sequence(draw) + "\n" for _ in range(SEQUENCES)))
    config = RunConfig(
        data=DataConfig([str(out / "dna.txt")], tokenizer="chars", packing="lines"),
        model=ModelConfig(width=48, depth=2, heads=4, seq_len=LENGTH),
        optim=OptimConfig("muon", lr=1e-2, warmup_steps=20, ema_decay=0.98),
        budget=BudgetConfig(steps=steps),
        train=TrainConfig(batch_size=48, eval_every=0, eval_sequences=4000, save_every=0),
        objective="lambda-dce",
    ).resolved()
    sources = config.data.sources
    letters = build_tokenizer("chars", lambda: data.read_documents(sources, packing="lines"))
    data.prepare(sources, out / "data", letters, packing="lines", length=LENGTH)
    end = loop.run(config, lambda: out / "data", out / "run", resume=False, on_event=lambda kind, record: None)
    print(f"entropy {entropy():.4f} nats per base")
    print(f"validation bound {end.validation['bound']:.4f} ± {end.validation['bound_stderr']:.4f} nats per base")

    loaded = load_model(out / "run")
    sampling_run = samplers.SamplingRun(loaded.model, samplers.SamplingSettings(steps=None))
    samples = [loaded.tokenizer.decode(row.ids) for row in sampling_run.sample(samplers.empty(100, LENGTH))]
    print(f"a G after a C: {NEXT[1, 2]:.3f} of the time, {frequency_after_c(samples):.3f} in 100 samples such as")
    print("  ", samples[0])
    given = "TATAAA{28}GGGCGG"
    ids = samplers.template.template_ids(given, loaded.tokenizer)
    (filled,) = sampling_run.sample(samplers.template.prompt_from_ids([ids]))
    print(f"{given} filled:\n  ", loaded.tokenizer.decode(filled.ids))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="training steps")
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder), parser.parse_args().steps)
