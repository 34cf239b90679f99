"""A corpus of six sentences over eight words, and a small denoiser trained on it; for `one_step` and `all_masked`."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd import draws, exact, samplers
from sedd.nn.transformer import Modern
from sedd.objectives import Objective
from sedd.parameterization import MeanModel
from sedd.process import Process
from sedd.schedule import LogLinear, Schedule
from sedd.training import optimizer as optim
from sedd.training.config import OptimConfig

WORDS = ("<pad>", "I", "You", "We", "love", "NLP", "AI", ".")
MASK = "[MASK]"
"""The text of the mask, which is the state after the last word."""
CORPUS = {
    "I love NLP .": 28,
    "I love AI .": 12,
    "You love NLP .": 10,
    "You love AI .": 25,
    "We love NLP .": 17,
    "We love AI .": 8,
}
"""How often each sentence occurs among a hundred. Subject and object are not independent."""
LENGTH = 4
BATCH = 256
_OPTIM = OptimConfig(lr=3e-3, warmup_steps=20, final_lr_fraction=0.01)


def sentence_ids(text: str) -> list[int]:
    """Return the ids of the words of a sentence."""
    return [(*WORDS, MASK).index(word) for word in text.split()]


def sentence_text(ids: Int[Tensor, " L"]) -> str:
    """Return the words of a sequence."""
    return " ".join((*WORDS, MASK)[i] for i in ids.tolist())


def corpus_ids() -> Int[Tensor, "k L"]:
    """Return the sentences of the corpus as ids; every other sequence counts as ungrammatical."""
    return torch.tensor([sentence_ids(text) for text in CORPUS])


def corpus_frequencies() -> Float[Tensor, " k"]:
    """Return the relative frequency of each sentence in the corpus."""
    counts = torch.tensor(list(CORPUS.values()), dtype=torch.float64)
    return counts / counts.sum()


def corpus_distribution() -> exact.Distribution:
    """Return the corpus as a distribution over all sequences of `LENGTH` words."""
    p = torch.zeros((len(WORDS),) * LENGTH, dtype=torch.float64)
    p[tuple(corpus_ids().T)] = corpus_frequencies()
    return exact.Distribution(p)


def draw_sentences(count: int, generator: torch.Generator) -> Int[Tensor, "count L"]:
    """Draw ``count`` sentences of the corpus, with replacement."""
    return corpus_ids()[draws.sample(corpus_frequencies().expand(count, -1), generator)]


def build_denoiser(process: Process, seed: int, schedule: Schedule = LogLinear()) -> MeanModel:
    """Build an untrained denoiser with 49,000 parameters. It has positions, without which four masks look the same."""
    trunk = Modern(
        states=process.num_states,
        width=32,
        depth=2,
        heads=4,
        cond_dim=32,
        generator=torch.Generator().manual_seed(seed),
    )
    return MeanModel(trunk, process, schedule)


def train_denoiser(model: MeanModel, objective: Objective, steps: int, seed: int) -> Iterator[float]:
    """Train ``model`` on draws from the corpus; yields the loss of every step, in nats per sentence."""
    generator = torch.Generator().manual_seed(seed)
    optimizers = optim.build_optimizers(model, _OPTIM)
    for step in range(steps):
        x_0 = draw_sentences(BATCH, generator)
        loss = objective(model, x_0, generator=generator).sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _OPTIM.grad_clip)
        optim.set_learning_rate(optimizers, _OPTIM.lr * optim.lr_multiplier(_OPTIM, step, step / steps))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def generate_sentences(model: Any, count: int, settings: samplers.SamplingSettings) -> Int[Tensor, "count L"]:
    """Sample ``count`` sequences from noise."""
    rows = samplers.SamplingRun(model, settings).sample(samplers.empty(count, LENGTH), count)
    return torch.tensor([row.ids for row in rows])


def total_variation(p: Float[Tensor, " k"]) -> float:
    """Return the total variation between the corpus and a distribution.

    Args:
        p: Probabilities of the sentences of the corpus; the rest, 1 − Σp, lies on other sequences.
    """
    other = 1 - p.sum()
    return ((p - corpus_frequencies()).abs().sum() + other).item() / 2
