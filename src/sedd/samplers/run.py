"""Sampling runs: a model with its sampling settings, from noise to token sequences."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sedd.draws import PRECISION
from sedd.parameterization import CausalModel
from sedd.samplers.first_hitting import LeftToRight
from sedd.samplers.guidance import Guided
from sedd.samplers.loop import Prompt, Sampler, State, Steps, empty, sigma_of_masked_fraction
from sedd.samplers.model import SamplingModel, SamplingStats, networks
from sedd.samplers.warping import Warped
from sedd.sampling_settings import GRIDS, SAMPLERS, SamplingSettings, check_length, check_sampler_options
from sedd.schema import check_count, check_memory
from sedd.tokenizer import Ids

if TYPE_CHECKING:
    from sedd.loading import LoadedModel

OnProgress = Callable[[int, int], None]


def default_sampler_name(model: Any) -> str:
    """Return first-hitting for a denoiser of masks, ancestral for other denoisers, and tweedie for scores."""
    *_, network = networks(model)
    if isinstance(network, CausalModel):
        return "left-to-right"
    if not hasattr(network, "log_mean_at"):
        return "tweedie"
    return "first-hitting" if network.process.only_masks else "ancestral"


def build_sampler(name: str | None, model: Any, **options: Any) -> Sampler:
    """Build a sampler with its options for a model, or for a wrapper of one; None: the model's default sampler."""
    default = default_sampler_name(model)
    if default == "left-to-right":
        if name is not None or options:
            raise ValueError("the model is autoregressive and goes from left to right; leave out sampler and options")
        return LeftToRight()
    if options:
        check_sampler_options(name or default, options)
    sampler: Sampler = SAMPLERS.load(name or default)(**options)
    sampler.check(model)
    return sampler


def build_grid(spec: str, steps: int | None) -> Steps:
    """Build a grid from ``uniform``, ``cosine``, or the times themselves, as in ``1,0.6,0.2,0``; None: no grid."""
    if steps is None:
        return None
    if "," not in spec:
        times: Tensor = GRIDS.load(spec)(steps)
        return times
    try:
        return [float(word) for word in spec.split(",")]
    except ValueError:
        raise ValueError(f"grid is {spec!r}; it must be numbers from 1 down to 0, as in 1,0.7,0.3,0") from None


class GeneratedSequence(NamedTuple):
    """The token ids of a sample, and when each was revealed."""

    ids: list[int]
    reveal_step: list[int]  # the step at which each token took its value; 0 for a given token


