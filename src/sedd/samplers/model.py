"""Models as samplers call them: wrappers that change a model's output, and the model during one run.  [§9]"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

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
from sedd.schedule import Schedule


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


class DrawPlan(NamedTuple):
    """What a draw at k positions needs besides their hidden states."""

    x: Int[Tensor, " k"]
    sigma: Float[Tensor, " k"]
    u: Float[Tensor, "k 2"]
    weights: AffineWeights | None = None
    """The weights of the next token in terms of the logits; None: they are computed from the model's distribution."""
    shift: Float[Tensor, " k"] | None = None
    """What is added to logits to make them log-scores."""

    def part(self, some: slice) -> "DrawPlan":
        """Return the plan of some of the positions."""
        weights = self.weights and AffineWeights._make(None if a is None else a[some] for a in self.weights)
        shift = None if self.shift is None else self.shift[some]
        return DrawPlan(self.x[some], self.sigma[some], self.u[some], weights, shift)


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
        self.model, self.fused = model, fused
        self.process: Process = model.process
        self.schedule: Schedule = model.schedule
        self.cached = cached and not model.depends_on_sigma
        self.calls = 0
        """How often a network was called, on any number of rows."""
        self.rows = 0
        """On how many rows in all."""
        self.clamped: Tensor | int = 0
        """How many positions had a weight below 0, which was clamped."""
        self.finite: Tensor | bool = True
        """Whether no hidden state was NaN or inf, and all sums of p(x_0 | x) were finite; no GPU is waited for."""
        self.requires_finite = False
        """Whether hidden states that are not finite raise FloatingPointError."""
        self._x: Tensor | None = None
        self._hidden: Tensor | None = None
        self._prefetched: Tensor | None = None

    # Hidden states -----------------------------------------------------------------------------------------

    def prefetch(self, hidden: Float[Tensor, "b L h"]) -> None:
        """Set the hidden states that the next call of `hidden` or `hidden_of_rows` returns.

        Rows for which a sampler does not need the model may hold anything.
        """
        self._prefetched = hidden

    def hidden(
        self, x: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b L h"]:
        """Return the hidden states, computed only for rows that have changed since the last call if `cached`."""
        if self._prefetched is not None:
            self._x, self._hidden, self._prefetched = x, self._prefetched, None
        elif not self.cached or self._hidden is None or self._x is None:
            self._x, self._hidden = x, self.compute_hidden(x, sigma, valid)
        elif (changed := (x != self._x).any(-1)).any():
            fresh = self.compute_hidden(x[changed], sigma[changed], None if valid is None else valid[changed])
            self._x, self._hidden = x, self._hidden.index_put((changed,), fresh)
        return self._hidden

    def hidden_of_rows(
        self,
        rows: Int[Tensor, " r"],
        x: Int[Tensor, "b L"],
        sigma: Float[Tensor, " b"],
        valid: Bool[Tensor, "b L"] | None = None,
    ) -> Float[Tensor, "r L h"]:
        """Return the hidden states of some rows, without the cache."""
        if self._prefetched is not None:
            hidden, self._prefetched = self._prefetched[rows], None
            return hidden
        return self.compute_hidden(x[rows], sigma[rows], None if valid is None else valid[rows])

    def compute_hidden(
        self, x: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b L h"]:
        """Return the hidden states without the cache."""
        networks = networks_per_call(self.model)
        self.calls, self.rows = self.calls + networks, self.rows + networks * len(x)
        hidden: Tensor = self.model.hidden(x, sigma, valid)
        if self.requires_finite and not hidden.isfinite().all():
            raise FloatingPointError("the network's output is not finite")
        self.finite = (hidden < torch.inf).all() & self.finite  # an exact score has −inf
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

    def log_next_at(self, hidden: Float[Tensor, "k h"]) -> Float[Tensor, "k N"]:
        """Return the log-probabilities of the next token of an autoregressive model at k positions."""
        log_p: Tensor = self.model.log_next_at(hidden)
        return log_p

    # Draws -------------------------------------------------------------------------------------------------

    def fused_model(self, device: torch.device) -> ScoreModel | MeanModel | None:
        """Return the model if tokens are drawn from its logits on this device without a table of probabilities."""
        fused = device.type == "cuda" and has_triton() if self.fused is None else self.fused
        fused = fused and self.process.has_fused_forms
        return self.model if fused and isinstance(self.model, ScoreModel | MeanModel) else None

    def chunks(self, where: Bool[Tensor, "b L"]) -> Iterator[Int[Tensor, " k"]]:
        """Yield the flat indices of ``where``, so many at a time that a table of probabilities stays small."""
        at = where.flatten().nonzero().squeeze(-1)
        yield from at.split(self.chunk_size(at.device)) if len(at) else ()

    def chunk_size(self, device: torch.device) -> int:
        """Return how many positions are drawn at once on this device."""
        entries = 2**22 if device.type == "cpu" else 2**29 if self.fused_model(device) else 2**26
        return max(1, entries // self.process.num_states)

    def plan_clean_draw(self, x: Int[Tensor, " k"], sigma: Float[Tensor, " k"], u: Float[Tensor, "k 2"]) -> DrawPlan:
        """Plan a draw from p(x_0 | x) at k positions."""
        model = self.fused_model(x.device)
        if model is None or (model.logits_are_scores and self.process.amplifies_rounding(sigma)):
            return DrawPlan(x, sigma, u)
        if model.logits_are_scores:
            return self.plan_fused_draw(x, sigma, u, reverse.denoising_weights(self.process, sigma))
        weights = AffineWeights(torch.ones_like(sigma), torch.ones_like(sigma), torch.zeros_like(sigma))
        return self.plan_fused_draw(x, sigma, u, weights)

    def plan_fused_draw(
        self, x: Int[Tensor, " k"], sigma: Float[Tensor, " k"], u: Float[Tensor, "k 2"], weights: AffineWeights
    ) -> DrawPlan:
        """Plan a draw from logits, with weights in terms of the scores or of p(x_0 | x)."""
        if not self.model.logits_are_scores:  # logits are those of p(x_0 | x) but for the likelihood of x
            weights = weights.scale_own(reverse.own_log_likelihood(self.process, sigma.double()).exp())
        return DrawPlan(x, sigma, u, weights, self.model.logit_shift(sigma).float())

    def draw_clean(self, hidden: Float[Tensor, "k h"], plan: DrawPlan) -> Int[Tensor, " k"]:
        """Draw from p(x_0 | x) at the planned positions."""
        if plan.weights is not None:
            return self.draw_fused(hidden, plan)
        p = self.clean_probs_at(hidden, plan.x, plan.sigma)
        self.finite = p.sum(-1).isfinite().all() & self.finite
        p = torch.nn.functional.pad(p, (0, self.process.num_states - self.process.vocab_size))
        return draws.sample_next(plan.x, p, plan.u)

    def draw_fused(self, hidden: Float[Tensor, "k h"], plan: DrawPlan) -> Int[Tensor, " k"]:
        """Draw the next token at the planned positions from the model's logits."""
        assert plan.weights is not None
        assert plan.shift is not None
        head = HeadLogits(self.model.logits(hidden), self.process.vocab_size, plan.shift, self.model.logits_are_scores)
        drawn = sample_categorical(head, plan.x, plan.weights, plan.u)
        self.clamped = self.clamped + drawn.clamped_count
        return drawn.tokens

    def clamp_weights(self, weights: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
        """Set weights below 0 to 0, and count the positions that had one beyond rounding."""
        total = weights.sum(-1)
        self.clamped = self.clamped + (weights.amin(-1) < -1e-5 * total.abs().clamp_min(1e-30)).sum()
        return weights.clamp_min(0)

    def check_finite(self, x: Int[Tensor, "*positions"] | None = None) -> None:
        """Raise ValueError if an output was not finite, or if positions of ``x`` are masks at the end."""
        if not self.finite or (x is not None and (x >= self.process.vocab_size).any()):
            raise ValueError(
                "the network's output is not finite, or beyond the range of floating point, so that nothing can be "
                "drawn from it; its weights are damaged, or its training diverged: use another checkpoint"
            )


def gather_rows(values: Float[Tensor, " b"], length: int, at: Int[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Return, for each flat index into (b, length), the value of its row."""
    return values[at // length]
