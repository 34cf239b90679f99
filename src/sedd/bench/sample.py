"""Sampling from noise to text, with random weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sedd import factory
from sedd import sampling as sampler
from sedd.bench.measure import Machine, Row, forget, row
from sedd.bench.train import TrainSetting
from sedd.diffusion.rng import CounterRNG

SAMPLE_FLOPS = (
    "a token of a row that is asked about: 24 · depth · width² + 4 · depth · length · width; heads not counted"
)


@dataclass(frozen=True)
class SampleSetting:
    """A batch of samples from nothing."""

    recipe: str = "small"
    process: str = "absorbing"
    objective: str = "lambda-dce"
    """It decides what the network is: a denoiser that is not told the noise, or a score that is."""
    sampler: str | None = None
    """The best known for the model, if None."""
    steps: int = 128
    batch: int = 16
    length: int | None = None
    """That of the recipe, if None."""
    vocab_size: int = 50_257
    precision: str = "bfloat16"
    device: str = "cuda"
    repeats: int = 3

    def __post_init__(self) -> None:
        if self.batch < 1 or self.steps < 1 or self.repeats < 1:
            raise ValueError(f"batch {self.batch}, steps {self.steps}, repeats {self.repeats}: each must be 1 or more")


class Samples:
    """A model that samples; every call is a batch, from noise to text."""

    def __init__(self, s: SampleSetting, swift: bool) -> None:
        run = TrainSetting(s.recipe, s.process, s.objective, length=s.length).run()
        parts = factory.build_setup(run, s.vocab_size)
        network = factory.build_network(run, parts)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in network.parameters():  # a head that says nothing is easier to read than one that does
                parameter.normal_(0, 0.02, generator=generator)
        network = factory.served(network, s.device, s.precision)
        model: Any = factory.build_model(run, network, parts, cuda_graphs=swift)
        self.sampler = factory.build_sampler(s.sampler, model, parts.process, parts.schedule)
        self.times = factory.build_grid("uniform", s.steps).to(s.device)
        self.prompt = sampler.empty(s.batch, run.model.seq_len, s.device)
        self.swift, self.seed, self.asked = swift, 0, sampler.Asked(model)
        m = run.model
        self.flops = m.seq_len * m.depth * (24.0 * m.width**2 + 4 * m.seq_len * m.width)

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        """The samples."""
        self.asked = sampler.Asked(self.sampler.model, swift=None if self.swift else False)  # type: ignore[arg-type]
        rows = CounterRNG(self.seed, torch.arange(len(self.prompt.given), device=self.prompt.given.device))
        *_, last = self.sampler.run(self.prompt, self.times, rows, self.asked)
        self.seed += 1
        return last.x


def sample(s: SampleSetting, on: Machine) -> Iterator[Row]:
    """Time of a step, with recordings and draws without tables, and plain."""
    ways: dict[str, Callable[[], Samples]] = {"fused": lambda: Samples(s, True), "plain": lambda: Samples(s, False)}
    for way, make in ways.items():
        forget(s.device)
        samples = make()
        samples()
        tokens, flops = samples.prompt.given.numel(), samples.flops * samples.asked.rows
        yield row(way, samples, on, s.repeats, tokens, flops, s.steps, warmup=0)
