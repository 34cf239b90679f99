"""Losses of a batch through `kernels`: what objective and parameterization say, without the head's output.

    loss = Fused(objective, model)
    loss(x_t, x_0, t, weight).total.backward()

is ``(weight·objective.loss(model, x_t, x_0, t)).sum().backward()`` in less time and memory, for the objectives that
`fuses` names: score entropy of a score, and whatever weighs −log p_{x_0} of a denoiser.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd import ops
from sedd.diffusion.objective import (
    D3PM,
    AnyOrder,
    DenoisingScoreEntropy,
    LambdaDCE,
    MeanCrossEntropy,
    Objective,
    TimeDCE,
)
from sedd.diffusion.parameterization import Mean, Score
from sedd.diffusion.precision import upcast_dtype
from sedd.diffusion.process import Absorbing, Process
from sedd.nn.layers import Linear
from sedd.ops import PackedTokens


class LossOutput(NamedTuple):
    """The weighted losses of a batch, in nats."""

    total: Float[Tensor, ""]
    """Their sum: the only one of the three with a gradient."""
    positions: Float[Tensor, "b L"]
    overflow_count: Int[Tensor, ""]
    """How many scores were too large for an exponential; `positions` is infinite there."""


def fuses(objective: Objective[Any], model: nn.Module) -> bool:
    """Whether `Fused` knows this objective of this model."""
    match model, objective:
        case Score(), DenoisingScoreEntropy():
            return True
        case Mean(), TimeDCE() | LambdaDCE() | AnyOrder() | MeanCrossEntropy():
            return True
        case Mean(), DenoisingScoreEntropy() | D3PM():
            return isinstance(objective.process, Absorbing)
    return False


@final
class Fused:
    """The loss of a batch, from the network's last states."""

    def __init__(self, objective: Objective[Any], model: nn.Module) -> None:
        if not fuses(objective, model):
            raise ValueError(
                f"{type(objective).__name__} of a {type(model).__name__} model has no fused loss; "
                "use objective.loss(model, …)"
            )
        assert isinstance(model, Score | Mean)
        self.process, self.network = model.process, model.network
        self.asks: _Scored | _Predicted
        if isinstance(model, Score) and isinstance(objective, DenoisingScoreEntropy):
            self.asks = _Scored(objective)
        else:
            self.asks = _Predicted(objective, model.process)

    def __call__(
        self,
        x_t: Int[Tensor, "b L"],
        x_0: Int[Tensor, "b L"],
        t: Float[Tensor, " b"],
        weight: Float[Tensor, " b"],
        valid: Bool[Tensor, "b L"] | None = None,
        count: int | None = None,
    ) -> LossOutput:
        """Losses of the positions that are valid, each row times its weight.

        ``count`` is how many of them the process may have changed: masked ones, or all. Whoever has x_t on the CPU
        knows it; otherwise an accelerator is waited for.
        """
        rows = self._rows(x_t, valid, count)

        def read(hidden: Tensor, head: Linear) -> ops.Loss:
            kind, exact = hidden.device.type, upcast_dtype(head.weight.dtype)
            half = torch.is_autocast_enabled(kind)
            with torch.autocast(kind, enabled=False):
                cost = self.asks.cost(x_t, x_0, t, weight, exact, rows)
                dtype = torch.get_autocast_dtype(kind) if half else None
                return ops.linear_loss(hidden.flatten(0, -2), head.weight, head.bias, cost, dtype=dtype)

        told = self.asks.sigma(x_t, x_0, t).float()
        loss: ops.Loss = self.network(x_t, told, valid, read, rows)
        return LossOutput(loss.total, _spread(loss.rows, rows).view(x_t.shape), loss.overflow_count)

    def _rows(self, x_t: Tensor, valid: Tensor | None, count: int | None) -> PackedTokens | None:
        if valid is None and not isinstance(self.process, Absorbing):
            return None
        unknown = self.process.unknown(x_t)
        return ops.unknown_rows(unknown if valid is None else unknown & valid, count)


def _spread(each: Tensor, rows: PackedTokens | None) -> Tensor:
    return each if rows is None else torch.cat([each, each.new_zeros(1)])[rows.back]


def _packed(each: Tensor, like: Tensor, rows: PackedTokens | None) -> Tensor:
    """A value for every row of a batch or every position, at the positions that count."""
    flat = each.expand(like.shape).flatten()
    return flat if rows is None else flat[rows.kept]


class _Scored:
    """Score entropy of a score.  [§4, §5]"""

    def __init__(self, objective: DenoisingScoreEntropy) -> None:
        self.objective = objective

    def sigma(self, x_t: Tensor, x_0: Tensor, t: Tensor) -> Tensor:
        return self.objective.schedule.sigma(t)

    def cost(
        self, x_t: Tensor, x_0: Tensor, t: Tensor, weight: Tensor, exact: torch.dtype, rows: PackedTokens | None
    ) -> ops.Cost:
        process = self.objective.process
        sigma, rate = (a.to(exact) for a in self.objective.schedule(t))
        log_data, log_rest = process.ratios(x_t, x_0, sigma)

        def pack(each: Tensor) -> Tensor:
            return _packed(each, x_t, rows)

        return ops.ScoreEntropy(
            states=process.vocab_size,
            x_t=None if isinstance(process, Absorbing) else pack(x_t),  # the mask is no entry that counts
            x_0=pack(x_0),
            scale=pack(process.log_scale(sigma)[:, None]),
            log_data=pack(log_data),
            log_rest=None if log_rest is None else pack(log_rest),
            weight=pack((process.into_rate * rate * weight.to(exact))[:, None]),
        )


class _Predicted:
    """Whatever an objective makes of −log p_{x_0}, which is to weigh it."""

    def __init__(self, objective: Objective[Any], process: Process) -> None:
        if isinstance(objective, DenoisingScoreEntropy):  # the same integrand  [§7]
            objective = TimeDCE(process, objective.schedule, t_min=objective.t_min, time_sampler=objective.time_sampler)
        self.objective, self.process = objective, process

    def sigma(self, x_t: Tensor, x_0: Tensor, t: Tensor) -> Tensor:
        return self._ask(x_t, x_0, t)[0]

    def cost(
        self, x_t: Tensor, x_0: Tensor, t: Tensor, weight: Tensor, exact: torch.dtype, rows: PackedTokens | None
    ) -> ops.Cost:
        each = (weight[:, None] * self._ask(x_t, x_0, t)[1]).to(exact)
        states = self.process.vocab_size
        return ops.CrossEntropy(states, _packed(x_0, x_t, rows), _packed(each, x_t, rows))

    def _ask(self, x_t: Tensor, x_0: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The noise the objective asks at, and what it makes of log p = −1: the weight of −log p."""
        asked = _MinusOne(self.process.vocab_size)
        weight = self.objective.loss(asked, x_t, x_0, t)
        return asked.sigma, weight


class _MinusOne:
    """A denoiser that always says log p = −1, and remembers at which noise it was asked."""

    sigma: Tensor

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def log_mean(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        self.sigma = sigma
        one = torch.full((1,), -1.0, dtype=torch.float64, device=x_t.device)
        return one.expand(*x_t.shape, self.vocab_size)  # takes no memory
