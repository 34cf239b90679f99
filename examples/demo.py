"""The demo of ``make demo``: a story forms; then training on sentences of known entropy.

First the model in the box generates a story, fills a gap and scores two sentences, which takes seconds. Then a small
model is trained; its bound approaches the entropy; it samples and fills gaps. Writes ``demo/``: the sentences, the run,
``bound.png`` and ``trace.html``. Training takes about three minutes on two free cores, and longer on a slow or busy
machine: it counts steps, not seconds. Exits with code 1 if it did not converge.
"""

import argparse
import json
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import sedd
from sedd import data, models, samplers, trace
from sedd.loading import load_model
from sedd.terminal import visible
from sedd.tokenizer import build_tokenizer
from sedd.trace import watch_states
from sedd.training import loop
from sedd.training.config import BudgetConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from sedd.training.loop import OnEvent
from sedd.training.progress import format_duration

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LENGTH, SENTENCES = 8, 20_000  # seven words and a full stop, one token each
STEPS, TIMED_STEPS = 500, 20
POINTS = 3  # of the plot, at least
STORY_STEPS, STORY_TEMPERATURE = 64, 0.6
STORY_TEMPLATE = "Once upon a time, there was a dog named Max. {60} Max was very happy. The end."
STORY_SENTENCES = ("Tom was happy because he had a new ball.", "Ball new a had he because happy was Tom.")
TOLERANCE = 0.015  # the bound has converged if it is this close to −log p, as a fraction of it
# Choices and their weights. Subject and verb agree, everything else is independent; derivations are unique.
DETERMINERS = {"the": 4, "a": 3, "every": 1}
ADJECTIVES = {"old": 3, "small": 3, "red": 2, "sleepy": 1}
NOUNS = {"cat": 4, "dog": 3, "fox": 2, "owl": 1}
VERBS = {"sees": 4, "likes": 3, "follows": 2, "hears": 1}
PLURALS = {"two": 3, "many": 2}
SLOTS = [ADJECTIVES, NOUNS, VERBS, DETERMINERS, ADJECTIVES, NOUNS]


def entropy_of(choice: dict[str, int]) -> float:
    """Return the entropy of one choice in nats."""
    total = sum(choice.values())
    return -sum(w / total * math.log(w / total) for w in choice.values())


def sentence_entropy() -> float:
    """Return the exact entropy in nats per sentence: singular or plural (1 bit), then all choices."""
    subject = math.log(2) + (entropy_of(DETERMINERS) + entropy_of(PLURALS)) / 2
    return subject + sum(entropy_of(slot) for slot in SLOTS)


def draw_sentence(rng: random.Random) -> str:
    """Draw a sentence, such as: two old cats like a red fox."""

    def draw(choice: dict[str, int]) -> str:
        return rng.choices(list(choice), list(choice.values()))[0]

    plural = rng.random() < 0.5
    first = draw(PLURALS if plural else DETERMINERS)
    adjective, noun, verb, determiner, other, thing = (draw(slot) for slot in SLOTS)
    noun, verb = (noun + "s", verb.removesuffix("s")) if plural else (noun, verb)
    return f"{first} {adjective} {noun} {verb} {determiner} {other} {thing}."


def is_grammatical(text: str) -> bool:
    """Return whether the grammar can generate ``text``."""
    words = text.removesuffix(".").split(" ")
    if len(words) != 7 or not text.endswith("."):
        return False
    first, adjective, noun, verb, determiner, other, thing = words
    if first in PLURALS:
        noun, verb = noun.removesuffix("s") if noun.endswith("s") else "", verb + "s"
    elif first not in DETERMINERS:
        return False
    choices = (adjective, noun, verb, determiner, other, thing)
    return all(word in slot for word, slot in zip(choices, SLOTS, strict=True))


def nats_of(text: str) -> float:
    """Return the exact −log p of a sentence of the grammar; its derivation is unique."""
    first, *rest = text.removesuffix(".").split(" ")
    number = PLURALS if first in PLURALS else DETERMINERS
    if number is PLURALS:
        rest[1], rest[2] = rest[1].removesuffix("s"), rest[2] + "s"
    choices = zip([first, *rest], [number, *SLOTS], strict=True)
    return math.log(2) - sum(math.log(choice[word] / sum(choice.values())) for word, choice in choices)


class Bound(NamedTuple):
    """The validation bound at a step, in nats per sentence."""

    step: int
    nats: float
    stderr: float

    @staticmethod
    def of(record: Mapping[str, float], step: int) -> "Bound":
        """Read the bound of a record of the log."""
        return Bound(step, record["bound"] * LENGTH, record["bound_stderr"] * LENGTH)


