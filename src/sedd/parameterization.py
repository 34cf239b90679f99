"""Parameterizations: a network, its process and what it is conditioned on, as one model.  [§5]

A network maps ``(x, sigma)`` to one output per state, ``(*b, L, num_states)``. A parameterization defines what that
output means: a log-score (`ScoreModel`), a score (`SignedScoreModel`), the distribution of the clean token given all
noisy ones (`MeanModel`) or all others (`ConditionalModel`), or that of the next token (`CausalModel`). Calling any but
the last returns log-scores, ``log_score = model(x_t, sigma)``, with 0 at y = x_t.
"""

import copy
from abc import ABC
from typing import Any, ClassVar, Literal, Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd import tensors
from sedd.process import Process
from sedd.schedule import LogLinear, Schedule
from sedd.tensors import PerSequence, PerState, PerToken, Tokens, upcast

PerRow = Float[Tensor, " k"]

TimeConditioning = Literal["sigma", "zero", "none"]
"""What the network is given for the noise level: σ, or always 0 (``zero``, as MDLM's networks, and ``none``)."""


@runtime_checkable
class HasNoise(Protocol):
    """What has a process and a schedule: a model, or the setup of a run."""

    @property
    def process(self) -> Process: ...

    @property
    def schedule(self) -> Schedule: ...


@runtime_checkable
class Backbone(Protocol):
    """A network in two parts: its output is ``head(hidden(x, sigma))``."""

    @property
    def head(self) -> nn.Module: ...

    def hidden(self, x: Tokens, sigma: PerSequence, valid: Bool[Tensor, "*b L"] | None = None) -> PerState: ...


