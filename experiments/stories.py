r"""The model ``stories`` of the box: short English stories, at most 12 MB, in a quarter of an hour on one GPU.

python experiments/stories.py stories15M.bin tokenizer.bin --out FOLDER                                  all steps
python experiments/stories.py stories15M.bin tokenizer.bin --out FOLDER --only generate,train,export,sample    on a GPU
python experiments/stories.py --out FOLDER --only measure,card --judge SmolLM2 --box src/sedd/models       elsewhere
python experiments/stories.py --out FOLDER --stories 40 --held-out 10 --minutes 1 --samples 4 --draws 2 \
    --set model.width=64 --set train.batch_size=8 --set data.tokenizer=bpe:512 --only train,export,sample      on a CPU

``generate`` draws stories from a small autoregressive model (`story_teacher.py`); their cross-entropy under it is an
upper bound on their entropy. Some are held out. ``train`` trains with `sedd train`, a story per row; a run that was
stopped goes on where it was. ``export`` stores the weights in int8 and measures the bounds of both forms on the
held-out stories; ``sample`` draws stories; ``measure`` has them judged by a language model that has not made the data
(``--judge``), and measures the bound on stories that were written for the teacher (``--real``); ``card`` writes the
model card and, with ``--box``, copies the model and the results.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from box import Study

from sedd import hub

STEPS = ("generate", "train", "export", "sample", "measure", "card")
CONFIG = {
    "data.tokenizer": "bpe:4096",
    "data.packing": "lines",
    "data.val_fraction": "0.005",
    "model.width": "320",
    "model.depth": "7",
    "model.heads": "5",
    "model.embedding_norm": "true",
    "objective": "lambda-dce",
    "optim.name": "muon",
    "optim.lr": "4e-3",
    "optim.warmup_steps": "50",
    "optim.lr_schedule": "linear",
    "optim.final_lr_fraction": "0.0",
    "optim.ema_decay": "0.99",
    "train.batch_size": "512",
    "train.loss_weighting": "0.5",
    "train.save_every": "5000",
}
"""A network of 11.3 million parameters without time conditioning, and the optimizer of the recipe text8."""
SUMMARY = "Short stories in simple English, as a child of four understands them."
LICENCE = (
    "MIT, for the weights and for the model that wrote the training stories (stories15M, trained on TinyStories, "
    "Eldan and Li 2023, which is under CDLA-Sharing-1.0)."
)
LIMITS = (
    "A small model for demonstrations: stories of at most 1000 characters in the words of four-year-olds, whose thread "
    "is sometimes lost, and at temperature 1 often. Sampling by confidence makes them too long. Short templates "
    "are unlike its data: nine in ten held-out stories have 132 to 223 tokens, the shortest 69. It repeats the names "
    "and endings that its data repeat. It knows nothing about the world."
)


def generate(args: argparse.Namespace, study: Study) -> None:
    """Draw stories; write train.jsonl and test.jsonl, and the teacher's likelihood of the held-out stories."""
    teacher = Path(__file__).with_name("story_teacher.py")
    words = [args.weights, args.tokenizer, "--stories", args.stories + args.held_out, "--temperature", args.temperature]
    start = time.perf_counter()
    drawn = study.out / "stories.jsonl"
    limit = ["--seconds", args.seconds] if args.seconds else []
    subprocess.run([sys.executable, teacher, *map(str, [*words, "--out", drawn, *limit])], check=True)
    seconds = round(time.perf_counter() - start, 1)
    lines = drawn.read_text(encoding="utf-8").splitlines(keepends=True)
    (study.out / "test.jsonl").write_text("".join(lines[: args.held_out]), encoding="utf-8")
    (study.out / "train.jsonl").write_text("".join(lines[args.held_out :]), encoding="utf-8")
    drawn.unlink()
    scored = [*words[:2], "--temperature", args.temperature, "--score", study.out / "test.jsonl"]
    printed = subprocess.run(
        [sys.executable, teacher, *map(str, scored)], check=True, stdout=subprocess.PIPE, text=True
    )
    facts = {"stories": len(lines) - args.held_out, "characters": sum(len(json.loads(line)["text"]) for line in lines)}
    study.store(
        "generate",
        {"wall_seconds": seconds, "temperature": args.temperature, **facts, "teacher": json.loads(printed.stdout)},
    )


