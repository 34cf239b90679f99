"""The loss of a batch, with objective and head fused: the logits of all positions never exist.

    loss = fused_loss(objective, model, x_t, x_0, t, weight)
    loss.total.backward()

equals ``(weight·objective.loss(model, x_t, x_0, t)).sum().backward()`` in less time and memory. The network returns the
hidden states of the positions that count, and `linear_loss` applies the objective's coefficients to them with the
weight of the head.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd import reverse
from sedd.objectives import Coefficients, CrossEntropyTerms, Objective, ScoreEntropyTerms
from sedd.ops.linear_loss import CrossEntropyLoss, HeadLoss, ScoreEntropyLoss, linear_loss
from sedd.ops.packed_tokens import PackedTokens, pack_tokens
from sedd.parameterization import DiscreteModel
from sedd.tensors import upcast_dtype


class LossOutput(NamedTuple):
    """The weighted losses of a batch, in nats."""

    total: Float[Tensor, ""]
    """Their sum; the only field with a gradient."""
    positions: Float[Tensor, "b L"]
    overflow_count: Int[Tensor, ""]
    """Number of log-scores too large for an exponential; ``positions`` is infinite there."""


def fused_loss(
    objective: Objective[Any],
    model: DiscreteModel,
    x_t: Int[Tensor, "b L"],
    x_0: Int[Tensor, "b L"],
    t: Float[Tensor, " b"],
    weight: Float[Tensor, " b"],
    valid: Bool[Tensor, "b L"] | None = None,
    count: int | None = None,
) -> LossOutput | None:
    """Return the losses at valid positions, each sequence times its weight.

    Args:
        objective: The training objective.
        model: The model to be trained.
        x_t: Noisy tokens.
        x_0: Clean tokens.
        t: Time of each sequence.
        weight: Importance weight of each sequence's time.
        valid: False at padding.
        count: Number of valid positions that count in the loss. None counts them on the device, and waits for it.

    Returns:
        The losses; None if the objective has no fused loss with this model: use ``objective.loss``.
    """
    head, coefficients = _head(model.network), objective.coefficients(model, x_t, x_0, t)
    coefficients = None if coefficients is None else coefficients.of_logits(model)
    if head is None or coefficients is None:
        return None
    packed = _pack(coefficients.counts, valid, count)
    x, sigma = coefficients.x_t, coefficients.sigma
    hidden: Tensor = model.run_network(x, sigma, valid, packed=packed, return_hidden=True)
    with torch.autocast(hidden.device.type, enabled=False):
        loss = _head_loss(coefficients, model, weight, upcast_dtype(head.weight.dtype), packed)
        found = linear_loss(hidden.flatten(0, -2), head.weight, head.bias, loss, dtype=hidden.dtype)
    return LossOutput(found.total, _unpack(found.rows, packed).view(x_t.shape), found.overflow_count)


def _head(network: nn.Module) -> Any:
    """Return the head of a network, which DDP may wrap; None: it has none."""
    unwrapped = network.module if isinstance(network, nn.parallel.DistributedDataParallel) else network
    return getattr(unwrapped, "head", None)


def _pack(counts: Tensor | None, valid: Tensor | None, count: int | None) -> PackedTokens | None:
    """Pack the positions whose loss is not 0; None where all count."""
    if counts is not None and valid is not None:
        counts = counts & valid
    selected = valid if counts is None else counts
    return None if selected is None else pack_tokens(selected, count)


def _unpack(values: Tensor, packed: PackedTokens | None) -> Tensor:
    """Put packed values back at their positions, 0 elsewhere."""
    return values if packed is None else torch.cat([values, values.new_zeros(1)])[packed.inverse]


def _head_loss(
    coefficients: Coefficients, model: DiscreteModel, weight: Tensor, dtype: torch.dtype, packed: PackedTokens | None
) -> HeadLoss:
    """Return the loss of each row of logits."""
    c, process = coefficients, model.process

    def gather(values: Tensor) -> Tensor:
        """Expand values to all positions and return those of the packed positions."""
        flat = values.expand(c.x_t.shape).flatten()
        return flat if packed is None else flat[packed.positions]

    if isinstance(c, CrossEntropyTerms):
        return CrossEntropyLoss(process.vocab_size, gather(c.x_0), gather((weight * c.weight).to(dtype)[:, None]))
    assert isinstance(c, ScoreEntropyTerms)
    sigma, rate = c.sigma.to(dtype), c.weight.to(dtype)
    log_data, log_rest = process.ratios(c.x_t, c.x_0, sigma)
    return ScoreEntropyLoss(
        states=process.vocab_size,
        x_t=gather(c.x_t) if c.counts is None else None,  # the mask's own entry is not in the loss
        x_0=gather(c.x_0),
        scale=gather(reverse.log_score_shift(process, sigma)[:, None]),
        log_data=gather(log_data),
        log_rest=None if log_rest is None else gather(log_rest[..., 0]),
        weight=gather((reverse.incoming_rate(process) * rate * weight.to(dtype))[:, None]),
    )
