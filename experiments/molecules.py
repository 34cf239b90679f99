r"""The model ``molecules`` of the box: SMILES, at most 4 MB, in a few minutes on one GPU.

python experiments/molecules.py train.csv.gz test.csv.gz --out FOLDER                                 all steps
python experiments/molecules.py train.csv.gz test.csv.gz --out FOLDER --only train,export,sample      on a GPU
python experiments/molecules.py --out FOLDER --only measure,card --box src/sedd/models                where RDKit is
python experiments/molecules.py train.csv.gz test.csv.gz --out FOLDER --minutes 1 --samples 100 --draws 2 \
    --held-out 200 --set model.width=64 --set train.batch_size=64                                     on a CPU

The data are MOSES (Polykovskiy et al. 2020, "Molecular Sets (MOSES): A Benchmarking Platform for Molecular Generation
Models"): tables with the column SMILES, which the package `molsets` holds under moses/dataset/data: 1,584,663 molecules
to train on, of at most 57 characters, and 176,074 of the test split, some of which are scored. ``train`` trains with
`sedd train`; ``export`` stores the weights in int8 and measures the bounds of both forms on molecules of the test
split; ``sample`` draws molecules; ``measure`` counts the valid, unique and novel ones, which RDKit decides; ``cool``
draws and counts a twentieth as many at lower temperatures; ``card`` writes the model card and, with ``--box``, copies
the model and the results.
"""

import argparse
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from box import Study

from sedd import data, hub

STEPS = ("train", "export", "sample", "measure", "cool", "card")
COOLER = (0.8, 0.7, 0.6)
"""Temperatures below 1 at which fewer molecules are drawn, for the card."""
CONFIG = {
    "model.width": "192",
    "model.depth": "8",
    "model.heads": "3",
    "model.ngrams": "2",
    "model.embedding_norm": "true",
    "optim.name": "muon",
    "optim.lr": "4e-3",
    "optim.warmup_steps": "50",
    "optim.lr_schedule": "linear",
    "optim.final_lr_fraction": "0.0",
    "optim.ema_decay": "0.99",
    "train.batch_size": "2048",
    "train.loss_weighting": "0.5",
    "train.save_every": "0",
    "data.val_fraction": "0.005",
}
"""The network, 3.9 million parameters, and the optimizer of the recipe text8."""
SUMMARY = "Drug-like molecules as SMILES, one character per token."
LICENCE = "MIT, for the data (MOSES, a filtered part of ZINC's clean leads) and for the weights."
LIMITS = (
    "Molecules like those of MOSES alone: 8 to 27 heavy atoms of C, N, S, O, F, Cl and Br, no charges, no "
    "stereochemistry. Validity is syntax and valence as RDKit checks them: nothing is known about synthesis, "
    "activity or safety."
)


def split(train: Path, test: Path, out: Path, held_out: int) -> None:
    """Write train.smi, all molecules of a table in a random order, and test.smi, ``held_out`` of the other."""
    for table, name in ((train, "train.smi"), (test, "test.smi")):
        molecules = list(data.read_documents([table], packing="lines"))
        random.Random(0).shuffle(molecules)
        if name == "test.smi" and not 0 < held_out <= len(molecules):
            raise SystemExit(f"held-out is {held_out}; {table} has {len(molecules)} molecules: give 1 to so many")
        count = held_out if name == "test.smi" else len(molecules)
        (out / name).write_text("".join(f"{text}\n" for text in molecules[:count]))


def cool(study: Study, count: int, known: Path) -> None:
    """Store validity, uniqueness and novelty at temperatures below 1."""
    for temperature in COOLER:
        samples = study.out / f"samples-{temperature}.jsonl"
        words = ("--steps", "inf", "--batch", 200, "--temperature", temperature)
        study.sample(count, *words, to=samples)
        study.measure(f"temperature {temperature}", "quality", samples, "--molecules", "--known", known)


