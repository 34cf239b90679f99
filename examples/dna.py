"""DNA: learn a chain of bases whose entropy is known, and compare what is drawn with what is so.

After a C, a G is rare here, as in the genomes of mammals. Each base depends on the one before it, so the entropy is a
sum, and no model can have a bound below it.
"""

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np

from sedd import data, factory, generate, sampling, training
from sedd.config import BudgetConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig

BASES, LENGTH, RECORDS = "ACGT", 40, 8000
NEXT = np.array([[0.3, 0.2, 0.3, 0.2], [0.35, 0.3, 0.05, 0.3], [0.25, 0.25, 0.3, 0.2], [0.15, 0.2, 0.3, 0.35]])
"""The law of a base (columns), given the one before it (rows)."""


def first() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The law of a single base that the chain keeps."""
    law: np.ndarray[tuple[int], np.dtype[np.float64]] = np.linalg.matrix_power(NEXT, 200)[0]
    return law


def entropy() -> float:
    """Nats a base: of the first, then of each given the one before."""
    each = -(NEXT * np.log(NEXT)).sum(1)
    return float((-(first() * np.log(first())).sum() + (LENGTH - 1) * first() @ each) / LENGTH)


def sequence(draw: np.random.Generator) -> str:
    """One record."""
    bases = [draw.choice(4, p=first())]
    while len(bases) < LENGTH:
        bases.append(draw.choice(4, p=NEXT[bases[-1]]))
    return "".join(BASES[base] for base in bases)


def share_after_c(texts: list[str]) -> float:
    """How often a G follows a C."""
    after = [b for text in texts for a, b in pairwise(text) if a == "C"]
    return after.count("G") / max(1, len(after))


def main(out: Path, steps: int) -> None:
    """Write the records, train, compare."""
    draw = np.random.default_rng(0)
    (out / "dna.txt").write_text("".join(sequence(draw) + "\n" for _ in range(RECORDS)))
    config = RunConfig(
        data=DataConfig([str(out / "dna.txt")], tokenizer="chars", packing="lines"),
        model=ModelConfig(width=48, depth=2, heads=4, seq_len=LENGTH),
        optim=OptimConfig("muon", lr=1e-2, warmup_steps=20, ema_decay=0.98),
        budget=BudgetConfig(steps=steps),
        train=TrainConfig(batch_size=48, eval_every=0, eval_sequences=4000, save_every=0),
        objective="lambda-dce",
    ).resolved()
    sources = config.data.sources
    letters = factory.build_tokenizer("chars", lambda: data.read_documents(sources, packing="lines"))
    data.prepare(sources, out / "data", letters, packing="lines", length=LENGTH)
    end = training.run(config, lambda: out / "data", out / "run", resume=False, on_event=lambda kind, record: None)
    print(f"entropy {entropy():.4f} nats a base")
    print(
        f"bound on what was held out {end.validation['bound']:.4f} ± {end.validation['bound_stderr']:.4f} nats a base"
    )

    loaded = factory.load(out / "run")
    sampling_run = generate.SamplingRun(
        loaded.model, loaded.process, loaded.schedule, generate.SamplingSettings(steps=None)
    )
    drawn = [loaded.tokenizer.decode(row.ids) for row in sampling_run.sample(sampling.empty(100, LENGTH))]
    print(f"a G after a C: {NEXT[1, 2]:.3f} of the time, {share_after_c(drawn):.3f} in 100 drawn sequences such as")
    print("  ", drawn[0])
    given = "TATAAA{28}GGGCGG"
    ids = generate.template.template_ids(given, loaded.tokenizer)
    (filled,) = sampling_run.sample(generate.template.prompt_from_ids([ids], LENGTH, loaded.process.vocab_size))
    print(f"{given} filled:\n  ", loaded.tokenizer.decode(filled.ids))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="how long to train")
    with tempfile.TemporaryDirectory() as place:
        main(Path(place), parser.parse_args().steps)
