"""The fused training loss: objective and head together, without the logits of all positions.

    loss = FusedLoss(objective, model)
    loss(x_t, x_0, t, weight).total.backward()

equals ``(weight·objective.loss(model, x_t, x_0, t)).sum().backward()`` in less time and memory. The network returns the
hidden states of the positions that count, and `ops.linear_loss` computes loss and gradients from these and the head's
weight. It covers score entropy of a score model, and objectives that weight −log p_{x_0} of a denoiser; see
`has_fused_loss`.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd.diffusion.objective import (
    D3PM,
    AnyOrder,
    DenoisingScoreEntropy,
    LambdaDCE,
    MeanCrossEntropy,
    Objective,
    TimeDCE,
)
from sedd.diffusion.parameterization import MeanModel, ScoreModel
from sedd.diffusion.precision import upcast_dtype
from sedd.diffusion.process import Absorbing
from sedd.nn.layers import Linear
from sedd.ops.linear_loss import CrossEntropyLoss, HeadLoss, ScoreEntropyLoss, linear_loss
from sedd.ops.packed_tokens import PackedTokens, pack_tokens


class LossOutput(NamedTuple):
    """The weighted losses of a batch, in nats."""

    total: Float[Tensor, ""]
    """Their sum; the only field with a gradient."""
    positions: Float[Tensor, "b L"]
    overflow_count: Int[Tensor, ""]
    """Number of log-scores too large for an exponential; ``positions`` is infinite there."""


def has_fused_loss(objective: Objective[Any], model: nn.Module) -> bool:
    """Return whether `FusedLoss` covers this objective with this model."""
    match model, objective:
        case ScoreModel(), DenoisingScoreEntropy():
            return objective.process.has_closed_forms
        case MeanModel(), TimeDCE() | LambdaDCE() | AnyOrder() | MeanCrossEntropy() | DenoisingScoreEntropy() | D3PM():
            return isinstance(objective.process, Absorbing)  # else logits alone do not determine p(x_0 | x_t)
    return False


@final
class FusedLoss:
    """The loss of a batch, computed from the network's hidden states and its head."""

    def __init__(self, objective: Objective[Any], model: nn.Module) -> None:
        if not has_fused_loss(objective, model):
            raise ValueError(
                f"{type(objective).__name__} of a {type(model).__name__} model has no fused loss; "
                "use objective.loss(model, …)"
            )
        assert isinstance(model, ScoreModel | MeanModel)
        self.model, self.process = model, model.process
        self.terms: _ScoreEntropyTerms | _CrossEntropyTerms
        if isinstance(model, ScoreModel) and isinstance(objective, DenoisingScoreEntropy):
            self.terms = _ScoreEntropyTerms(objective)
        elif isinstance(objective, DenoisingScoreEntropy):  # of a denoiser: the same integrand as t-DCE  [§7]
            t_dce = TimeDCE(
                self.process, objective.schedule, t_min=objective.t_min, time_sampler=objective.time_sampler
            )
            self.terms = _CrossEntropyTerms(t_dce, self.process.vocab_size)
        else:
            self.terms = _CrossEntropyTerms(objective, self.process.vocab_size)

    def __call__(
        self,
        x_t: Int[Tensor, "b L"],
        x_0: Int[Tensor, "b L"],
        t: Float[Tensor, " b"],
        weight: Float[Tensor, " b"],
        valid: Bool[Tensor, "b L"] | None = None,
        count: int | None = None,
    ) -> LossOutput:
        """Return the losses at valid positions, each sequence times its weight.

        Args:
            x_t: Noisy tokens.
            x_0: Clean tokens.
            t: Time of each sequence.
            weight: Importance weight of each sequence's time.
            valid: False at padding.
            count: Number of valid positions that noise may have changed. If None it is counted on the device, which
                is waited for.
        """
        packed = self._pack(x_t, valid, count)
        sigma = self.terms.sigma(x_t, x_0, t)
        hidden: Tensor = self.model.run_network(x_t, sigma, valid, packed=packed, return_hidden=True)
        head = _head(self.model.network)
        with torch.autocast(hidden.device.type, enabled=False):
            terms = self.terms(x_t, x_0, t, weight, upcast_dtype(head.weight.dtype), packed)
            loss = linear_loss(hidden.flatten(0, -2), head.weight, head.bias, terms, dtype=hidden.dtype)
        return LossOutput(loss.total, _unpack(loss.rows, packed).view(x_t.shape), loss.overflow_count)

    def _pack(self, x_t: Tensor, valid: Tensor | None, count: int | None) -> PackedTokens | None:
        """Pack the positions whose loss is not 0; None where all count."""
        if valid is None and not isinstance(self.process, Absorbing):
            return None
        noisy = self.process.is_noisy(x_t)
        return pack_tokens(noisy if valid is None else noisy & valid, count)