def show_model_in_the_box() -> None:
    """Let the model in the box generate a story while it is shown, fill a gap and score two sentences."""
    if models.DEFAULT not in models.built_in_names():
        print("This build has no model in the box, so the demo begins with training.\n")
        return
    start = time.monotonic()
    model = sedd.load(models.default_model(), device="cpu")
    print(f"A story by the model in the box, {model.parameters:,} parameters; a dot is a token that is still masked:\n")
    sampling_run = samplers.SamplingRun.of(
        model.loaded, samplers.SamplingSettings(steps=STORY_STEPS, temperature=STORY_TEMPERATURE)
    )
    prompt = samplers.blank_prompt(model.loaded, 1, None)
    last = watch_states(sampling_run.states(prompt), prompt, model.loaded, Console())
    (story,) = samplers.final_sequences(last, prompt)
    print(f"{visible(model.tokenizer.decode(story.ids))}\n\n({time.monotonic() - start:.1f} s)\n")
    (filled,) = model.infill(STORY_TEMPLATE, temperature=STORY_TEMPERATURE)
    print(f"Filling a gap of 60 tokens: {STORY_TEMPLATE}\n\n{visible(filled.text)}\n")
    print("Which of two sentences is likelier? −log p of each is at most:\n")
    for bound in model.bound(STORY_SENTENCES, draws=32):
        print(f"  {bound.nats:6.1f} ± {bound.stderr:.1f} nats: {bound.text}")
    commands = f"sedd sample --watch --temperature 0.6; sedd infill {STORY_TEMPLATE!r}; sedd score 'a sentence'"
    print(f"\nTo go on, now or later: {commands}\n")


def main(out: Path, steps: int) -> int:
    """Show the model in the box; train another, compare its bound with the entropy, sample; return the exit code."""
    show_model_in_the_box()
    print("Training a small model on sentences of known entropy.")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    rng = random.Random(0)
    (out / "sentences.txt").write_text("".join(draw_sentence(rng) + "\n" for _ in range(SENTENCES)))
    entropy = sentence_entropy()
    print(f"{SENTENCES:,} sentences such as: {draw_sentence(rng)}")
    config = RunConfig(
        data=DataConfig([str(out / "sentences.txt")], tokenizer="bpe:420", packing="lines"),
        model=ModelConfig(width=128, depth=3, heads=4, seq_len=LENGTH, parameterization="mean"),
        optim=OptimConfig(lr=2e-3, warmup_steps=50, ema_decay=0.99),
        budget=BudgetConfig(steps=steps),
        train=TrainConfig(
            batch_size=128, eval_every=evaluation_interval(steps), eval_sequences=6_000, save_every=0, log_every=100
        ),
    ).resolved()
    sources = config.data.sources
    tokenizer = build_tokenizer("bpe:420", lambda: data.read_documents(sources, packing="lines"))
    data.prepare(sources, out / "data", tokenizer, packing="lines", length=LENGTH, pad="model")
    validation = data.TokenBlocks.open(out / "data", LENGTH, "validation", config.data.val_fraction)
    rows, _ = validation.read(np.arange(len(validation)))
    optimum = sum(nats_of(validation.tokenizer.decode(row)) for row in rows) / len(rows)
    print(f"entropy of the grammar: {entropy:.4f} nats per sentence")
    print(f"mean −log p of the {len(rows)} validation sentences: {optimum:.4f}, which the bound approaches\n")
    bounds: list[Bound] = []
    with show_progress(steps, bounds) as on_event:
        result = loop.run(config, lambda: out / "data", out / "run", resume=False, on_event=on_event)
    if result.signal is not None:
        print(f"stopped by a signal at step {result.state.step} of {steps}; start again for the rest of the demo")
        if bounds:
            plot_bound(bounds, entropy, optimum).savefig(out / "bound.png", dpi=120, bbox_inches="tight")
        return 128 + result.signal
    if bounds[-1:] != [last := Bound.of(result.validation, result.state.step)]:
        bounds.append(last)
    plot_bound(bounds, entropy, optimum).savefig(out / "bound.png", dpi=120, bbox_inches="tight")
    sample_and_infill(out)
    above = last.nats / optimum - 1
    if above > TOLERANCE:
        print(
            f"\nTraining has not converged: after {steps} steps the bound is {above:.0%} above −log p, {optimum:.3f}."
        )
        print(f"Train longer: python examples/demo.py --steps {max(STEPS, 2 * steps)}")
        return 1
    print(f"\nTraining has converged: the bound, {last.nats:.3f}, is {above:.1%} above −log p, {optimum:.3f}.")
    return 0


