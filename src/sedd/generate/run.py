"""Sampling runs: a model with its sampling settings, from noise to token sequences."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from sedd import factory
from sedd.draws import PRECISION, CounterRNG
from sedd.samplers import Prompt, SamplingModel, State, Warped, empty, networks_per_call
from sedd.sampling_settings import SamplingSettings, check_length
from sedd.schema import check_count

REVEAL_PADDING_LAST = ("confidence", "entropy")
"""Samplers that take the id of padding, as they would else reveal it first."""


@dataclass
class SamplingStats:
    """Counts and time of a sampling run so far, summed over its batches."""

    samples: int = 0
    tokens: int = 0
    """Generated tokens; given ones are not counted."""
    expected_calls: float = 0.0
    """Expected number of network calls per sample, summed over samples; NaN where it is not known in advance."""
    row_calls: int = 0
    """Actual number of network calls per sample, summed over samples."""
    batch_calls: int = 0
    """Network calls, each for any number of samples."""
    clamped: int = 0
    """Distributions with negative entries, which were clamped to 0."""
    seconds: float = 0.0


class GeneratedSequence(NamedTuple):
    """The token ids of a sample, and when each was revealed."""

    ids: list[int]
    reveal_step: list[int]
    """The step at which each token took its value; 0 for a given token."""


class SamplingRun:
    """A model with its sampler, time grid and seed; ``stats`` counts samples, network calls and seconds.

    Args:
        model: A model, `exact.Score`, or a wrapper of one.
        settings: How to sample. The label and guidance are those of `of`, which binds them to the model.
        fused: As for `SamplingModel`.
    """

    def __init__(self, model: Any, settings: SamplingSettings, fused: bool | None = None) -> None:
        self.settings, self.stats, self.fused = settings, SamplingStats(), fused
        self.requires_finite = False
        """Whether hidden states that are not finite raise FloatingPointError."""
        warping = settings.temperature, settings.top_p, settings.top_k
        self.model = model if warping == (1, 1, None) else Warped(model, *warping)
        self.name = settings.sampler or factory.default_sampler_name(model)
        self.sampler = factory.build_sampler(settings.sampler, model, **settings.options)
        self.times = self.sampler.times(factory.build_grid(settings.grid, settings.steps))
        CounterRNG(settings.seed, torch.zeros(0, dtype=torch.long))  # refuse a bad seed before any work

    @staticmethod
    def of(loaded: factory.LoadedModel, settings: SamplingSettings) -> "SamplingRun":
        """Build the run of a loaded model, conditioned on the label of the settings."""
        model = factory.build_guided_model(loaded, settings.label, settings.guidance)
        return SamplingRun(model, with_padding(loaded, settings))

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain data, with the name of the sampler that was chosen."""
        steps = "inf" if self.settings.steps is None else self.settings.steps
        return {**asdict(self.settings), "sampler": self.name, "steps": steps, "draw_precision": PRECISION}

    def expected_calls(self, prompt: Prompt) -> float:
        """Return the expected number of network calls, summed over rows."""
        calls = sum(
            self.sampler.expected_calls(self.model, self.times, count) for count in prompt.blank.sum(-1).tolist()
        )
        return networks_per_call(self.model) * calls

    def states(self, prompt: Prompt, first: int = 0) -> Iterator[State]:
        """Yield the states of one batch, from noise to data.

        Args:
            prompt: The given tokens of each row.
            first: The index of the first row. A sample is a function of its index and the seed.
        """
        if prompt.given.device.type == "cpu":  # a GPU says itself that its memory is too small
            rows, length = prompt.given.shape
            vocab_size = self.model.process.vocab_size
            least = 4 * rows * length * vocab_size
            what = f"a batch of {rows} samples of {length:,} tokens with {vocab_size} probabilities each takes"
            factory.check_memory(least, what, "choose a smaller batch or length")
        start = time.perf_counter()
        indices = first + torch.arange(len(prompt.given), device=prompt.given.device)
        model = SamplingModel(self.model, fused=self.fused)
        model.requires_finite = self.requires_finite
        for state in self.sampler.trajectory(model, prompt, seed=self.settings.seed, steps=self.times, rows=indices):
            if state.x.device.type == "cpu":  # a GPU is waited for at the end alone
                model.check_finite()
            yield state
        model.check_finite(state.x[prompt.blank])
        stats = self.stats
        shown = torch.arange(prompt.given.shape[1], device=prompt.given.device) < prompt.text_lengths[:, None]
        stats.samples, stats.tokens = stats.samples + len(indices), stats.tokens + int((prompt.blank & shown).sum())
        stats.expected_calls += self.expected_calls(prompt)
        stats.row_calls, stats.batch_calls = stats.row_calls + model.rows, stats.batch_calls + model.calls
        stats.clamped += int(model.clamped)
        stats.seconds += time.perf_counter() - start

    def sample(self, prompt: Prompt, batch: int = 64) -> list[GeneratedSequence]:
        """Generate all rows of a prompt, ``batch`` at a time; the batch size changes no sample."""
        check_count("batch", batch)
        sequences: list[GeneratedSequence] = []
        for first in range(0, len(prompt.given), batch):
            part = prompt.rows(slice(first, first + batch))
            *_, last = self.states(part, first)
            sequences += final_sequences(last, part)
        return sequences


def with_padding(loaded: factory.LoadedModel, settings: SamplingSettings) -> SamplingSettings:
    """Return settings with the padding of the model, where the sampler has an option for it that is not given."""
    if loaded.learned_pad is None or settings.sampler not in REVEAL_PADDING_LAST:
        return settings
    return replace(settings, options={"pad": loaded.learned_pad, **settings.options})


def blank_prompt(loaded: factory.LoadedModel, count: int, length: int | None) -> Prompt:
    """Return ``count`` rows of ``length`` tokens to fill, by default the model's sequence length."""
    seq_len = loaded.config.model.seq_len
    check_length(length, seq_len)
    return empty(count, length or seq_len)


def final_sequences(last: State, prompt: Prompt) -> list[GeneratedSequence]:
    """Return the texts of a final state."""
    columns = zip(last.x.tolist(), last.reveal_step.tolist(), prompt.text_lengths.tolist(), strict=True)
    return [GeneratedSequence(x[:length], step[:length]) for x, step, length in columns]
