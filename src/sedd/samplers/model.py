"""Models as samplers call them: wrappers that change a model's output, and the model during one run.  [§9]"""

import copy
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
from sedd.parameterization import MeanModel, ScoreModel
from sedd.process import Process
from sedd.reverse import denoised_probs
from sedd.runtime.device import has_triton
from sedd.runtime.offload import OffloadedNetwork
from sedd.schedule import Schedule

NOT_FINITE = (
    "the network's output is not finite, or beyond the range of floating point, so that nothing can be drawn from it; "
    "its weights are damaged, or its training diverged: use another checkpoint"
)


def is_denoiser(model: Any) -> bool:
    """Return whether a model predicts the clean token; of any other model the score implies p(x_0 | x)."""
    return model.is_denoiser if isinstance(model, Wrapper) else hasattr(model, "log_mean_at")


def base_model(model: Any) -> Any:
    """Return the model inside all wrappers."""
    return base_model(model.model) if isinstance(model, Wrapper) else model


def log_score_at(
    model: Any, hidden: Float[Tensor, "k h"], x: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
) -> Float[Tensor, "k n"]:
    """Return the log-score in float64, since long steps under uniform noise multiply rounding errors by e^Δσ."""
    log_score: Tensor = model.log_score_at(hidden, x, sigma)
    return log_score.double()


def implied_probs_at(
    model: Any, hidden: Float[Tensor, "k h"], x: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
) -> Float[Tensor, "k N"]:
    """Return the p(x_0 | x) that the score implies."""
    log_score = log_score_at(model, hidden, x, sigma)
    return denoised_probs(model.process, log_score[:, None], x[:, None], sigma)[:, 0]


def clean_probs_at(
    model: Any, hidden: Float[Tensor, "k h"], x: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
) -> Float[Tensor, "k N"]:
    """Return p(x_0 | x): a denoiser's own, or the one that the score implies."""
    if not is_denoiser(model):
        return implied_probs_at(model, hidden, x, sigma)
    log_mean: Tensor = model.log_mean_at(hidden, x, sigma)
    return log_mean.exp()