@contextmanager
def show_progress(steps: int, bounds: list[Bound]) -> Iterator[OnEvent]:
    """Yield a progress callback: a bar on stderr; how long it will take; each bound, which is added to ``bounds``."""
    start, timed_steps = time.monotonic(), min(TIMED_STEPS, evaluation_interval(steps) - 1)
    columns = (TextColumn("training"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def on_event(kind: str, record: dict[str, Any]) -> None:
            if kind != "log":
                return
            bar.update(task, completed=record["spent"])
            per_step = (time.monotonic() - start) / record["step"]
            if "bound" in record:
                bounds.append(Bound.of(record, record["step"]))
                error = f"± {bounds[-1].stderr:.3f} nats per sentence"
                left = format_duration(per_step * (steps - record["step"]))
                print(f"step {record['step']:5d}   bound {bounds[-1].nats:7.3f} {error}, {left} left", flush=True)
            if record["step"] == timed_steps:
                total = format_duration(per_step * steps)
                print(
                    f"{steps} steps of training take about {total} on this machine, evaluations come on top", flush=True
                )

        yield on_event


def evaluation_interval(steps: int) -> int:
    """Return the steps between two evaluations: 50, or fewer so that a short run has a curve and not a point."""
    return min(50, max(1, steps // POINTS))


def plot_bound(records: Sequence[Bound], entropy: float, optimum: float) -> Figure:
    """Plot the bound against steps, beside −log p of the validation sentences and the entropy; all points are shown."""
    figure, axes = plt.subplots(figsize=(7, 4))
    steps, bounds, errors = zip(*records, strict=True)
    axes.errorbar(steps, bounds, errors, marker="o", label="validation bound")
    axes.axhline(optimum, color="black", label=f"−log p of the validation sentences, {optimum:.3f}")
    axes.axhline(entropy, color="gray", linestyle="--", label=f"entropy, {entropy:.3f}")
    top = max(1.5 * entropy, 1.05 * max(bounds))
    axes.set(xlabel="step", ylabel="nats per sentence", xlim=(0, 1.05 * steps[-1]), ylim=(0.9 * entropy, top))
    axes.legend()
    return figure


def sample_and_infill(out: Path) -> None:
    """Sample sentences from noise, fill gaps, and draw when each token appeared."""
    loaded = load_model(out / "run")
    sampling_run = samplers.SamplingRun(loaded.model, samplers.SamplingSettings(steps=64))

    def texts(prompt: samplers.Prompt) -> list[str]:
        return [visible(loaded.tokenizer.decode(row.ids)) for row in sampling_run.sample(prompt)]

    samples = texts(samplers.empty(200, LENGTH))
    good = sum(is_grammatical(text) for text in samples)
    print(f"\nsamples ({good} of {len(samples)} are grammatical):")
    for text in samples[:5]:
        print(f"  {text}")
    for template in ("the{2} sees a{2}.", "two{3} every red owl."):
        ids = samplers.template.template_ids(template, loaded.tokenizer)
        print(f"\ninfilling  {template}")
        for text in texts(samplers.template.prompt_from_ids([ids] * 3)):
            print(f"  {text}")
    rows = sampling_run.sample(samplers.empty(12, LENGTH))
    tokens = [trace.trace_tokens(loaded.tokenizer.tokens(row.ids), row.reveal_step) for row in rows]
    page = trace.trace_page(tokens, "Twelve sentences", "Sampler first-hitting, 64 steps.")
    (out / "trace.html").write_text(page, encoding="utf-8")
    (out / "samples.json").write_text(json.dumps({"grammatical": good, "of": len(samples), "texts": samples}, indent=1))
    print(f"\nThe model is in {out}/run; pictures are in {out}/bound.png and {out}/trace.html. To go on:")
    if shutil.which("sedd") is None:
        print(f"  source {os.path.relpath(sys.prefix)}/bin/activate    # puts the command sedd on this shell's PATH")
    print(f"  sedd sample {out}/run -n 4 --watch")
    print(f"  sedd infill {out}/run 'the{{2}} sees a{{2}}.'")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder to write; its content is replaced")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps")
    arguments = parser.parse_args()
    sys.exit(main(arguments.out, arguments.steps))