def _head(network: nn.Module) -> Linear:
    """Return the head of a network, which DDP may wrap."""
    head = (network.module if isinstance(network, nn.parallel.DistributedDataParallel) else network).head
    assert isinstance(head, Linear)
    return head


def _gather(values: Tensor, like: Tensor, packed: PackedTokens | None) -> Tensor:
    """Expand values to all positions and return those of the packed positions."""
    flat = values.expand(like.shape).flatten()
    return flat if packed is None else flat[packed.positions]


def _unpack(values: Tensor, packed: PackedTokens | None) -> Tensor:
    """Put packed values back at their positions, 0 elsewhere."""
    return values if packed is None else torch.cat([values, values.new_zeros(1)])[packed.inverse]


class _ScoreEntropyTerms:
    """Inputs of the fused denoising score entropy of a score model.  [§4, §5]"""

    def __init__(self, objective: DenoisingScoreEntropy) -> None:
        self.objective = objective

    def sigma(self, x_t: Tensor, x_0: Tensor, t: Tensor) -> Tensor:
        """Return the noise level at which the network is called."""
        return self.objective.schedule.sigma(t)

    def __call__(
        self, x_t: Tensor, x_0: Tensor, t: Tensor, weight: Tensor, dtype: torch.dtype, packed: PackedTokens | None
    ) -> HeadLoss:
        process = self.objective.process
        sigma, rate = (a.to(dtype) for a in self.objective.schedule(t))
        log_data, log_rest = process.ratios(x_t, x_0, sigma)

        def gather(values: Tensor) -> Tensor:
            return _gather(values, x_t, packed)

        return ScoreEntropyLoss(
            states=process.vocab_size,
            x_t=None if isinstance(process, Absorbing) else gather(x_t),  # the mask's own entry is not in the loss
            x_0=gather(x_0),
            scale=gather(process.log_score_shift(sigma)[:, None]),
            log_data=gather(log_data),
            log_rest=None if log_rest is None else gather(log_rest),
            weight=gather((process.incoming_rate * rate * weight.to(dtype))[:, None]),
        )


class _CrossEntropyTerms:
    """Inputs of a fused loss w·(−log p_{x_0}) of a denoiser.

    These objectives are linear in log p, so evaluating one at log p = −1 gives its weight w.
    """

    def __init__(self, objective: Objective[Any], vocab_size: int) -> None:
        self.objective, self.vocab_size = objective, vocab_size

    def sigma(self, x_t: Tensor, x_0: Tensor, t: Tensor) -> Tensor:
        """Return the noise level at which the network is called."""
        return self._sigma_and_weight(x_t, x_0, t)[0]

    def __call__(
        self, x_t: Tensor, x_0: Tensor, t: Tensor, weight: Tensor, dtype: torch.dtype, packed: PackedTokens | None
    ) -> HeadLoss:
        weights = (weight[:, None] * self._sigma_and_weight(x_t, x_0, t)[1]).to(dtype)
        return CrossEntropyLoss(self.vocab_size, _gather(x_0, x_t, packed), _gather(weights, x_t, packed))

    def _sigma_and_weight(self, x_t: Tensor, x_0: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        denoiser = _ConstantDenoiser(self.vocab_size)
        weight = self.objective.loss(denoiser, x_t, x_0, t)
        return denoiser.sigma, weight


class _ConstantDenoiser:
    """A denoiser with log p = −1 everywhere, which stores the noise level of its last call."""

    sigma: Tensor

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def log_mean(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        self.sigma = sigma
        value = torch.full((1,), -1.0, dtype=torch.float64, device=x_t.device)
        return value.expand(*x_t.shape, self.vocab_size)  # takes no memory
