"""The main job: train on sentences whose entropy is known, watch the bound approach it, sample, fill blanks.

Writes ``demo/``: the run with its model, the sentences, and ``bound.png``. About three minutes on two cores.
"""

import argparse
import json
import math
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sedd import data, factory, generate, sampling, training
from sedd.config import BudgetConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from sedd.runtime import run_log

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LENGTH, SENTENCES = 8, 20_000  # seven words and a full stop, a token each
# Each choice with its weight; subject and verb agree, everything else is independent. No two ways to one sentence.
DETERMINERS = {"the": 4, "a": 3, "every": 1}
ADJECTIVES = {"old": 3, "small": 3, "red": 2, "sleepy": 1}
NOUNS = {"cat": 4, "dog": 3, "fox": 2, "owl": 1}
VERBS = {"sees": 4, "likes": 3, "follows": 2, "hears": 1}
PLURALS = {"two": 3, "many": 2}
SLOTS = [ADJECTIVES, NOUNS, VERBS, DETERMINERS, ADJECTIVES, NOUNS]


def entropy_of(choice: dict[str, int]) -> float:
    """Of one choice, in nats."""
    total = sum(choice.values())
    return -sum(w / total * math.log(w / total) for w in choice.values())


def sentence_entropy() -> float:
    """Singular or plural first (1 bit), then the choices in turn: in nats a sentence, exactly."""
    subject = math.log(2) + (entropy_of(DETERMINERS) + entropy_of(PLURALS)) / 2
    return subject + sum(entropy_of(slot) for slot in SLOTS)


def sentence(draw: random.Random) -> str:
    """One sentence, such as: two old cats like a red fox."""

    def pick(choice: dict[str, int]) -> str:
        return draw.choices(list(choice), list(choice.values()))[0]

    plural = draw.random() < 0.5
    first = pick(PLURALS if plural else DETERMINERS)
    adjective, noun, verb, determiner, other, thing = (pick(slot) for slot in SLOTS)
    noun, verb = (noun + "s", verb.removesuffix("s")) if plural else (noun, verb)
    return f"{first} {adjective} {noun} {verb} {determiner} {other} {thing}."


def is_grammatical(text: str) -> bool:
    """Whether the grammar can say it."""
    words = text.removesuffix(".").split(" ")
    if len(words) != 7 or not text.endswith("."):
        return False
    first, adjective, noun, verb, determiner, other, thing = words
    if first in PLURALS:
        noun, verb = noun.removesuffix("s") if noun.endswith("s") else "", verb + "s"
    elif first not in DETERMINERS:
        return False
    said = (adjective, noun, verb, determiner, other, thing)
    return all(word in slot for word, slot in zip(said, SLOTS, strict=True))


def nats_of(text: str) -> float:
    """−log p of a sentence of the grammar, exactly: it can be said in one way alone."""
    first, *said = text.removesuffix(".").split(" ")
    number = PLURALS if first in PLURALS else DETERMINERS
    if number is PLURALS:
        said[1], said[2] = said[1].removesuffix("s"), said[2] + "s"
    choices = zip([first, *said], [number, *SLOTS], strict=True)
    return math.log(2) - sum(math.log(choice[word] / sum(choice.values())) for word, choice in choices)