class SamplingRun:
    """A model with its sampler, time grid and seed; ``stats`` counts samples, network calls and seconds.

    Args:
        model: A model, `exact.Score`, or a wrapper of one.
        settings: How to sample. The label and guidance are those of `of`, which binds them to the model.
    """

    def __init__(self, model: Any, settings: SamplingSettings, fused: bool | None = None) -> None:
        self.settings, self.stats, self.fused = settings, SamplingStats(), fused
        warping = settings.temperature, settings.top_p, settings.top_k
        self.model = model if warping == (1, 1, None) else Warped(model, *warping)
        self.name = settings.sampler or default_sampler_name(model)
        self.sampler = build_sampler(settings.sampler, model, **settings.options)
        self.times = self.sampler.times(build_grid(settings.grid, settings.steps))

    @staticmethod
    def of(loaded: "LoadedModel", settings: SamplingSettings, fused: bool | None = None) -> "SamplingRun":
        """Build the run of a loaded model with the label of the settings, guidance to it, and the model's padding."""
        model: Any = loaded.model
        if settings.label is not None and settings.guidance:
            model = loaded.with_label(settings.label).model
            if settings.guidance != 1 and isinstance(model, CausalModel):
                raise ValueError("guidance mixes scores, and an autoregressive model has none; leave it out")
            model = model if settings.guidance == 1 else Guided(model, loaded.model, settings.guidance)
        if loaded.learned_pad is not None and settings.sampler in ("confidence", "entropy"):  # else it comes first
            settings = replace(settings, options={"pad": loaded.learned_pad, **settings.options})
        return SamplingRun(model, settings, fused)

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain data, with the name of the sampler that was chosen."""
        steps = "inf" if self.settings.steps is None else self.settings.steps
        return {**asdict(self.settings), "sampler": self.name, "steps": steps, "draw_precision": PRECISION}

    def states(self, prompt: Prompt, first: int = 0) -> Iterator[State]:
        """Yield the states of one batch, from noise to data; a sample is a function of its index and the seed."""
        start, stats = time.perf_counter(), self.stats
        model = SamplingModel(self.model, fused=self.fused, stats=stats)
        prompt = prompt.to(model.device)
        if prompt.given.device.type == "cpu":  # a GPU says itself that its memory is too small
            (rows, length), vocab_size = prompt.given.shape, self.model.process.vocab_size
            what = f"a batch of {rows} samples of {length:,} tokens with {vocab_size} probabilities each takes"
            check_memory(4 * rows * length * vocab_size, what, "choose a smaller batch or length")
        indices = first + torch.arange(len(prompt.given), device=prompt.given.device)
        for state in self.sampler.trajectory(model, prompt, seed=self.settings.seed, steps=self.times, rows=indices):
            if state.x.device.type == "cpu":  # a GPU is waited for at the end alone
                model.check_finite()
            yield state
        model.check_finite(state.x[prompt.blank])
        shown = torch.arange(prompt.given.shape[1], device=prompt.given.device) < prompt.text_lengths[:, None]
        stats.samples, stats.tokens = stats.samples + len(indices), stats.tokens + int((prompt.blank & shown).sum())
        stats.clamped, expected = int(stats.clamped), 0.0
        for blanks in prompt.blank.sum(-1).tolist():
            expected += self.sampler.expected_calls(self.model, self.times, blanks)
        stats.expected_calls += len(networks(self.model)) * expected
        stats.seconds += time.perf_counter() - start

    def batches(
        self,
        prompt: Prompt,
        batch: int,
        on_progress: OnProgress = lambda done, total: None,
        show: Callable[..., State] | None = None,
    ) -> Iterator[list[GeneratedSequence]]:
        """Yield the samples of a prompt, ``batch`` rows at a time; the batch size changes no sample.

        Args:
            on_progress: Is called with the row steps done and their total.
            show: Consumes the states of a batch instead, given its prompt and ``first``, as `trace.watch_states` does.
        """
        check_count("batch", batch)
        total, grid = len(prompt.given), len(self.times)
        steps = grid - 1 if grid else max([1, *prompt.blank.sum(-1).tolist()])  # without a grid, one token per step
        for first in range(0, total, batch):
            part = prompt.rows(slice(first, first + batch))
            states, size = self.states(part, first), len(part.given)
            if show is not None:
                last = show(states, part, first=first)
            else:
                for last in states:
                    on_progress(round((first + size * last.step / max(steps, last.step)) * steps), total * steps)
                on_progress((first + size) * steps, total * steps)  # the last step may change nothing
            yield final_sequences(last, part)

    def sample(
        self, prompt: Prompt, batch: int = 64, on_progress: OnProgress = lambda done, total: None
    ) -> list[GeneratedSequence]:
        """Generate all rows of a prompt, as `batches` yields them."""
        return list(chain.from_iterable(self.batches(prompt, batch, on_progress)))


def blank_prompt(loaded: "LoadedModel", count: int, length: int | None) -> Prompt:
    """Return ``count`` rows of ``length`` tokens to fill, by default the model's sequence length."""
    seq_len = loaded.config.model.seq_len
    check_length(length, seq_len)
    return empty(count, length or seq_len)


def final_sequences(last: State, prompt: Prompt) -> list[GeneratedSequence]:
    sequences = []
    for x, step, length in zip(last.x.tolist(), last.reveal_step.tolist(), prompt.text_lengths.tolist(), strict=True):
        sequences.append(GeneratedSequence(x[:length], step[:length]))
    return sequences


def decode_greedy(loaded: "LoadedModel", context: Ids, length: int) -> Iterator[tuple[int, int]]:
    """Yield positions after ``context`` and their tokens, in the order in which they are filled.

    An autoregressive model fills from left to right; under absorbing noise the position with the most probable token
    comes first. Under other noise no token is final before the last step: the positions come at the end, as the default
    sampler fills them with ``top_k=1``.
    """
    given = torch.from_numpy(context).to(loaded.device)
    if loaded.process.only_masks and not isinstance(loaded.model, CausalModel):
        yield from _most_probable_first(loaded, given, length)
        return
    run = SamplingRun(loaded.model, SamplingSettings(top_k=1))
    for state in run.states(Prompt(torch.nn.functional.pad(given, (0, length), value=-1)[None])):
        if isinstance(run.sampler, LeftToRight) and state.step:
            yield state.step - 1, int(state.x[0, len(given) + state.step - 1])
    if not isinstance(run.sampler, LeftToRight):
        yield from enumerate(state.x[0, len(given) :].tolist())


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
