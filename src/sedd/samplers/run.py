"""Sampling runs: a model with its sampling settings, from noise to token sequences."""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sedd.draws import PRECISION
from sedd.parameterization import CausalModel
from sedd.samplers.first_hitting import LeftToRight
from sedd.samplers.guidance import Guided
from sedd.samplers.loop import Prompt, Sampler, State, empty, given_grid, sigma_of_masked_fraction
from sedd.samplers.model import SamplingModel, base_model, networks_per_call
from sedd.samplers.warping import Warped
from sedd.sampling_settings import GRIDS, SAMPLERS, SamplingSettings, check_length, check_sampler_options
from sedd.schema import check_count, check_memory
from sedd.tokenizer import Ids

if TYPE_CHECKING:
    from sedd.loading import LoadedModel

REVEAL_PADDING_LAST = ("confidence", "entropy")
"""Samplers with an option for the id of padding; without it they would reveal padding first."""


def default_sampler_name(model: Any) -> str:
    """Return first-hitting for a denoiser of masks, ancestral for other denoisers, and tweedie for scores."""
    model = base_model(model)
    if isinstance(model, CausalModel):
        return "left-to-right"
    if not hasattr(model, "log_mean_at"):
        return "tweedie"
    return "first-hitting" if model.process.only_masks else "ancestral"


def default_sampler(model: Any) -> Sampler:
    """Return the sampler of `default_sampler_name`."""
    name = default_sampler_name(model)
    sampler: Sampler = LeftToRight() if name == "left-to-right" else SAMPLERS.load(name)()
    return sampler


def build_sampler(name: str | None, model: Any, **options: Any) -> Sampler:
    """Build a sampler for a model.

    Args:
        name: Its name; None: the default of the model.
        model: A model, or a wrapper of one.
        **options: Options of the sampler: ``theta``, ``eta``, ``sites`` …
    """
    default = default_sampler_name(model)
    if default == "left-to-right":
        if name is not None or options:
            raise ValueError("the model is autoregressive and goes from left to right; leave out sampler and options")
        return LeftToRight()
    if name == "ancestral" and default == "tweedie":
        raise ValueError(
            "sampler ancestral needs a denoiser (parameterization mean); the model is a score: use tweedie"
        )
    if options:
        check_sampler_options(name or default, options)
    sampler: Sampler = SAMPLERS.load(name or default)(**options)
    sampler.check(model)
    return sampler


def build_grid(spec: str, steps: int | None) -> Tensor:
    """Build the times of a sampler, from 1 down to 0.

    Args:
        spec: ``uniform``, ``cosine``, or the times themselves, as in ``1,0.6,0.2,0``.
        steps: Number of steps; None: no grid, for samplers that need none.
    """
    if steps is None:
        return torch.zeros(0, dtype=torch.float64)
    if "," in spec:
        try:
            return given_grid([float(word) for word in spec.split(",")])
        except ValueError as error:
            raise ValueError(f"grid is {spec!r}: {error}") from None
    times: Tensor = GRIDS.load(spec)(steps)
    return times


def build_guided_model(loaded: "LoadedModel", label: str | None, guidance: float = 1.0) -> Any:
    """Build the model to sample from: conditioned on a label, with classifier-free guidance.

    Args:
        loaded: The model.
        label: The label; None: none.
        guidance: Guidance weight: 0 is the model without the label, 1 the model of the label; above 1 it extrapolates.
    """
    if not 0 <= guidance < math.inf:
        raise ValueError(
            f"guidance is {guidance}; it must be 0 or more, where 1 is the distribution of the label itself"
        )
    if label is None and guidance != 1:
        raise ValueError(f"guidance is {guidance}, and there is no label to guide to; give one, or leave guidance out")
    conditional = loaded if label is None else loaded.with_label(label)
    if guidance in (0, 1):
        return (conditional if guidance else loaded).model
    if isinstance(conditional.model, CausalModel):
        raise ValueError("guidance mixes scores, and an autoregressive model has none; leave it out")
    return Guided(conditional.model, loaded.model, guidance)


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
        self.name = settings.sampler or default_sampler_name(model)
        self.sampler = build_sampler(settings.sampler, model, **settings.options)
        self.times = self.sampler.times(build_grid(settings.grid, settings.steps))

    @staticmethod
    def of(loaded: "LoadedModel", settings: SamplingSettings) -> "SamplingRun":
        """Build the run of a loaded model, conditioned on the label of the settings."""
        model = build_guided_model(loaded, settings.label, settings.guidance)
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
            check_memory(least, what, "choose a smaller batch or length")
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
        stats.row_calls, stats.batch_calls = stats.row_calls + model.counts.rows, stats.batch_calls + model.counts.calls
        stats.clamped += int(model.counts.clamped)
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


