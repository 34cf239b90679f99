"""Six sentences over eight words, and a small network that learns them: what `one_step` and `all_masked` share."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd import exact, factory, generate, sampling
from sedd.config import OptimConfig
from sedd.diffusion import categorical
from sedd.diffusion.objective import Objective
from sedd.diffusion.parameterization import MeanModel
from sedd.diffusion.process import Process
from sedd.diffusion.schedule import Schedule, stratified
from sedd.training import optimizer as optim

WORDS = ("<pad>", "I", "You", "We", "love", "NLP", "AI", ".")
MASK = "[MASK]"
"""What is said for the state after the last word."""
CORPUS = {
    "I love NLP .": 28,
    "I love AI .": 12,
    "You love NLP .": 10,
    "You love AI .": 25,
    "We love NLP .": 17,
    "We love AI .": 8,
}
"""A hundred sentences. Who speaks says something about what is loved: the two words are not independent."""
LENGTH = 4
BATCH = 256
_OPTIM = OptimConfig(lr=3e-3, warmup_steps=20, final_lr_fraction=0.01)


def read(text: str) -> list[int]:
    """The ids of the words of a sentence."""
    return [(*WORDS, MASK).index(word) for word in text.split()]


def say(ids: Int[Tensor, " L"]) -> str:
    """A sequence in words."""
    return " ".join((*WORDS, MASK)[i] for i in ids.tolist())


def sentences() -> Int[Tensor, "k L"]:
    """The sentences of the corpus: all that are grammatical."""
    return torch.tensor([read(text) for text in CORPUS])


def shares() -> Float[Tensor, " k"]:
    """How often each of them stands in the corpus."""
    counts = torch.tensor(list(CORPUS.values()), dtype=torch.float64)
    return counts / counts.sum()


def law() -> exact.Distribution:
    """The corpus as a law of all sequences of `LENGTH` words."""
    p = torch.zeros((len(WORDS),) * LENGTH, dtype=torch.float64)
    p[tuple(sentences().T)] = shares()
    return exact.Distribution(p)


def draw(count: int, generator: torch.Generator) -> Int[Tensor, "count L"]:
    """``count`` sentences of the corpus, with replacement."""
    return sentences()[categorical.draw(shares().expand(count, -1), generator)]


def network(process: Process, seed: int) -> MeanModel:
    """A denoiser of 49,000 weights, fresh. Its places are told apart, or four masks would all look the same."""
    trunk = factory.build_transformer(
        "modern",
        states=process.num_states,
        width=32,
        depth=2,
        heads=4,
        cond=32,
        generator=torch.Generator().manual_seed(seed),
    )
    return MeanModel(trunk, process)


def fit(model: MeanModel, objective: Objective[Any], steps: int, generator: torch.Generator) -> Iterator[float]:
    """Train ``model`` on draws from the corpus; yields the loss of every step, in nats a sentence."""
    if steps < 1:
        raise ValueError(f"steps is {steps}; learning needs at least 1")
    optimizers = optim.build_optimizers(model, _OPTIM)
    for step in range(steps):
        x_0 = draw(BATCH, generator)
        loss = objective(model, x_0, stratified(BATCH, generator), generator).sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _OPTIM.grad_clip)
        optim.set_learning_rate(optimizers, _OPTIM.lr * optim.lr_multiplier(_OPTIM, step, step / steps))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def sample(
    model: Any, process: Process, schedule: Schedule, count: int, settings: generate.SamplingSettings
) -> Int[Tensor, "count L"]:
    """``count`` sequences from noise."""
    rows = generate.sample(
        generate.SamplingRun(model, process, schedule, settings), sampling.empty(count, LENGTH), count
    )
    return torch.tensor([row.ids for row in rows])


def total_variation(p: Float[Tensor, " k"]) -> float:
    """How far a law that gives the sentences ``p``, and the rest to other sequences, is from the corpus."""
    astray = 1 - p.sum()
    return ((p - shares()).abs().sum() + astray).item() / 2
