"""Parameterizations: from what a network says to a log-score.  [§5]

Each wraps a network ``network(x, sigma) -> (*b, L, num_states)`` and is then called as a model is:
``log_score = model(x_t, sigma)``, with 0 at y = x_t. `Mean` and `Conditional` also say what they predict.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd.diffusion import check
from sedd.diffusion.precision import upcast
from sedd.diffusion.process import Process


@runtime_checkable
class Model(Protocol):
    """Whatever gives log-scores: a wrapped network, or `exact.Score`."""

    def __call__(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L num_states"]:
        """log s(x_t)_y, with 0 at y = x_t."""
        ...


@runtime_checkable
class Reader(Model, Protocol):
    """A model that can be asked about some positions alone, so that its head runs only where it is needed."""

    @property
    def timed(self) -> bool:
        """Whether `hidden` depends on the noise it is told."""
        ...

    def hidden(
        self, x_t: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b L h"]:
        """What the head reads, at every position."""
        ...

    def read(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k num_states"]:
        """The log-score at positions of which `hidden` is given."""
        ...


@runtime_checkable
class MeanReader(Reader, Protocol):
    """One that also predicts the clean token, at some positions alone."""

    def read_mean(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k vocab_size"]:
        """log p(x_0 | x_t) at positions of which `hidden` is given."""
        ...


@runtime_checkable
class Speaker(Reader, Protocol):
    """One whose head's output is a score up to a factor, or the law of the clean token: whoever draws can read it."""

    @property
    def relative(self) -> bool:
        """Whether the output is a score, a ratio to x_t."""
        ...

    def said(self, hidden: Float[Tensor, "k h"]) -> Float[Tensor, "k m"]:
        """The head's output at positions of which `hidden` is given, in the head's own precision."""
        ...

    def scale(self, sigma: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """What is to be added to it."""
        ...


@runtime_checkable
class Backbone(Protocol):
    """A network in two parts: its output is ``head(hidden(x, sigma))``."""

    @property
    def timed(self) -> bool:
        """Whether it is told σ."""
        ...

    @property
    def head(self) -> nn.Module:
        """The last matrix."""
        ...

    def hidden(
        self, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], valid: Bool[Tensor, "*b L"] | None = None
    ) -> Float[Tensor, "*b L h"]:
        """What the head reads."""
        ...


@runtime_checkable
class Voice(Protocol):
    """A network that has its own way to say what its head says."""

    def said(self, hidden: Float[Tensor, "k h"]) -> Float[Tensor, "k m"]:
        """The head's output, in its own precision; entries after the last that counts mean nothing."""
        ...


@runtime_checkable
class Denoiser(Protocol):
    """A model that predicts the clean token."""

    def log_mean(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L vocab_size"]:
        """log p(x_0 | x_t), position by position."""
        ...


@runtime_checkable
class Conditioner(Protocol):
    """A model that predicts each noisy token from the others."""

    def log_conditional(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L num_states"]:
        """log p_t(x_i | x_−i)."""
        ...


@runtime_checkable
class Predictor(Protocol):
    """A model that predicts each clean token from those before it."""

    def log_next(self, x_0: Int[Tensor, "*b L"]) -> Float[Tensor, "*b L vocab_size"]:
        """log p(x_i | x_1 … x_{i−1})."""
        ...


@final
class Untimed(nn.Module):
    """A network that could be told σ and always hears 0, as MDLM's: what it says does not depend on the noise."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @property
    def timed(self) -> bool:
        """It hears 0 at every time."""
        return False

    @property
    def head(self) -> nn.Module:
        """The network's; of one that is not in two parts, nothing."""
        return self.network.head if isinstance(self.network, Backbone) else nn.Identity()

    def hidden(
        self, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], valid: Bool[Tensor, "*b L"] | None = None
    ) -> Float[Tensor, "*b L h"]:
        """What the head reads; of a network that is not in two parts, its output."""
        network = self.network.hidden if isinstance(self.network, Backbone) else self.network
        told = torch.zeros_like(sigma)
        hidden: Tensor = network(x, told) if valid is None else network(x, told, valid)
        return hidden

    def forward(self, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], *more: Any, **options: Any) -> Any:
        """What the network says at σ = 0."""
        return self.network(x, torch.zeros_like(sigma), *more, **options)