def card_facts(study: Study) -> tuple[hub.CardFacts, str]:
    """Return what the card states about data, licence, limits and commands, and the name of the held-out data."""
    results = study.results
    drawn, trained = results["generate"], results["train"]
    held_out = len((study.out / "test.jsonl").read_text(encoding="utf-8").splitlines())
    facts = hub.CardFacts(
        summary=SUMMARY,
        data=f"{drawn['stories']:,} stories drawn from stories15M, an autoregressive model of 15 million parameters, "
        f"at temperature {drawn['temperature']}. Their entropy is at most {drawn['teacher']['bits_per_char']:.3f} bits "
        f"per character: the cross-entropy under the model that drew them, of {drawn['teacher']['texts']:,} held-out "
        "stories. "
        f"{trained['result']['seconds']:.0f} seconds of training on one {trained['machine']['name']}.",
        licence=LICENCE,
        command="\n".join(
            [
                f"python experiments/{study.name}.py stories15M.bin tokenizer.bin --out FOLDER --box src/sedd/models",
                *(f"# {results[step]['command']}" for step in ("train", "export", "sample")),
            ]
        ),
        limits=LIMITS,
        template="Once upon a time, there was a dog named Max. {60} Max was very happy. The end.",
    )
    return facts, f"{held_out:,} held-out stories"


def main() -> None:
    """Run the steps of ``--only``, each with the results of those before it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, nargs="?", help="stories15M.bin, for the step generate")
    parser.add_argument("tokenizer", type=Path, nargs="?", help="its tokenizer.bin")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run, the model and results.json")
    parser.add_argument("--only", default=",".join(STEPS), help="steps, with commas between them")
    parser.add_argument("--stories", type=int, default=300_000, help="stories to train on")
    parser.add_argument("--seconds", type=float, help="draw stories for so many seconds at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="temperature of the drawn stories")
    parser.add_argument("--held-out", type=int, default=2000, help="stories that are not trained on")
    parser.add_argument("--minutes", type=float, default=9, help="minutes of training by the wall clock")
    parser.add_argument("--precision", default="bfloat16", help="precision of training: float8 on an H100 or newer")
    parser.add_argument("--set", action="append", default=[], help="configuration, after that of this script")
    parser.add_argument("--dtype", default="int8", help="dtype of the exported weights")
    parser.add_argument("--draws", type=int, default=8, help="Monte Carlo draws per story of the bounds")
    parser.add_argument("--samples", type=int, default=500, help="stories to generate")
    parser.add_argument("--steps", type=int, default=128, help="sampling steps of the generated stories")
    parser.add_argument("--sample-temperature", type=float, default=0.6, help="temperature of the generated stories")
    parser.add_argument("--judge", help="language model that judges the samples: a folder or a name on the Hub")
    parser.add_argument("--real", type=Path, help="a .jsonl file of stories that were not drawn from the teacher")
    parser.add_argument("--box", type=Path, help="folder of models to copy the model to: src/sedd/models")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    steps = args.only.split(",")
    if unknown := set(steps) - set(STEPS):
        parser.error(f"only is {args.only}; choose from {', '.join(STEPS)}, not {', '.join(sorted(unknown))}")
    if "generate" in steps and args.tokenizer is None:
        parser.error("the step generate needs stories15M.bin and tokenizer.bin")
    study = Study("stories", args.out)
    train, test = args.out / "train.jsonl", args.out / "test.jsonl"
    for step in steps:
        if step == "generate":
            generate(args, study)
        elif step == "train":
            given = dict(assignment.split("=", 1) for assignment in args.set)
            config = {**CONFIG, "train.precision": args.precision, **given}
            options = [word for key, value in config.items() for word in ("--set", f"{key}={value}")]
            study.train(train, "--minutes", args.minutes, *options)
        elif step == "export":
            study.export(test, args.dtype, args.draws)
        elif step == "sample":
            study.sample(args.samples, "--steps", args.steps, "--temperature", args.sample_temperature)
        elif step == "measure":
            if args.judge:
                study.measure("quality", "quality", study.samples, "--judge", args.judge)
            if args.real:
                study.measure("real", "eval", study.model, args.real, "--draws", args.draws)
        else:
            print(study.write_card(*card_facts(study)))
            if args.box is not None:
                study.install(args.box, args.results)


if __name__ == "__main__":
    main()
