"""A model put to work: states from noise to text, around what is given."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from sedd import factory, registry
from sedd.diffusion.process import Process
from sedd.diffusion.rng import PRECISION, CounterRNG
from sedd.diffusion.schedule import Schedule
from sedd.generate.settings import SamplingSettings
from sedd.sampling import Asked, Prompt, State, Warping, empty, passes


@dataclass
class SamplingStats:
    """What a job has cost so far."""

    samples: int = 0
    tokens: int = 0
    expected: float = 0.0
    """Network calls a row, summed over rows, as foreseen; NaN where nobody could."""
    rows: int = 0
    """The same, as made."""
    calls: int = 0
    """How often the network ran, on however many rows."""
    clamped: int = 0
    seconds: float = 0.0


class GeneratedSequence(NamedTuple):
    """A finished row."""

    ids: list[int]
    when: list[int]
    """The step at which each token took its value; 0: it was given."""


class SamplingRun:
    """A model with its way of sampling; counts what it costs."""

    def __init__(self, model: Any, process: Process, schedule: Schedule, settings: SamplingSettings) -> None:
        self.settings, self.tally = settings, SamplingStats()
        chosen = Warping(settings.temperature, settings.top_p, settings.top_k)
        self.name = settings.sampler or factory.default_sampler(model, process)
        self.sampler = factory.build_sampler(settings.sampler, model, process, schedule, chosen, **settings.options)
        self.times = factory.build_grid(settings.grid, settings.steps)
        if not len(self.times) and not self.sampler.endless:
            able = ", ".join(name for name in registry.SAMPLERS.built_in if registry.SAMPLERS.load(name).endless)
            raise ValueError(f"steps is inf, which the samplers {able} can do; give a number, or choose one of them")
        CounterRNG(settings.seed, torch.zeros(0, dtype=torch.long))  # refuses a bad seed before any work

    @staticmethod
    def of(loaded: factory.LoadedModel, settings: SamplingSettings) -> "SamplingRun":
        """The job of a loaded model, told the label that the settings name."""
        model = factory.guided(loaded, settings.label, settings.guidance)
        return SamplingRun(model, loaded.process, loaded.schedule, settings)

    def facts(self) -> dict[str, Any]:
        """How it samples, for the record."""
        steps = "inf" if self.settings.steps is None else self.settings.steps
        return {**asdict(self.settings), "sampler": self.name, "steps": steps, "draw_precision": PRECISION}

    def expected_calls(self, prompt: Prompt) -> float:
        """Network calls summed over rows, in the mean."""
        asked = sum(self.sampler.expected_calls(self.times, count) for count in prompt.blank.sum(-1).tolist())
        return passes(self.sampler.model) * asked

    @torch.no_grad()
    def states(self, prompt: Prompt, first: int = 0) -> Iterator[State]:
        """The states of a batch whose rows are numbered from ``first``: their numbers decide what is drawn."""
        began = time.perf_counter()
        numbers = first + torch.arange(len(prompt.given), device=prompt.given.device)
        asked = Asked(self.sampler.model)  # type: ignore[arg-type]
        times = self.times.to(prompt.given.device)
        yield from self.sampler.run(prompt, times, CounterRNG(self.settings.seed, numbers), asked)
        done = self.tally
        done.samples, done.tokens = done.samples + len(numbers), done.tokens + int(prompt.blank.sum())
        done.expected += self.expected_calls(prompt)
        done.rows, done.calls = done.rows + asked.rows, done.calls + asked.calls
        done.clamped += int(asked.clamped)
        done.seconds += time.perf_counter() - began


def blank(loaded: factory.LoadedModel, count: int, length: int | None) -> Prompt:
    """``count`` rows of nothing, ``length`` tokens each, or as many as the model was trained on."""
    most = loaded.config.model.seq_len
    if length is not None and not 1 <= length <= most:
        raise ValueError(f"length is {length}; this model goes from 1 to {most}")
    return empty(count, length or most)


def finished(last: State, prompt: Prompt) -> list[GeneratedSequence]:
    """The rows of a last state, each up to its end."""
    columns = zip(last.x.tolist(), last.when.tolist(), prompt.lengths.tolist(), strict=True)
    return [GeneratedSequence(x[:length], when[:length]) for x, when, length in columns]


def sample(job: SamplingRun, prompt: Prompt, batch: int = 64) -> list[GeneratedSequence]:
    """All rows of a canvas, a batch at a time."""
    if batch < 1:
        raise ValueError(f"batch is {batch}; it must be 1 or more")
    rows: list[GeneratedSequence] = []
    for first in range(0, len(prompt.given), batch):
        piece = prompt.rows(slice(first, first + batch))
        *_, last = job.states(piece, first)
        rows += finished(last, piece)
    return rows