class Wrapper(nn.Module, ABC):
    """A model on top of another, with its process and schedule.

    Calling it returns log-scores, as for every model. A subclass says how it changes the log-score and p(x_0 | x) at
    some positions.

    Args:
        model: The model that is wrapped.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def process(self) -> Process:
        """The noise process."""
        process: Process = self.model.process
        return process

    @property
    def schedule(self) -> Schedule:
        """The noise schedule."""
        schedule: Schedule = self.model.schedule
        return schedule

    @property
    def depends_on_sigma(self) -> bool:
        """Whether `hidden` depends on the noise level."""
        return bool(self.model.depends_on_sigma)

    @property
    def networks_per_call(self) -> int:
        """Network calls per call of this model."""
        return networks_per_call(self.model)

    @property
    @abstractmethod
    def is_denoiser(self) -> bool:
        """Whether it predicts the clean token, rather than by its score."""

    def hidden(
        self, x_t: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b L h"]:
        """Return what `log_score_at` and `log_mean_at` are computed from, at every position."""
        hidden: Tensor = self.model.hidden(x_t, sigma, valid)
        return hidden

    @abstractmethod
    def log_score_at(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n"]:
        """Return the log-score at k positions."""

    @abstractmethod
    def log_mean_at(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k N"]:
        """Return log p(x_0 | x_t) at k positions."""

    def forward(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """Return the log-score at every position."""
        return self._everywhere(self.log_score_at, x_t, sigma)

    @final
    def log_mean(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L N"]:
        """Return log p(x_0 | x_t) at every position."""
        return self._everywhere(self.log_mean_at, x_t, sigma)

    def _everywhere(self, function_at: Callable[..., Tensor], x_t: Tensor, sigma: Tensor) -> Tensor:
        rows, length = x_t.reshape(-1, x_t.shape[-1]), x_t.shape[-1]
        hidden = self.hidden(rows, sigma.reshape(-1)).flatten(0, 1)
        found = function_at(hidden, rows.flatten(), sigma.reshape(-1).repeat_interleave(length))
        return found.view(*x_t.shape, -1)


def networks_per_call(model: Any) -> int:
    """Return the network calls per call of a model: two with guidance."""
    return model.networks_per_call if isinstance(model, Wrapper) else 1


@dataclass
class Counts:
    """What a model did during a run."""

    calls: int = 0
    """How often a network was called, on any number of rows."""
    rows: int = 0
    """On how many rows in all."""
    clamped: Tensor | int = 0
    """How many positions had a weight below 0, which was clamped."""
    finite: Tensor | bool = True
    """Whether no hidden state was NaN or inf, and all sums of p(x_0 | x) were finite; no GPU is waited for."""


@final
class SamplingModel:
    """A model during one sampling run: hidden states are cached, calls are counted, and tokens are drawn.

    Of a model that does not depend on the noise level, hidden states are computed again only for rows that have
    changed since the last call.

    Reference: caching of time-free models is that of Ou et al. 2024, arXiv 2406.03736.

    Args:
        model: A model with hidden states: a parameterized network, `exact.Score`, or a `Wrapper` of one.
        cached: Whether hidden states of unchanged rows are reused, where that is exact.
        fused: Whether tokens are drawn from logits without a table of probabilities; None: where there is a kernel.
    """

    def __init__(self, model: Any, *, cached: bool = True, fused: bool | None = None) -> None:
        if lacks := [name for name in ("process", "schedule", "hidden") if not hasattr(model, name)]:
            raise TypeError(
                f"{type(model).__name__} is not a model, it has no {', '.join(lacks)}; pass MeanModel(network, "
                "process) or ScoreModel(network, process), not the network"
            )
        self.model, self.device = model, device_of(model)
        self.process: Process = model.process
        self.schedule: Schedule = model.schedule
        fused = self.device.type == "cuda" and has_triton() if fused is None else fused
        self.fused = fused and self.process.has_fused_forms and isinstance(model, ScoreModel | MeanModel)
        """Whether tokens are drawn from logits without a table of probabilities."""
        self.cached = cached and not model.depends_on_sigma
        self.counts, self.networks = Counts(), networks_per_call(model)
        self.requires_finite = False
        """Whether hidden states that are not finite raise FloatingPointError."""
        self.seen = torch.zeros(0, 0, dtype=torch.long)
        self.states: Tensor | None = None
        """The hidden states of ``seen``, whose rows are −1 where they are not known."""
        self._is_next = False
        """Whether the next call of `hidden` or `hidden_of_rows` returns them."""

    # Hidden states -----------------------------------------------------------------------------------------

    def missing(self, x: Int[Tensor, "b L"], needed: Bool[Tensor, " b"]) -> Int[Tensor, " r"] | None:
        """Return the needed rows whose hidden states are not known; None: all rows."""
        if self.cached and self.states is not None:
            changed = (x != self.seen).any(-1)
            self.seen, needed = torch.where(changed[:, None], -1, x), needed & changed
        else:
            self.seen, self.states = torch.full_like(x, -1), None
        return None if needed.all() else needed.nonzero().squeeze(-1)

    def provide(self, x: Int[Tensor, "b L"], index: Int[Tensor, " r"] | None, hidden: Float[Tensor, "r _ h"]) -> None:
        """Set the hidden states of some rows, None for all; the next call of `hidden` returns them.

        Rows for which a sampler does not need the model may hold anything.
        """
        if index is None:
            self.seen, self.states = x, hidden
        elif len(index):
            if self.states is None:
                self.states = hidden.new_zeros(len(x), *hidden.shape[1:])
            self.seen = self.seen.index_copy(0, index, x[index])
            self.states = self.states.index_copy(0, index, hidden)
        self._is_next = True

    def take(self, rows: Int[Tensor, " r"]) -> "SamplingModel":
        """Return this model with what it knows of some rows; both count into the same `counts`."""
        part = copy.copy(self)
        if self.states is not None:
            part.seen, part.states = self.seen[rows], self.states[rows]
        return part

    def add_rows(self, count: int) -> None:
        """Make room for more rows, of which nothing is known."""
        if self.states is not None:
            self.seen = nn.functional.pad(self.seen, (0, 0, 0, count), value=-1)
            self.states = nn.functional.pad(self.states, (0, 0, 0, 0, 0, count))

    def hidden(
        self, x: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b _ h"]:
        """Return the hidden states, computed only for rows that have changed since the last call if `cached`."""
        if not self._is_next:
            index = self.missing(x, torch.ones_like(x[:, 0], dtype=torch.bool))
            some = slice(None) if index is None else index
            hidden = self.compute_hidden(x[some], sigma[some], None if valid is None else valid[some])
            self.provide(x, index, hidden)
        self._is_next = False
        return sigma.new_zeros(*x.shape, 1) if self.states is None else self.states  # None: no row needs any

    def hidden_of_rows(
        self,
        rows: Int[Tensor, " r"],
        x: Int[Tensor, "b L"],
        sigma: Float[Tensor, " b"],
        valid: Bool[Tensor, "b L"] | None = None,
    ) -> Float[Tensor, "r L h"]:
        """Return the hidden states of some rows, without the cache."""
        if self._is_next and self.states is not None:
            self._is_next = False
            return self.states[rows]
        return self.compute_hidden(x[rows], sigma[rows], None if valid is None else valid[rows])

    def compute_hidden(
        self, x: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b L h"]:
        """Return the hidden states without the cache; no rows are no call."""
        if not len(x):
            return sigma.new_zeros(*x.shape, 1)
        self.counts.calls += self.networks
        self.counts.rows += self.networks * len(x)
        hidden: Tensor = self.model.hidden(x, sigma, valid)
        if self.requires_finite and not hidden.isfinite().all():
            raise FloatingPointError("the network's output is not finite")
        self.counts.finite = (hidden < torch.inf).all() & self.counts.finite  # an exact score has −inf
        return hidden

    # Distributions at some positions -----------------------------------------------------------------------

    def log_score_at(
        self, hidden: Float[Tensor, "k h"], x: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n"]:
        """Return the log-score at k positions, in float64."""
        return log_score_at(self.model, hidden, x, sigma)

    def log_mean_at(
        self, hidden: Float[Tensor, "k h"], x: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k N"]:
        """Return log p(x_0 | x) of a denoiser at k positions."""
        if not is_denoiser(self.model):
            raise ValueError("sampler ancestral needs a denoiser (parameterization mean); use tweedie for a score")
        log_mean: Tensor = self.model.log_mean_at(hidden, x, sigma)
        return log_mean

    def clean_probs_at(
        self, hidden: Float[Tensor, "k h"], x: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k N"]:
        """Return p(x_0 | x) at k positions: a denoiser's own, or the one that the score implies."""
        return clean_probs_at(self.model, hidden, x, sigma)

    # Draws -------------------------------------------------------------------------------------------------

    def chunks(self, where: Bool[Tensor, "b L"]) -> Iterator[tuple[Int[Tensor, " k"], Int[Tensor, " k"]]]:
        """Yield rows and columns of ``where``, so many at a time that a table of probabilities stays small."""
        entries = 2**22 if self.device.type == "cpu" else 2**29 if self.fused else 2**26
        at = where.nonzero().to(self.device, non_blocking=True)
        for some in at.split(max(1, entries // self.process.num_states)):
            if len(some):
                yield some[:, 0], some[:, 1]

    def draw_clean(
        self, hidden: Float[Tensor, "k h"], x: Int[Tensor, " k"], sigma: Float[Tensor, " k"], u: Float[Tensor, "k 2"]
    ) -> Int[Tensor, " k"]:
        """Draw from p(x_0 | x) at k positions."""
        if self.fused and not (self.model.logits_are_scores and self.process.amplifies_rounding(sigma)):
            if self.model.logits_are_scores:
                return self.draw_fused(hidden, x, sigma, u, reverse.denoising_weights(self.process, sigma))
            one = torch.ones_like(sigma)
            return self.draw_fused(hidden, x, sigma, u, AffineWeights(one, one, torch.zeros_like(sigma)))
        p = self.clean_probs_at(hidden, x, sigma)
        self.counts.finite = p.sum(-1).isfinite().all() & self.counts.finite
        p = nn.functional.pad(p, (0, self.process.num_states - self.process.vocab_size))
        return draws.sample_next(x, p, u)

    def draw_fused(
        self,
        hidden: Float[Tensor, "k h"],
        x: Int[Tensor, " k"],
        sigma: Float[Tensor, " k"],
        u: Float[Tensor, "k 2"],
        weights: AffineWeights,
    ) -> Int[Tensor, " k"]:
        """Draw the next token at k positions from logits, by weights in terms of the scores or of p(x_0 | x)."""
        if not self.model.logits_are_scores:  # logits are those of p(x_0 | x) but for the likelihood of x
            weights = weights.scale_own(reverse.own_log_likelihood(self.process, sigma.double()).exp())
        shift = self.model.logit_shift(sigma).float()
        head = HeadLogits(self.model.logits(hidden), self.process.vocab_size, shift, self.model.logits_are_scores)
        drawn = sample_categorical(head, x, weights, u)
        self.counts.clamped = self.counts.clamped + drawn.clamped_count
        return drawn.tokens

    def draw_weighted(
        self, x: Int[Tensor, " k"], weights: Float[Tensor, "k n"], u: Float[Tensor, "k 2"]
    ) -> Int[Tensor, " k"]:
        """Draw the next token at k positions; weights below 0 are clamped, and counted if beyond rounding."""
        total = weights.sum(-1)
        clamped = weights.amin(-1) < -1e-5 * total.abs().clamp_min(1e-30)
        self.counts.clamped = self.counts.clamped + clamped.sum()
        return draws.sample_next(x, weights.clamp_min(0), u)

    def check_finite(self, x: Int[Tensor, "*positions"] | None = None) -> None:
        """Raise ValueError if an output was not finite, or if positions of ``x`` are masks at the end."""
        if not self.counts.finite or (x is not None and (x >= self.process.vocab_size).any()):
            raise ValueError(NOT_FINITE)


def device_of(model: Any) -> torch.device:
    """Return the device of a model's tokens: that of its weights, or the CPU where it has none or is offloaded."""
    if isinstance(model, nn.Module):
        for part in model.modules():
            if isinstance(part, OffloadedNetwork):
                return torch.device("cpu")
        for weight in model.parameters():
            return weight.device
    return torch.device("cpu")
