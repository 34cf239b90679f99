"""Models as samplers call them: wrappers that change a model's output, and the model during one run.  [§9]"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd import draws, reverse
from sedd.draws import AffineWeights
from sedd.ops.categorical import HeadLogits, sample_categorical
from sedd.parameterization import MeanModel, PerRow, ScoreModel
from sedd.process import Process
from sedd.runtime.device import has_triton
from sedd.runtime.offload import OffloadedNetwork
from sedd.schedule import Schedule

Hidden = Float[Tensor, "k h"]  # hidden states at k positions
TokenAt = Int[Tensor, " k"]  # the tokens there
TableAt = Float[Tensor, "k _"]  # one number for each state or token there
Uniforms = Float[Tensor, "*s 2"]  # two for each position: by the first it changes, by the second to what
Sequences = Int[Tensor, "b L"]  # the tokens of b rows
Positions = Bool[Tensor, "b L"]  # a choice of positions in them
PerSample = Float[Tensor, " b"]  # the time or the noise level of each row
RowStates = Float[Tensor, "_ _ h"]  # the hidden states of some rows

NOT_FINITE = (
    "the network's output is not finite, or beyond the range of floating point, so that nothing can be drawn from it; "
    "its weights are damaged, or its training diverged: use another checkpoint"
)


def is_denoiser(model: Any) -> bool:
    """Return whether a model predicts the clean token; of any other model the score implies p(x_0 | x)."""
    return model.is_denoiser if isinstance(model, Wrapper) else hasattr(model, "log_mean_at")


def networks(model: Any) -> tuple[Any, ...]:
    """Return the parameterized networks that a call of a model runs: two with guidance, the one without label first."""
    return model.networks if isinstance(model, Wrapper) else (model,)


def log_score_at(model: Any, hidden: Hidden, x: TokenAt, sigma: PerRow) -> TableAt:
    """Return the log-score in float64, since long steps under uniform noise multiply rounding errors by e^Δσ."""
    log_score: Tensor = model.log_score_at(hidden, x, sigma)
    return log_score.double()


def implied_probs_at(model: Any, hidden: Hidden, x: TokenAt, sigma: PerRow) -> TableAt:
    """Return the p(x_0 | x) that the score implies."""
    log_score = log_score_at(model, hidden, x, sigma)
    return reverse.denoised_probs(model.process, log_score[:, None], x[:, None], sigma)[:, 0]


class Wrapper(nn.Module, ABC):
    """A model on top of another, with its process and schedule.

    Calling it returns log-scores, as for every model. A subclass says how it changes the log-score and p(x_0 | x) at
    some positions. Each call of it first runs ``unconditional``, if given.
    """

    is_denoiser: bool  # whether it predicts the clean token, rather than by its score

    def __init__(self, model: Any, unconditional: Any = None) -> None:
        super().__init__()
        self.model, self.unconditional = model, unconditional
        self.networks = networks(model) if unconditional is None else (*networks(unconditional), *networks(model))
        self.process: Process = model.process
        self.schedule: Schedule = model.schedule
        self.depends_on_sigma = any(network.depends_on_sigma for network in self.networks)

    def hidden(self, x_t: Sequences, sigma: PerSample, valid: Positions | None = None) -> RowStates:
        """Return what `log_score_at` and `log_mean_at` are computed from, at every position; of two, side by side."""
        hidden: Tensor = self.model.hidden(x_t, sigma, valid)
        if self.unconditional is None:
            return hidden
        return torch.cat([self.unconditional.hidden(x_t, sigma, valid), hidden], -1)

    @abstractmethod
    def log_score_at(self, hidden: Hidden, x_t: TokenAt, sigma: PerRow) -> TableAt:
        """Return the log-score at k positions."""

    @abstractmethod
    def log_mean_at(self, hidden: Hidden, x_t: TokenAt, sigma: PerRow) -> TableAt:
        """Return log p(x_0 | x_t) at k positions."""

    def forward(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        return self._everywhere(self.log_score_at, x_t, sigma)

    @final
    def log_mean(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L N"]:
        return self._everywhere(self.log_mean_at, x_t, sigma)

    def _everywhere(self, function_at: Callable[..., Tensor], x_t: Tensor, sigma: Tensor) -> Tensor:
        rows, length = x_t.reshape(-1, x_t.shape[-1]), x_t.shape[-1]
        hidden = self.hidden(rows, sigma.reshape(-1)).flatten(0, 1)
        found = function_at(hidden, rows.flatten(), sigma.reshape(-1).repeat_interleave(length))
        return found.view(*x_t.shape, -1)


@dataclass
class SamplingStats:
    """Counts and time of a sampling run so far, summed over its batches."""

    samples: int = 0
    tokens: int = 0  # generated ones; given ones are not counted
    expected_calls: float = 0.0  # of the network per sample, summed over samples; NaN where not known in advance
    row_calls: int = 0  # calls of the network per sample, summed over samples
    batch_calls: int = 0  # calls of the network, each for any number of samples
    clamped: int | Tensor = 0  # distributions with negative entries, clamped to 0; a tensor during a run
    finite: bool | Tensor = True  # whether all hidden states and sums of p(x_0 | x) were finite; a tensor during a run
    seconds: float = 0.0


@final
class SamplingModel:
    """A model during one sampling run: its calls are counted, and tokens are drawn from what it returns.

    Args:
        model: A model with hidden states: a parameterized network, `exact.Score`, or a `Wrapper` of one.
        fused: Whether tokens are drawn from logits without a table of probabilities; None: where there is a kernel.
        stats: The counts to add to.
    """

    def __init__(self, model: Any, *, fused: bool | None = None, stats: SamplingStats | None = None) -> None:
        for name in ("process", "schedule", "hidden"):
            if not hasattr(model, name):
                advice = "pass MeanModel(network, process) or ScoreModel(network, process), not the network"
                raise TypeError(f"{type(model).__name__} is not a model, it has no {name}; {advice}")
        self.model, self.stats = model, stats or SamplingStats()
        on_cpu = not isinstance(model, nn.Module) or OffloadedNetwork in map(type, model.modules())
        weight = None if on_cpu else next(model.parameters(), None)
        self.device = torch.device("cpu") if weight is None else weight.device  # of tokens
        self.process: Process = model.process
        self.schedule: Schedule = model.schedule
        fused = self.device.type == "cuda" and has_triton() if fused is None else fused
        self.fused = fused and self.process.has_fused_forms and isinstance(model, ScoreModel | MeanModel)
        self.cached = not model.depends_on_sigma  # whether hidden states of rows that have not changed are used again
        self.requires_finite = False  # whether hidden states that are not finite raise FloatingPointError

    def hidden(self, x: Sequences, sigma: PerSample, valid: Positions | None = None) -> RowStates:
        """Return the hidden states; no rows are no call."""
        if not len(x):
            return sigma.new_zeros(*x.shape, 1)
        calls = len(networks(self.model))
        self.stats.batch_calls += calls
        self.stats.row_calls += calls * len(x)
        hidden: Tensor = self.model.hidden(x, sigma, valid)
        if self.requires_finite and not hidden.isfinite().all():
            raise FloatingPointError("the network's output is not finite")
        self.stats.finite = (hidden < torch.inf).all() & self.stats.finite  # an exact score has −inf
        return hidden

    def clean_probs_at(self, hidden: Hidden, x: TokenAt, sigma: PerRow) -> TableAt:
        """Return p(x_0 | x) at k positions: a denoiser's own, or the one that the score implies."""
        if is_denoiser(self.model):
            log_mean: Tensor = self.model.log_mean_at(hidden, x, sigma)
            return log_mean.exp()
        return implied_probs_at(self.model, hidden, x, sigma)

    def chunks(self, where: Positions) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        """Yield positions and their rows, so many at a time that a table of probabilities stays small."""
        entries = 2**22 if self.device.type == "cpu" else 2**29 if self.fused else 2**26
        at = where.nonzero().to(self.device, non_blocking=True)
        for some in at.split(max(1, entries // self.process.num_states)):
            if len(some):
                yield (some[:, 0], some[:, 1]), some[:, 0]

    def can_fuse(self, uses_score: bool, dsigma: Float[Tensor, " _"]) -> bool:
        """Return whether a step by so much noise can be drawn from logits, by weights in terms of scores or of p."""
        can = self.fused and self.model.logits_are_scores == uses_score
        # errors of a score grow as e^Δσ unless only masks are noise, and float32 has 7 digits
        return can and not (uses_score and not self.process.only_masks and bool((dsigma > 7).any()))

    def draw_clean(self, hidden: RowStates, x: Sequences, sigma: PerSample, where: Positions, u: Uniforms) -> Sequences:
        """Draw the positions in ``where`` from p(x_0 | x), given the hidden states. It never takes the argmax."""
        y, of_score = x.clone(), self.fused and self.model.logits_are_scores
        for at, row in self.chunks(where):
            level = sigma[row]
            if self.fused and self.can_fuse(of_score, level):
                one, zero = torch.ones_like(level), torch.zeros_like(level)
                weights = reverse.denoising_weights(self.process, level) if of_score else AffineWeights(one, one, zero)
                y[at] = self.draw_fused(hidden[at], x[at], level, u[at], weights)
                continue
            p = self.clean_probs_at(hidden[at], x[at], level)
            self.stats.finite = p.sum(-1).isfinite().all() & self.stats.finite
            p = nn.functional.pad(p, (0, self.process.num_states - self.process.vocab_size))
            y[at] = draws.sample_next(x[at], p, u[at])
        return y

    def draw_fused(self, hidden: Hidden, x: TokenAt, sigma: PerRow, u: Uniforms, weights: AffineWeights) -> TokenAt:
        """Draw the next token at k positions from logits, by weights in terms of the scores or of p(x_0 | x)."""
        is_score, shift = self.model.logits_are_scores, torch.zeros_like(sigma)
        if is_score:
            shift = reverse.log_score_shift(self.process, sigma)
        else:  # logits are those of p(x_0 | x) but for the likelihood of x
            weights = weights.scale_own(reverse.own_log_likelihood(self.process, sigma.double()).exp())
        head = HeadLogits(self.model.logits(hidden), self.process.vocab_size, shift.float(), is_score)
        drawn = sample_categorical(head, x, weights, u)
        self.stats.clamped = self.stats.clamped + drawn.clamped_count
        return drawn.tokens

    def draw_weighted(self, x: TokenAt, weights: TableAt, u: Uniforms) -> TokenAt:
        """Draw the next token at k positions; weights below 0 are clamped, and counted if beyond rounding."""
        total = weights.sum(-1)
        clamped = weights.amin(-1) < -1e-5 * total.abs().clamp_min(1e-30)
        self.stats.clamped = self.stats.clamped + clamped.sum()
        return draws.sample_next(x, weights.clamp_min(0), u)

    def check_finite(self, x: Int[Tensor, "*positions"] | None = None) -> None:
        """Raise ValueError if an output was not finite, or if positions of ``x`` are masks at the end."""
        if not self.stats.finite or (x is not None and (x >= self.process.vocab_size).any()):
            raise ValueError(NOT_FINITE)
