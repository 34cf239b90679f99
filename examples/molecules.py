"""Molecules: learn SMILES, generate new ones, and check their validity with RDKit (pip install -e '.[molecules]').

By default the training data are generated here: chains and rings with functional groups. ``--data FILE`` takes a table
with a column of SMILES, or one molecule per line.
"""

import argparse
import random
import tempfile
from pathlib import Path

from sedd import data, samplers
from sedd.evaluation import molecules
from sedd.loading import load_model
from sedd.tokenizer import build_tokenizer
from sedd.training import loop
from sedd.training.config import BudgetConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig

MOLECULES, LONGEST, SHOWN, SAMPLES = 6000, 20, 5, 100
GROUPS = ["C", "CC", "O", "N", "F", "Cl", "C#N", "C(=O)O", "C(=O)N", "OC", "N(C)C", "C(F)(F)F"]
RINGS = ["c1ccccc1", "c1ccncc1", "C1CCCCC1", "C1CCNCC1", "c1ccoc1", "C1CC1"]
LINKS = ["", "C", "CC", "CO", "C(=O)N", "C=C"]


def smiles(draw: random.Random) -> str:
    """Draw an atom, a link and a ring, or a chain with a branch."""
    if draw.random() < 0.5:
        link = draw.choice(LINKS)
        return f"{draw.choice(['C', 'N', 'O'])}{link}{draw.choice(RINGS)}"
    return f"C{draw.choice(LINKS)}C({draw.choice(GROUPS)}){draw.choice(LINKS)}{draw.choice(GROUPS)}"


def main(out: Path, source: Path | None, steps: int) -> None:
    """Train on molecules, sample, and count the valid samples."""
    if source is None:
        draw, source = random.Random(0), out / "molecules.txt"
        short = [text for _ in range(MOLECULES) if len(text := smiles(draw)) <= LONGEST]
        source.write_text("".join(f"{text}\n" for text in short))
    known = list(data.read_documents([source], packing="lines"))
    letters = build_tokenizer("chars", lambda: iter(known))
    length = max(map(len, known))
    data.prepare([source], out / "data", letters, packing="lines", length=length, pad="model")
    config = RunConfig(
        data=DataConfig([str(source)], tokenizer="chars", packing="lines"),
        model=ModelConfig(width=96, depth=3, heads=4, seq_len=length),
        optim=OptimConfig("muon", lr=1e-2, warmup_steps=20, ema_decay=0.98),
        budget=BudgetConfig(steps=steps),
        train=TrainConfig(batch_size=48, eval_every=0, eval_sequences=4000, save_every=0),
        objective="lambda-dce",
    ).resolved()
    end = loop.run(config, lambda: out / "data", out / "run", resume=False, on_event=lambda kind, record: None)
    print(f"{len(known):,} molecules of at most {length} characters, such as {known[0]}")
    bound, error = (length * end.validation[name] for name in ("bound", "bound_stderr"))
    print(f"validation bound {bound:.3f} ± {error:.3f} nats per molecule")

    loaded = load_model(out / "run")
    sampling_run = samplers.SamplingRun(loaded.model, samplers.SamplingSettings(steps=None))
    samples = [loaded.tokenizer.decode(row.ids) for row in sampling_run.sample(samplers.empty(SAMPLES, length))]
    found = molecules.measure_molecules(samples, known[:20_000])
    print(f"of {found.texts} samples {found.valid} are valid, {found.unique} distinct, {found.novel} new:")
    for text in sorted(set(samples) - set(known), key=samples.index)[:SHOWN]:
        print(f"  {text}  {'' if molecules.canonical_smiles(text) else '(invalid)'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="file of molecules to train on")
    parser.add_argument("--steps", type=int, default=700, help="training steps")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder), arguments.data, arguments.steps)