def describe_temperatures(results: Mapping[str, Any]) -> str:
    """State what lower temperatures change, if they were tried."""
    rows = {t: results[f"temperature {t}"]["result"] for t in COOLER if f"temperature {t}" in results}
    if not rows:
        return ""
    shares = ("validity", "uniqueness", "novelty")  # the last two of valid molecules
    stated = {t: [row[name] for name in shares] for t, row in rows.items()}
    parts = [f"{t}: {', '.join('–' if v is None else f'{v:.1%}' for v in values)}" for t, values in stated.items()]
    count = next(iter(rows.values()))["samples"]
    return (
        f" Lower temperatures give more valid molecules; validity, uniqueness and novelty of {count:,} each at "
        f"temperature {'; '.join(parts)}."
    )


def card_facts(study: Study, train: Path, test: Path) -> tuple[hub.CardFacts, str]:
    """Return what the card states about data, licence, limits and commands, and the name of the held-out data."""
    known, held_out = (len(path.read_text().splitlines()) for path in (train, test))
    results = study.results
    machine, seconds = results["train"]["machine"], results["train"]["result"]["seconds"]
    facts = hub.CardFacts(
        summary=SUMMARY,
        data=f"{known:,} molecules of the training split of MOSES; {held_out:,} of its test split are held out. "
        f"{seconds:.0f} seconds of training on one {machine['name']}.",
        licence=LICENCE,
        command="\n".join(
            [
                f"python experiments/{study.name}.py train.csv.gz test.csv.gz --out FOLDER --box src/sedd/models",
                *(f"# {results[step]['command']}" for step in ("train", "export", "sample")),
            ]
        ),
        limits=LIMITS + describe_temperatures(results),
        template="c1ccccc1{8}",
    )
    return facts, f"{held_out:,} held-out molecules"


def main() -> None:
    """Run the steps of ``--only``, each with the results of those before it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="*", help="tables to train on and to test on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run, the model and results.json")
    parser.add_argument("--only", default=",".join(STEPS), help="steps, with commas between them")
    parser.add_argument("--minutes", type=float, default=3.5, help="minutes of training by the wall clock")
    parser.add_argument("--precision", default="bfloat16", help="precision of training: float8 on an H100 or newer")
    parser.add_argument("--set", action="append", default=[], help="configuration, after that of this script")
    parser.add_argument("--held-out", type=int, default=10_000, help="molecules of the test split to score")
    parser.add_argument("--dtype", default="int8", help="dtype of the exported weights")
    parser.add_argument("--draws", type=int, default=8, help="Monte Carlo draws per molecule of the bounds")
    parser.add_argument("--samples", type=int, default=10_000, help="molecules to generate")
    parser.add_argument("--box", type=Path, help="folder of models to copy the model to: src/sedd/models")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    steps = args.only.split(",")
    if unknown := set(steps) - set(STEPS):
        parser.error(f"only is {args.only}; choose from {', '.join(STEPS)}, not {', '.join(sorted(unknown))}")
    study, train, test = Study("molecules", args.out), args.out / "train.smi", args.out / "test.smi"
    if not train.exists():
        if len(args.tables) != 2:
            parser.error(f"{train} does not exist; name two tables of molecules, to train on and to test on")
        split(*args.tables, args.out, args.held_out)
    for step in steps:
        if step == "train":
            given = dict(assignment.split("=", 1) for assignment in args.set)
            config = {**CONFIG, "train.precision": args.precision, **given}
            options = [word for key, value in config.items() for word in ("--set", f"{key}={value}")]
            study.train(train, "--recipe", "molecules", "--minutes", args.minutes, *options)
        elif step == "export":
            study.export(test, args.dtype, args.draws)
        elif step == "sample":
            study.sample(args.samples, "--steps", "inf", "--batch", 1000)
        elif step == "measure":
            study.measure("quality", "quality", study.samples, "--molecules", "--known", train)
        elif step == "cool":
            cool(study, max(1, args.samples // 20), train)
        else:
            print(study.write_card(*card_facts(study, train, test)))
            if args.box is not None:
                study.install(args.box, args.results)


if __name__ == "__main__":
    main()