class _Wrapped(nn.Module, ABC):
    def __init__(self, network: nn.Module, process: Process) -> None:
        super().__init__()
        self.network, self.process = network, process

    @property
    def timed(self) -> bool:
        """Whether `hidden` depends on the noise it is told: as far as is known, it does."""
        return self.network.timed if isinstance(self.network, Backbone) else True

    def hidden(
        self, x_t: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b L h"]:
        """What the head reads; of a network that is not in two parts, its output."""
        if not isinstance(self.network, Backbone):
            return self.output(x_t, sigma, valid)
        check.states(x_t, self.process.num_states)
        check.noise(sigma)
        return self.network.hidden(x_t, sigma.float(), valid)

    def read(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k num_states"]:
        """The log-score at positions of which `hidden` is given."""
        return self.log_score(self._headed(hidden)[:, None], x_t[:, None], sigma)[:, 0]

    def said(self, hidden: Float[Tensor, "k h"]) -> Float[Tensor, "k m"]:
        """What the head says at positions of which `hidden` is given, and maybe more entries that mean nothing."""
        return self.network.said(hidden) if isinstance(self.network, Voice) else self._headed(hidden)

    def _headed(self, hidden: Tensor) -> Tensor:
        return upcast(self.network.head(hidden) if isinstance(self.network, Backbone) else hidden)

    @abstractmethod
    def log_score(self, output: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
        """The log-score that a network's output stands for."""

    def output(self, x: Tensor, sigma: Tensor, valid: Tensor | None) -> Tensor:
        """What the network says, one entry a state, in float32 or better."""
        check.states(x, self.process.num_states)
        check.noise(sigma)
        told = sigma.float()  # times are drawn in float64; networks compute in less
        output: Tensor = self.network(x, told) if valid is None else self.network(x, told, valid)
        check.entries(output, self.process.num_states, "network's output")
        return upcast(output)


@final
class Score(_Wrapped):
    """The output is the log-score, up to the scale that noise gives it."""

    relative = True

    def scale(self, sigma: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """That of the process."""
        return self.process.log_scale(sigma)

    def forward(
        self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], valid: Bool[Tensor, "*b L"] | None = None
    ) -> Float[Tensor, "*b L num_states"]:
        """The log-score."""
        return self.log_score(self.output(x_t, sigma, valid), x_t, sigma)

    def log_score(
        self, output: Float[Tensor, "*b L num_states"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L num_states"]:
        """log s_y = z_y (uniform) or z_y − log(e^σ − 1) − log N (absorbing)."""
        scale = self.process.log_scale(sigma.to(output.dtype))[..., None, None]
        return (output + scale).scatter(-1, x_t[..., None], 0)


@final
class Mean(_Wrapped):
    """The output is a softmax over the N tokens, the law of the clean token; the mask's entry is unused."""

    relative = False

    def scale(self, sigma: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """None."""
        return torch.zeros_like(sigma)

    def log_mean(
        self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], valid: Bool[Tensor, "*b L"] | None = None
    ) -> Float[Tensor, "*b L vocab_size"]:
        """log p(x_0 | x_t)."""
        return self._log_mean(self.output(x_t, sigma, valid))

    def read_mean(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k vocab_size"]:
        """log p(x_0 | x_t) at positions of which `hidden` is given."""
        return self._log_mean(self._headed(hidden))

    def _log_mean(self, output: Tensor) -> Tensor:
        return output[..., : self.process.vocab_size].log_softmax(-1)

    def forward(
        self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], valid: Bool[Tensor, "*b L"] | None = None
    ) -> Float[Tensor, "*b L num_states"]:
        """The score of the predicted law: s_y = Σ_{x_0} p(x_0 | x_t)·a_y(x_0)."""
        return self.log_score(self.output(x_t, sigma, valid), x_t, sigma)

    def log_score(
        self, output: Float[Tensor, "*b L num_states"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L num_states"]:
        """The score of the predicted law, from the network's output."""
        return self.process.mean_score(self._log_mean(output), x_t, sigma)


@final
class Conditional(_Wrapped):
    """The output is the law of the noisy token itself, given the others: ratio matching.  [§6]

    The network's output at position i must not depend on x_i, or it would learn to copy.
    """

    def log_conditional(
        self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], valid: Bool[Tensor, "*b L"] | None = None
    ) -> Float[Tensor, "*b L num_states"]:
        """log p_t(x_i | x_−i)."""
        return self.output(x_t, sigma, valid).log_softmax(-1)

    def forward(
        self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], valid: Bool[Tensor, "*b L"] | None = None
    ) -> Float[Tensor, "*b L num_states"]:
        """The log-score."""
        return self.log_score(self.output(x_t, sigma, valid), x_t, sigma)

    def log_score(
        self, output: Float[Tensor, "*b L num_states"], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b L num_states"]:
        """log s_y = log p(y | x_−i) − log p(x_i | x_−i)."""
        log_p = output.log_softmax(-1)
        return log_p - log_p.gather(-1, x_t[..., None])


@final
class Causal(nn.Module):
    """The output at i is a softmax over the token at i, given those before it: the autoregressive baseline.

    The network reads the tokens moved one place to the right behind a start token, id ``vocab_size``, and
    gives at least ``vocab_size`` entries; its output at i must not depend on what stands after i.
    """

    def __init__(self, network: nn.Module, vocab_size: int) -> None:
        super().__init__()
        check.vocabulary(vocab_size)
        self.network, self.vocab_size = network, vocab_size

    def log_next(
        self, x_0: Int[Tensor, "*b L"], valid: Bool[Tensor, "*b L"] | None = None
    ) -> Float[Tensor, "*b L vocab_size"]:
        """log p(x_i | x_1 … x_{i−1})."""
        before, told = self._before(x_0)
        output = self.network(before, told) if valid is None else self.network(before, told, valid)
        return self._log_p(output)

    def hidden(
        self, x_0: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b L h"]:
        """What the head reads at i, of the tokens before i; of a network that is not in two parts, its output."""
        before, told = self._before(x_0)
        network = self.network.hidden if isinstance(self.network, Backbone) else self.network
        hidden: Tensor = network(before, told) if valid is None else network(before, told, valid)
        return hidden

    def read(
        self, hidden: Float[Tensor, "k h"], x_0: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k vocab_size"]:
        """log p(x_i | x_1 … x_{i−1}) at positions of which `hidden` is given."""
        return self._log_p(self.network.head(hidden) if isinstance(self.network, Backbone) else hidden)

    @property
    def timed(self) -> bool:
        """There is no noise to be told of."""
        return False

    def _before(self, x_0: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.nn.functional.pad(x_0[..., :-1], (1, 0), value=self.vocab_size)
        return before, torch.zeros(x_0.shape[:-1], device=x_0.device)  # no noise

    def _log_p(self, output: Tensor) -> Tensor:
        return upcast(output)[..., : self.vocab_size].log_softmax(-1)


@final
class Padded:
    """A model that is told which positions of its rows are padding: out of attention, and so of every answer."""

    def __init__(self, model: nn.Module, valid: Bool[Tensor, "*b L"]) -> None:
        self.model, self.valid = model, valid

    def __call__(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L num_states"]:
        """The model's log-score."""
        log_score: Tensor = self.model(x_t, sigma, self.valid)
        return log_score

    def log_mean(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L vocab_size"]:
        """The model's prediction of the clean token."""
        log_mean: Tensor = self.model.log_mean(x_t, sigma, self.valid)  # type: ignore[operator]
        return log_mean

    def log_conditional(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L num_states"]:
        """The model's prediction of the noisy token."""
        log_p: Tensor = self.model.log_conditional(x_t, sigma, self.valid)  # type: ignore[operator]
        return log_p

    def log_next(self, x_0: Int[Tensor, "*b L"]) -> Float[Tensor, "*b L vocab_size"]:
        """The model's prediction of the next token."""
        log_p: Tensor = self.model.log_next(x_0, self.valid)  # type: ignore[operator]
        return log_p


@final
class Given:
    """A model of what follows a context: it reads both, and answers for what follows.

    Under absorbing noise the true score, asked so, is the true score of what follows given the context: a token that is
    not masked is known. Under uniform noise no token is known, so a model takes the context for noisy too: what it then
    scores is its own way of filling in behind a fixed context, and not the conditional of the law that it learned.
    """

    def __init__(self, model: Any, context: Int[Tensor, " c"]) -> None:
        self.model, self.context = model, context

    def __call__(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L num_states"]:
        """The model's log-score."""
        return self._rest(self.model(self._whole(x_t), sigma))

    def log_mean(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L vocab_size"]:
        """The model's prediction of the clean token."""
        return self._rest(self.model.log_mean(self._whole(x_t), sigma))

    def log_next(self, x_0: Int[Tensor, "*b L"]) -> Float[Tensor, "*b L vocab_size"]:
        """The model's prediction of the next token."""
        return self._rest(self.model.log_next(self._whole(x_0)))

    def _whole(self, x: Tensor) -> Tensor:
        return torch.cat([self.context.expand(*x.shape[:-1], -1), x], -1)

    def _rest(self, said: Tensor) -> Tensor:
        return said[..., len(self.context) :, :]