class DiscreteModel(nn.Module, ABC):
    """A network with its process and all that it is conditioned on.

    `bind` sets a label, a padding mask or a context; the bound model shares the network's weights.

    Args:
        network: Called as ``network(x, sigma)``, and with ``valid`` and ``label=`` where those are bound.
        process: The noise process; its states are the network's outputs.
        schedule: The noise schedule: samplers and bounds read it from the model.
        time_conditioning: What the network is given for the noise level.
        graphed: A `runtime.cuda_graphs.GraphedBackbone`, which runs `hidden` and `logits`; None calls the network.
    """

    label: Int[Tensor, "*b"] | None = None
    """The label of all sequences, or of each; None: no label."""
    valid: Bool[Tensor, "*b L"] | None = None
    """False at padding, which attention leaves out; None: there is none."""
    context: Int[Tensor, " c"] | None = None
    """Tokens before every sequence: the model is that of their continuation."""
    is_causal: ClassVar[bool] = False
    """Whether the network reads the tokens before each position, without a noise level."""
    logits_are_scores: ClassVar[bool] = False
    """Whether logits are log-scores up to a shift by the noise level."""

    def __init__(
        self,
        network: nn.Module,
        process: Process,
        schedule: Schedule = LogLinear(),
        *,
        time_conditioning: TimeConditioning = "sigma",
        graphed: Any = None,
    ) -> None:
        super().__init__()
        self.network, self.process, self.schedule = network, process, schedule
        self.time_conditioning, self.graphed = time_conditioning, graphed
        self._has_head = isinstance(network, Backbone)
        given = time_conditioning == "sigma" and not self.is_causal
        self.depends_on_sigma = given and bool(getattr(network, "depends_on_sigma", True))

    @final
    def bind(
        self,
        *,
        label: Int[Tensor, "*b"] | None = None,
        valid: Bool[Tensor, "*b L"] | None = None,
        context: Int[Tensor, " c"] | None = None,
    ) -> "DiscreteModel":
        """Return this model, given a label, a padding mask or a context; what is None stays as it is.

        Under absorbing noise a model with a context is the model of what follows, given the context: an unmasked token
        is known to be clean. Under uniform noise any token may be noise, those of the context included, so the result
        is not the model's conditional distribution.
        """
        bound = copy.copy(self)
        bound.label = self.label if label is None else label
        bound.valid = self.valid if valid is None else valid
        bound.context = self.context if context is None else context
        return bound

    @final
    def run_network(
        self, x_t: Tensor, sigma: Tensor, valid: Tensor | None = None, function: Any = None, **options: Any
    ) -> Any:
        """Call the network, or ``function``, with all that this model is conditioned on, and ``options`` of its own.

        Losses of hidden states call the network so: its ``forward`` is what DDP and FSDP wrap. The positions of a
        context are dropped from the output.
        """
        valid = self.valid if valid is None else valid
        if self.context is not None:
            x_t = torch.cat([self.context.expand(*x_t.shape[:-1], -1), x_t], -1)
            valid = None if valid is None else nn.functional.pad(valid, (len(self.context), 0), value=True)
        if self.is_causal:
            x_t = nn.functional.pad(x_t[..., :-1], (1, 0), value=self.process.vocab_size)
        sigma = sigma.float()  # times are drawn in float64; networks compute in less
        arguments = [x_t, sigma if self.depends_on_sigma else torch.zeros_like(sigma)]
        if valid is not None:
            arguments.append(valid)
        if self.label is not None:
            options["label"] = self.label.expand(sigma.shape)
        output = (self.network if function is None else function)(*arguments, **options)
        return output if self.context is None else output[..., len(self.context) :, :]

    @final
    def hidden(
        self, x_t: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b L h"]:
        """Return the hidden states before the head; those of a network without a head are its output."""
        if not self._has_head:
            return self._output(x_t, sigma, valid)
        parts: Any = self.network if self.graphed is None else self.graphed
        hidden: Tensor = self.run_network(x_t, sigma, valid, parts.hidden)
        return hidden

    @final
    def logits(self, hidden: Float[Tensor, "k h"]) -> Float[Tensor, "k m"]:
        """Return the head's output in its own precision; entries after the last state have no meaning."""
        return self._head(hidden) if self.graphed is None else self.graphed.logits(hidden)

    @final
    def _output(self, x_t: Tensor, sigma: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the network's output, in float32 or better."""
        tensors.check_states(x_t, self.process.num_states)
        tensors.check_sigma(sigma)
        output: Tensor = upcast(self.run_network(x_t, sigma, valid))
        expected = self.process.vocab_size if self.is_causal else self.process.num_states
        output = output[..., :expected] if self.is_causal else output
        if output.shape[-1] != expected:
            raise ValueError(f"the network returns {output.shape[-1]} entries per position; it needs {expected}")
        return output

    @final
    def _head(self, hidden: Tensor) -> Tensor:
        network: Any = self.network
        return upcast(network.head(hidden) if self._has_head else hidden)


class DiffusionModel(DiscreteModel, ABC):
    """A model of log-scores: ``model(x_t, sigma)`` is log s(x_t)_y, with 0 at y = x_t."""

    def forward(self, x_t: Tokens, sigma: PerSequence) -> PerState:
        return self._log_score(self._output(x_t, sigma), x_t, sigma)

    @final
    def log_score_at(self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: PerRow) -> PerState:
        """Return the log-score at k positions from their hidden states."""
        return self._log_score(self._head(hidden)[:, None], x_t[:, None], sigma)[:, 0]

    def _log_score(self, output: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
        """Convert the network's output to a log-score; by default that of p(x_0) = softmax of the first N outputs.

        s_y = Σ_{x_0} p(x_0 | x_t)·a_y(x_0) = Σ_{x_0} P_σ(y, x_0)·e^z / Σ_{x_0} P_σ(x_t, x_0)·e^z.  [§5]
        """
        return self.process.marginal_score(output[..., : self.process.vocab_size].log_softmax(-1), x_t, sigma)


@final
class ScoreModel(DiffusionModel):
    """A score model: the output is the log-score, up to a shift that depends on the noise level alone."""

    logits_are_scores = True

    def _log_score(self, output: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
        """log s_y = z_y (uniform) or z_y − log(e^σ − 1) − log N (absorbing).  [§5]"""
        shift = self.process.base_log_score(x_t, sigma.to(output.dtype))
        return (output + shift).scatter(-1, x_t[..., None], 0)


@final
class SignedScoreModel(DiffusionModel):
    """A score model without positivity: s_y = (1 + z_y)·e^shift, where `ScoreModel` has e^(z_y + shift).  [§5]

    Under uniform noise z is s − 1, the concrete score as it was proposed. Squared error can train it, where `score` may
    be negative; a log-score, hence a bound and a sampler, is that of the score raised to at least `FLOOR`·e^shift.
    Reference: Meng et al. 2022, arXiv 2211.00802.
    """

    FLOOR: ClassVar[float] = 1e-4
    """Least score that the log-score stands for, relative to that of uniformly random tokens."""

    def score(self, x_t: Tokens, sigma: PerSequence) -> PerState:
        """Return the score, of any sign."""
        output = self._output(x_t, sigma)
        scale = self.process.base_log_score(x_t, sigma.to(output.dtype)).exp()
        return ((1 + output) * scale).scatter(-1, x_t[..., None], 1)

    def _log_score(self, output: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
        shift = self.process.base_log_score(x_t, sigma.to(output.dtype))
        return ((1 + output).clamp_min(self.FLOOR).log() + shift).scatter(-1, x_t[..., None], 0)


@final
class MeanModel(DiffusionModel):
    """A denoiser: p(x_0 | x_t) ∝ P_σ(x_t, x_0)·e^z, z the first N outputs; the output at the mask is not used.  [§5]

    The likelihood P_σ(x_t, x_0) of the token that is there is known, so the network need not learn it. At a mask it is
    the same for every x_0, and p is the softmax of z. Under uniform noise it makes x_t the likeliest clean token where
    there is little noise: with any finite z the scores are finite, and so is the bound.
    """

    def log_mean(self, x_t: Tokens, sigma: PerSequence) -> PerToken:
        """Return log p(x_0 | x_t)."""
        return self._log_mean(self._output(x_t, sigma), x_t, sigma)

    def log_mean_at(self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: PerRow) -> Tensor:
        """Return log p(x_0 | x_t) at k positions from their hidden states."""
        return self._log_mean(self._head(hidden)[:, None], x_t[:, None], sigma)[:, 0]

    def _log_mean(self, output: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
        logits = output[..., : self.process.vocab_size]
        return self.process.add_log_likelihood(logits, x_t, sigma).log_softmax(-1)


@final
class ConditionalModel(DiffusionModel):
    """A model of ratio matching: the distribution p_t(x_i | x_−i) of each noisy token given the others.  [§6]

    Softmax of the first N outputs is π, the distribution of the clean token given the other noisy ones, and
    p_t(x_i | x_−i) = Σ_{x_0} P_σ(x_i, x_0)·π(x_0). The network's output at position i must not depend on x_i, or it
    learns to copy: `nn.transformer.Transformer` with ``hollow`` is such a network.
    """

    def log_conditional(self, x_t: Tokens, sigma: PerSequence) -> PerState:
        """Return log p_t(x_i | x_−i)."""
        log_p = self._output(x_t, sigma)[..., : self.process.vocab_size].log_softmax(-1)
        return self.process.log_marginal(log_p, sigma)


@final
class CausalModel(DiscreteModel):
    """The autoregressive baseline: softmax of the output at i is the distribution of token i given those before it.

    The network reads the tokens shifted by one position, after a start token with id ``vocab_size``, and has at least
    ``vocab_size`` outputs; its output at i must not depend on tokens after i. There is no noise level.
    """

    is_causal = True

    def log_next(self, x_0: Tokens) -> PerToken:
        """Return log p(x_i | x_1 … x_{i−1})."""
        return self._output(x_0, torch.zeros(x_0.shape[:-1], device=x_0.device)).log_softmax(-1)

    def log_next_at(self, hidden: Float[Tensor, "k h"]) -> Float[Tensor, "k N"]:
        """Return log p(x_i | x_1 … x_{i−1}) at k positions from their hidden states."""
        return self._head(hidden)[..., : self.process.vocab_size].log_softmax(-1)