def main(out: Path, minutes: float) -> None:
    """Make the corpus, train, compare, sample, fill."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    draw = random.Random(0)
    (out / "sentences.txt").write_text("".join(sentence(draw) + "\n" for _ in range(SENTENCES)))
    entropy = sentence_entropy()
    print(f"{SENTENCES:,} sentences such as: {sentence(draw)}")
    config = RunConfig(
        data=DataConfig([str(out / "sentences.txt")], tokenizer="bpe:420", packing="lines"),
        model=ModelConfig(width=128, depth=3, heads=4, seq_len=LENGTH, parameterization="mean"),
        optim=OptimConfig(lr=2e-3, warmup_steps=50, ema_decay=0.99),
        budget=BudgetConfig(minutes=minutes),
        train=TrainConfig(batch_size=128, eval_every=60, eval_sequences=6_000, save_every=0, log_every=100),
    ).resolved()
    sources = config.data.sources
    tokenizer = factory.build_tokenizer("bpe:420", lambda: data.read_documents(sources, packing="lines"))
    data.prepare(sources, out / "data", tokenizer, packing="lines", length=LENGTH, pad="model")
    held_out = data.TokenBlocks.open(out / "data", LENGTH, "validation", config.data.val_fraction)
    rows, _ = held_out.read(np.arange(len(held_out)))
    own = sum(nats_of(held_out.tokenizer.decode(row)) for row in rows) / len(rows)
    print(f"entropy: {entropy:.4f} nats a sentence")
    print(f"the {len(rows)} held out: −log p of {own:.4f} on average, which no model can better but by luck\n")
    columns = (TextColumn("training"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def on_event(kind: str, record: dict[str, Any]) -> None:
            if kind == "log":
                bar.update(task, completed=record["spent"])
                if "bound" in record:
                    nats = record["bound"] * LENGTH
                    error = record["bound_stderr"] * LENGTH
                    print(f"step {record['step']:5d}   bound {nats:7.3f} ± {error:.3f} nats a sentence")

        training.run(config, lambda: out / "data", out / "run", resume=False, on_event=on_event)
    plot(out, entropy, own)
    show(out)


def plot(out: Path, entropy: float, own: float) -> None:
    """The bound against steps, what it can fall to, and the entropy that this is a sample of."""
    records = [record for record in run_log.read_log(out / "run") if "bound" in record]
    figure, axes = plt.subplots(figsize=(7, 4))
    steps, bounds = [r["step"] for r in records], [r["bound"] * LENGTH for r in records]
    axes.errorbar(steps, bounds, [r["bound_stderr"] * LENGTH for r in records], marker="o", label="held-out bound")
    axes.axhline(own, color="black", label=f"−log p of the held-out sentences, {own:.3f}")
    axes.axhline(entropy, color="gray", linestyle="--", label=f"entropy, {entropy:.3f}")
    axes.set(xlabel="step", ylabel="nats a sentence", ylim=(0.9 * entropy, 2 * entropy))
    axes.legend()
    figure.savefig(out / "bound.png", dpi=120, bbox_inches="tight")


def show(out: Path) -> None:
    """Sentences from nothing, and sentences around what is given."""
    loaded = factory.load(out / "run")
    sampling_run = generate.SamplingRun(
        loaded.model, loaded.process, loaded.schedule, generate.SamplingSettings(steps=64)
    )

    def texts(prompt: sampling.Prompt) -> list[str]:
        return [loaded.tokenizer.decode(row.ids) for row in sampling_run.sample(prompt)]

    drawn = texts(sampling.empty(200, LENGTH))
    good = sum(is_grammatical(text) for text in drawn)
    print(f"\nfrom nothing ({good} of {len(drawn)} are grammatical):")
    for text in drawn[:5]:
        print(f"  {text}")
    for template in ("the{2} sees a{2}.", "two{3} every red owl."):
        ids = generate.template.template_ids(template, loaded.tokenizer)
        print(f"\nfilling  {template}")
        for text in texts(generate.template.prompt_from_ids([ids] * 3, LENGTH, loaded.process.vocab_size)):
            print(f"  {text}")
    rows = sampling_run.sample(sampling.empty(12, LENGTH))
    tokens = [generate.trace.trace_tokens(loaded.tokenizer, row) for row in rows]
    page = generate.trace.trace_page(tokens, "Twelve sentences", "Sampler exact, 64 steps.")
    (out / "trace.html").write_text(page, encoding="utf-8")
    (out / "samples.json").write_text(json.dumps({"grammatical": good, "of": len(drawn), "texts": drawn}, indent=1))
    print(f"\nthe model is in {out}/run, pictures in {out}/bound.png and {out}/trace.html")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="the folder to write; what is there goes")
    parser.add_argument("--minutes", type=float, default=2.3, help="how long to train")
    arguments = parser.parse_args()
    main(arguments.out, arguments.minutes)
