"""The loss of a batch, with objective and head fused: the logits of all positions never exist.

    loss = fused_loss(objective, model, x_t, x_0, t, weight)
    loss.total.backward()

equals ``(weight·objective.loss(model, x_t, x_0, t)).sum().backward()`` in less time and memory. The network returns the
hidden states of the positions that count, and `linear_loss` applies head and objective to some thousand of them at a
time. Their logits, of which all would be the largest tensor of a training step, are overwritten by their own gradient.

`LinearLossBackend` is the reference for a block of rows, on any device; `fused_loss_triton` has the kernels for CUDA.

Reference: for cross-entropy, Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models",
arXiv 2411.09009.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd import reverse
from sedd.divergence import score_entropy
from sedd.objectives import Coefficients, CrossEntropyTerms, Objective, ScoreEntropyTerms
from sedd.ops.block_ops import PackedTokens, pack_tokens
from sedd.parameterization import DiscreteModel
from sedd.runtime import device as devices
from sedd.tensors import PerSequence, Tokens, upcast, upcast_dtype

VOCAB_MULTIPLE = 128  # on a GPU the logits are padded to a multiple of this many entries
MAX_LOGITS = {"cuda": 9 * 2**26, "cpu": 2**22}  # largest number of logits in memory at a time
MAX_LOG_SCORE = 80.0
"""Log-scores are clamped at 80, so that sums and gradients stay finite; clamped entries are counted."""
_MIN_LOG_RATIO = -70.0  # as in `divergence`


class EntropyTerms(NamedTuple):
    """The divergences D(s_y, a) of a block of rows, for the entries y < ``states``: log s_y = z_y + bias_y + scale.

    The entry ``skip`` of a row has no term; ``data`` is left out of the sums, and its gradient is ``grad_at_data``.
    """

    states: int
    bias: Tensor | None
    scale: Tensor
    weight: Tensor
    data: Tensor
    grad_at_data: Tensor
    skip: Tensor | None = None
    log_rest: Tensor | None = None  # log a; None: a = 0, and D(s_y, 0) = s_y


class EntropySums(NamedTuple):
    """Sums over a block of rows."""

    values: Tensor  # Σ_y D, per row
    columns: Tensor  # Σ_rows weight·∂D/∂log s_y, per entry
    overflow_count: Tensor  # scores above `MAX_LOG_SCORE`, per row


class LinearLossBackend:
    """PyTorch reference of the operations on a block of logits z; `fused_loss_triton` overrides both."""

    def entropy_and_grad_(self, z: Tensor, terms: EntropyTerms) -> EntropySums:
        """Sum D over every row, and overwrite z_y by weight·∂D/∂log s_y."""
        log_s = z[:, : terms.states].to(upcast_dtype(z.dtype), copy=True)
        log_s += terms.scale[:, None] if terms.bias is None else terms.bias + terms.scale[:, None]
        excluded = torch.stack([terms.data, terms.data if terms.skip is None else terms.skip], -1)
        overflow = log_s > MAX_LOG_SCORE
        if terms.skip is not None:
            overflow.scatter_(-1, terms.skip[:, None], False)
        log_s.clamp_max_(MAX_LOG_SCORE)
        if terms.log_rest is None:
            value = grad = log_s.exp_()
        else:
            log_a = terms.log_rest[:, None]
            value, grad = score_entropy.value(log_s, log_a), score_entropy.slope(log_s, log_a)
        values = value.scatter_(-1, excluded, 0).sum(-1)
        grad = grad.mul_(terms.weight[:, None]).scatter_(-1, terms.data[:, None], terms.grad_at_data[:, None])
        if terms.skip is not None:
            grad.scatter_(-1, terms.skip[:, None], 0)
        z[:, : terms.states] = grad
        z[:, terms.states :] = 0
        return EntropySums(values, grad.sum(0), overflow.sum(-1))

    def logsumexp(self, z: Tensor, states: int, bias: Tensor | None) -> Tensor:
        """Return log Σ_{y < states} e^(z_y + bias_y) of every row."""
        z = upcast(z[:, :states])
        return (z if bias is None else z + bias).logsumexp(-1)


TORCH = LinearLossBackend()


def linear_loss_backend(device: str, dtype: torch.dtype) -> LinearLossBackend:
    """Return the Triton kernels on CUDA, except for float64; else the reference."""
    if device == "cuda" and dtype != torch.float64 and devices.has_triton():
        from sedd.ops import fused_loss_triton

        return fused_loss_triton.TRITON
    return TORCH


class ScoreEntropyLoss(NamedTuple):
    """weight·Σ_{y≠x_t} [s_y − a_y log s_y + K(a_y)], log s_y = z_y + scale, with one a at x_0 and one elsewhere.  [§4]

    Its gradient is weight·(s_y − a_y): every entry depends on its own logit alone, without a normalizer.  [§7]
    """

    states: int
    x_t: Int[Tensor, " n"] | None  # None: x_t is a mask, no state, and no entry is left out
    x_0: Int[Tensor, " n"]
    scale: Float[Tensor, " n"]
    log_data: Float[Tensor, " n"]  # log a at y = x_0
    log_rest: Float[Tensor, " n"] | None  # log a at every other y; None: a = 0
    weight: Float[Tensor, " n"]

    def loss_and_grad_(self, z: Tensor, bias: Tensor | None, backend: LinearLossBackend) -> EntropySums:
        """Return the losses of the rows; overwrite z by its gradient: the entry at x_0 here, all others there."""
        log_s = (_logit_at(z, bias, self.x_0) + self.scale).clamp_max(MAX_LOG_SCORE)
        changed = 1.0 if self.x_t is None else (self.x_t != self.x_0).to(log_s.dtype)
        grad_at_data = self.weight * changed * score_entropy.slope(log_s, self.log_data)
        log_rest = None if self.log_rest is None else self.log_rest.clamp_min(_MIN_LOG_RATIO)
        terms = EntropyTerms(self.states, bias, self.scale, self.weight, self.x_0, grad_at_data, self.x_t, log_rest)
        sums = backend.entropy_and_grad_(z, terms)
        loss = sums.values + changed * score_entropy.value(log_s, self.log_data)
        loss = torch.where(sums.overflow_count > 0, torch.inf, loss)
        return sums._replace(values=torch.where(self.weight == 0, 0, self.weight * loss))


class CrossEntropyLoss(NamedTuple):
    """−weight·log p_{x_0}, p = softmax of the first ``states`` entries.  [§5, §6]"""

    states: int
    x_0: Int[Tensor, " n"]
    weight: Float[Tensor, " n"]

    def loss_and_grad_(self, z: Tensor, bias: Tensor | None, backend: LinearLossBackend) -> EntropySums:
        """Compute the gradient p − 1_{x_0} as the gradient of score entropy with s = p and a = 0 except at x_0."""
        total = backend.logsumexp(z, self.states, bias)
        log_p = _logit_at(z, bias, self.x_0) - total
        grad_at_data = self.weight * torch.expm1(log_p)
        terms = EntropyTerms(self.states, bias, -total, self.weight, self.x_0, grad_at_data)
        sums = backend.entropy_and_grad_(z, terms)
        return sums._replace(values=torch.where(self.weight == 0, 0, -self.weight * log_p))


HeadLoss = ScoreEntropyLoss | CrossEntropyLoss


def _logit_at(z: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
    """Return the logit of y in every row, in float32 or better."""
    logit = upcast(z.gather(-1, y[:, None]).squeeze(-1))
    return logit if bias is None else logit + bias[y]


class LossOutput(NamedTuple):
    """Weighted losses, in nats."""

    total: Float[Tensor, ""]  # their sum; the only field with a gradient
    positions: Float[Tensor, "*n"]  # the loss of every row of the head's input, or of every position of a batch
    overflow_count: Int[Tensor, ""]  # number of log-scores above `MAX_LOG_SCORE`; ``positions`` is infinite there


def linear_loss(
    hidden: Float[Tensor, "n h"],
    weight: Float[Tensor, "m h"],
    bias: Float[Tensor, " m"] | None,
    loss: HeadLoss,
    *,
    dtype: torch.dtype | None = None,
    block_rows: int | None = None,
    backend: LinearLossBackend | None = None,
) -> LossOutput:
    """Return the loss of the logits ``hidden @ weight.T + bias``, of which ``block_rows`` exist at a time.

    Matrix products are in ``dtype``, by default that of ``weight``, and everything else is in float32 or better.
    """
    if weight.shape[0] < loss.states:
        raise ValueError(f"the head has {weight.shape[0]} entries per position; this loss needs {loss.states}")
    dtype = dtype or weight.dtype
    backend = backend or linear_loss_backend(hidden.device.type, dtype)
    with_grad = torch.is_grad_enabled()  # inside the autograd function it never is
    output = _LinearLoss.apply(hidden, weight, bias, loss, dtype, block_rows, backend, with_grad)  # type: ignore[no-untyped-call]
    return LossOutput(*output)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: HeadLoss,
        dtype: torch.dtype,
        block_rows: int | None,
        backend: LinearLossBackend,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.dtypes = [None if a is None else a.dtype for a in (hidden, weight, bias)]
        states, entries, accurate = loss.states, len(weight), upcast_dtype(dtype)
        width = math.ceil(states / VOCAB_MULTIPLE) * VOCAB_MULTIPLE if hidden.is_cuda else states
        hidden, head = hidden.to(dtype), weight[:states].to(dtype)
        head = F.pad(head, (0, 0, 0, width - states)) if width > states else head
        bias = None if bias is None else bias[:states].to(accurate)
        count = len(hidden)
        losses = hidden.new_empty(count, dtype=accurate)
        overflow_count = hidden.new_zeros((), dtype=torch.long)
        if with_grad:  # of the sum of all losses; entries of the head that do not count have the gradient 0
            d_hidden = torch.empty_like(hidden)
            d_weight = weight.new_zeros(max(entries, width), weight.shape[1], dtype=accurate)
            d_bias = None if bias is None else bias.new_zeros(entries)
        max_rows = block_rows or max(VOCAB_MULTIPLE, MAX_LOGITS["cuda" if hidden.is_cuda else "cpu"] // width)
        pieces = math.ceil(count / max_rows)
        logits = hidden.new_empty(math.ceil(count / max(1, pieces)), width)  # of one piece
        for i in range(pieces):
            rows = slice(count * i // pieces, count * (i + 1) // pieces)
            z = logits[: rows.stop - rows.start]
            torch.mm(hidden[rows], head.t(), out=z)
            loss_of_rows = type(loss)._make([a[rows] if isinstance(a, Tensor) else a for a in loss])
            sums = loss_of_rows.loss_and_grad_(z, bias, backend)
            losses[rows] = sums.values
            overflow_count += sums.overflow_count.sum()
            if with_grad:
                torch.mm(z, head, out=d_hidden[rows])
                _addmm_upcast(d_weight[:width], z.t(), hidden[rows])
                if d_bias is not None:
                    d_bias[:states] += sums.columns
        if with_grad:
            ctx.save_for_backward(d_hidden, d_weight[:entries], d_bias)
        ctx.mark_non_differentiable(losses, overflow_count)
        return losses.sum(), losses, overflow_count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
        grads = [(d * grad).to(dtype) if needs else None for d, dtype, needs in needed]
        return *grads, None, None, None, None, None


def _addmm_upcast(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to ``total`` without rounding the product to half precision first."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def fused_loss(
    objective: Objective,
    model: DiscreteModel,
    x_t: Tokens,
    x_0: Tokens,
    t: PerSequence,
    weight: PerSequence,
    valid: Bool[Tensor, "*b L"] | None = None,
    count: int | None = None,
) -> LossOutput | None:
    """Return the losses at valid positions, each sequence times its ``weight``; None if the objective has no such form.

    ``count`` is the number of valid positions that count in the loss; None counts them on the device, and waits for it.
    """
    network = model.network
    network = network.module if isinstance(network, nn.parallel.DistributedDataParallel) else network
    head: Any = getattr(network, "head", None)
    coefficients = objective.coefficients(model, x_t, x_0, t)
    coefficients = None if coefficients is None else coefficients.of_logits(model)
    if head is None or coefficients is None:
        return None
    counts = coefficients.counts
    selected = valid if counts is None else counts if valid is None else counts & valid
    packed = None if selected is None else pack_tokens(selected, count)
    x, sigma = coefficients.x_t, coefficients.sigma
    hidden: Tensor = model.run_network(x, sigma, valid, packed=packed, return_hidden=True)
    with torch.autocast(hidden.device.type, enabled=False):
        loss = _head_loss(coefficients, model, weight, upcast_dtype(head.weight.dtype), packed)
        found = linear_loss(hidden.flatten(0, -2), head.weight, head.bias, loss, dtype=hidden.dtype)
    losses = found.positions
    if packed is not None:  # put them back at their positions, 0 elsewhere
        losses = torch.cat([losses, losses.new_zeros(1)])[packed.inverse]
    return found._replace(positions=losses.view(x_t.shape))


def _head_loss(
    c: Coefficients, model: DiscreteModel, weight: Tensor, dtype: torch.dtype, packed: PackedTokens | None
) -> HeadLoss:
    """Return the loss of each row of logits."""
    process = model.process

    def gather(values: Tensor) -> Tensor:
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