def with_padding(loaded: "LoadedModel", settings: SamplingSettings) -> SamplingSettings:
    """Return settings with the padding of the model, where the sampler has an option for it that is not given."""
    if loaded.learned_pad is None or settings.sampler not in REVEAL_PADDING_LAST:
        return settings
    return replace(settings, options={"pad": loaded.learned_pad, **settings.options})


def blank_prompt(loaded: "LoadedModel", count: int, length: int | None) -> Prompt:
    """Return ``count`` rows of ``length`` tokens to fill, by default the model's sequence length."""
    seq_len = loaded.config.model.seq_len
    check_length(length, seq_len)
    return empty(count, length or seq_len)


def final_sequences(last: State, prompt: Prompt) -> list[GeneratedSequence]:
    """Return the texts of a final state."""
    columns = zip(last.x.tolist(), last.reveal_step.tolist(), prompt.text_lengths.tolist(), strict=True)
    return [GeneratedSequence(x[:length], step[:length]) for x, step, length in columns]


def decode_greedy(loaded: "LoadedModel", context: Ids, length: int) -> Iterator[tuple[int, int]]:
    """Yield positions after ``context`` and their tokens, in the order in which they are filled.

    An autoregressive model fills from left to right; under absorbing noise the position with the most probable token
    comes first. Under other noise no token is final before the last step: the positions come at the end, as the default
    sampler fills them with ``top_k=1``.

    Args:
        loaded: The model.
        context: Tokens that are given.
        length: Tokens to fill after them.
    """
    given = torch.from_numpy(context).to(loaded.device)
    if isinstance(loaded.model, CausalModel):
        return _left_to_right(loaded, given, length)
    return (_most_probable_first if loaded.process.only_masks else _by_sampler)(loaded, given, length)


@torch.no_grad()
def _left_to_right(loaded: "LoadedModel", x: Tensor, length: int) -> Iterator[tuple[int, int]]:
    for position in range(length):
        x = torch.nn.functional.pad(x, (0, 1))  # the model does not read the last token
        x[-1] = loaded.model.log_next(x[None])[0, -1].argmax()  # type: ignore[operator]
        yield position, int(x[-1])


@torch.no_grad()
def _most_probable_first(loaded: "LoadedModel", x: Tensor, length: int) -> Iterator[tuple[int, int]]:
    process, model, start = loaded.process, SamplingModel(loaded.model), len(x)
    x = torch.cat([x, process.prior_sample(torch.zeros(length, device=x.device))])
    while len(masked := process.is_noisy(x).nonzero().squeeze(-1)):
        sigma = sigma_of_masked_fraction(torch.tensor([len(masked) / len(x)], device=x.device), loaded.schedule)
        hidden = model.hidden(x[None], sigma)[0, masked]
        probability, token = model.clean_probs_at(hidden, x[masked], sigma.expand(len(masked))).max(-1)
        position = masked[best := probability.argmax()]
        x = x.index_fill(0, position, int(token[best]))
        yield int(position) - start, int(token[best])


def _by_sampler(loaded: "LoadedModel", x: Tensor, length: int) -> Iterator[tuple[int, int]]:
    prompt = Prompt(torch.nn.functional.pad(x, (0, length), value=-1)[None])
    sampling_run = SamplingRun(loaded.model, SamplingSettings(top_k=1))
    *_, last = sampling_run.states(prompt)
    yield from enumerate(last.x[0, len(x) :].tolist())
