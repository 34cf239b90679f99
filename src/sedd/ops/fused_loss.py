"""The loss of a batch, with objective and head fused: the logits of all positions never exist.

    loss = fused_loss(objective, model, x_t, x_0, t, weight)
    loss.total.backward()

equals ``(weight·objective.loss(model, x_t, x_0, t)).sum().backward()`` in less time and memory. The network returns the
hidden states of the positions that count, and `linear_loss` applies the objective's coefficients to them with the
weight of the head. Logits are the largest tensor of a training step: one entry of the vocabulary per position. Here
they exist for some thousand rows at a time, and are overwritten by their own gradient in the forward pass.

`TorchLinearLoss` is the reference for a block of rows, on any device; `fused_loss_triton` has the kernels for CUDA.

Reference: for cross-entropy, Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models",
arXiv 2411.09009.
"""

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd import reverse
from sedd.divergence import score_entropy
from sedd.objectives import Coefficients, CrossEntropyTerms, Objective, ScoreEntropyTerms
from sedd.ops.block_ops import PackedTokens, pack_tokens
from sedd.parameterization import DiscreteModel
from sedd.runtime import device as devices
from sedd.tensors import upcast, upcast_dtype

VOCAB_MULTIPLE = 128
"""On a GPU the logits are padded to a multiple of this many entries."""
MAX_LOGITS = {"cuda": 9 * 2**26, "cpu": 2**22}
"""Largest number of logits in memory at a time."""
MAX_LOG_SCORE = 80.0
"""Log-scores are clamped at 80, so that sums and gradients stay finite; clamped entries are counted."""
_MIN_LOG_RATIO = -70.0  # as in `divergence`


# Backends --------------------------------------------------------------------------------------------------


class EntropyTerms(NamedTuple):
    """The divergences D(s_y, a) of a block of rows, for the entries y < ``states``: log s_y = z_y + bias_y + scale.

    The entry ``skip`` of a row has no term. The entry ``data`` is left out of the sums, and its gradient is
    ``grad_at_data``.
    """

    states: int
    bias: Tensor | None
    scale: Tensor
    weight: Tensor
    data: Tensor
    grad_at_data: Tensor
    skip: Tensor | None = None
    log_rest: Tensor | None = None
    """log a; None: a = 0, and D(s_y, 0) = s_y."""


class EntropySums(NamedTuple):
    """Sums over a block of rows."""

    values: Tensor
    """Σ_y D, per row."""
    columns: Tensor
    """Σ_rows weight·∂D/∂log s_y, per entry."""
    overflow_count: Tensor
    """Scores above `MAX_LOG_SCORE`, per row."""


class LinearLossBackend(ABC):
    """The operations of a backend on a block of logits z."""

    @abstractmethod
    def entropy_and_grad_(self, z: Tensor, terms: EntropyTerms) -> EntropySums:
        """Sum D over every row, and overwrite z_y by weight·∂D/∂log s_y."""

    @abstractmethod
    def logsumexp(self, z: Tensor, states: int, bias: Tensor | None) -> Tensor:
        """Return log Σ_{y < states} e^(z_y + bias_y) of every row."""


@final
class TorchLinearLoss(LinearLossBackend):
    """PyTorch reference of the linear loss, on any device and in any precision."""

    def entropy_and_grad_(self, z: Tensor, terms: EntropyTerms) -> EntropySums:
        """Sum D over every row, and overwrite z_y by weight·∂D/∂log s_y."""
        log_s = z[:, : terms.states].to(upcast_dtype(z.dtype), copy=True)
        log_s += terms.scale[:, None] if terms.bias is None else terms.bias + terms.scale[:, None]
        excluded = torch.stack([terms.data, terms.data if terms.skip is None else terms.skip], -1)
        overflow = log_s > MAX_LOG_SCORE
        if terms.skip is not None:
            overflow.scatter_(-1, terms.skip[:, None], False)
        log_s.clamp_max_(MAX_LOG_SCORE)
        value, grad = _entropy(log_s, None if terms.log_rest is None else terms.log_rest[:, None])
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


TORCH = TorchLinearLoss()


def _entropy(log_s: Tensor, log_a: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return score entropy and its derivative in log s; both are s where a = 0."""
    if log_a is None:
        s = log_s.exp_()
        return s, s
    return score_entropy.value(log_s, log_a), score_entropy.slope(log_s, log_a)


def linear_loss_backend(device: str, dtype: torch.dtype) -> LinearLossBackend:
    """Return the Triton kernels on CUDA, except for float64; else the reference."""
    if device == "cuda" and dtype != torch.float64 and devices.has_triton():
        from sedd.ops import fused_loss_triton

        return fused_loss_triton.TRITON
    return TORCH


# Losses ----------------------------------------------------------------------------------------------------


class BlockLoss(NamedTuple):
    """The loss of a block of rows, whose logits have been overwritten by their gradient."""

    loss: Tensor
    bias_grad: Tensor
    overflow_count: Tensor


class HeadLoss(ABC):
    """A weighted loss per row of logits; the first ``states`` entries count."""

    states: int

    @abstractmethod
    def select(self, rows: slice) -> "HeadLoss":
        """Return the same loss for some of the rows."""

    @abstractmethod
    def loss_and_grad_(self, z: Tensor, bias: Tensor | None, backend: LinearLossBackend) -> BlockLoss:
        """Return the losses of the rows of logits z, and overwrite z by its gradient."""


@final
@dataclass(frozen=True)
class ScoreEntropyLoss(HeadLoss):
    """weight·Σ_{y≠x_t} [s_y − a_y log s_y + K(a_y)], log s_y = z_y + scale, with one a at x_0 and one elsewhere.  [§4]

    Its gradient is weight·(s_y − a_y): every entry depends on its own logit alone, without a normalizer.  [§7]
    """

    states: int
    x_t: Int[Tensor, " n"] | None
    """None: x_t is not among the states (a mask), and no entry is left out."""
    x_0: Int[Tensor, " n"]
    scale: Float[Tensor, " n"]
    log_data: Float[Tensor, " n"]
    """log a at y = x_0."""
    log_rest: Float[Tensor, " n"] | None
    """log a at every other y; None: a = 0."""
    weight: Float[Tensor, " n"]

    def select(self, rows: slice) -> "ScoreEntropyLoss":
        """Return the same loss for some of the rows."""
        x_t, log_rest = (None if a is None else a[rows] for a in (self.x_t, self.log_rest))
        return ScoreEntropyLoss(
            self.states, x_t, self.x_0[rows], self.scale[rows], self.log_data[rows], log_rest, self.weight[rows]
        )

    def loss_and_grad_(self, z: Tensor, bias: Tensor | None, backend: LinearLossBackend) -> BlockLoss:
        """Compute the entry at x_0 here, one per row, and all others by the backend."""
        log_s = (_logit_at(z, bias, self.x_0) + self.scale).clamp_max(MAX_LOG_SCORE)
        changed = 1.0 if self.x_t is None else (self.x_t != self.x_0).to(log_s.dtype)
        terms = EntropyTerms(
            states=self.states,
            bias=bias,
            scale=self.scale,
            weight=self.weight,
            data=self.x_0,
            grad_at_data=self.weight * changed * score_entropy.slope(log_s, self.log_data),
            skip=self.x_t,
            log_rest=None if self.log_rest is None else self.log_rest.clamp_min(_MIN_LOG_RATIO),
        )
        sums = backend.entropy_and_grad_(z, terms)
        loss = sums.values + changed * score_entropy.value(log_s, self.log_data)
        loss = torch.where(sums.overflow_count > 0, torch.inf, loss)
        return BlockLoss(torch.where(self.weight == 0, 0, self.weight * loss), sums.columns, sums.overflow_count)


@final
@dataclass(frozen=True)
class CrossEntropyLoss(HeadLoss):
    """−weight·log p_{x_0}, p = softmax of the first ``states`` entries.  [§5, §6]"""

    states: int
    x_0: Int[Tensor, " n"]
    weight: Float[Tensor, " n"]

    def select(self, rows: slice) -> "CrossEntropyLoss":
        """Return the same loss for some of the rows."""
        return CrossEntropyLoss(self.states, self.x_0[rows], self.weight[rows])

    def loss_and_grad_(self, z: Tensor, bias: Tensor | None, backend: LinearLossBackend) -> BlockLoss:
        """Compute the gradient p − 1_{x_0} as that of score entropy with s = p and a = 0 except at x_0."""
        total = backend.logsumexp(z, self.states, bias)
        log_p = _logit_at(z, bias, self.x_0) - total
        grad_at_data = self.weight * torch.expm1(log_p)
        terms = EntropyTerms(self.states, bias, -total, self.weight, self.x_0, grad_at_data)
        sums = backend.entropy_and_grad_(z, terms)
        return BlockLoss(torch.where(self.weight == 0, 0, -self.weight * log_p), sums.columns, sums.overflow_count)


def _logit_at(z: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
    """Return the logit of y in every row, in float32 or better."""
    logit = upcast(z.gather(-1, y[:, None]).squeeze(-1))
    return logit if bias is None else logit + bias[y]


# The head --------------------------------------------------------------------------------------------------


class LinearLossOutput(NamedTuple):
    """The loss of a linear head."""

    total: Float[Tensor, ""]
    """The sum over rows: the only field with a gradient."""
    rows: Float[Tensor, " n"]
    overflow_count: Int[Tensor, ""]
    """Scores above `MAX_LOG_SCORE`; the losses of their rows are infinite."""


def linear_loss(
    hidden: Float[Tensor, "n h"],
    weight: Float[Tensor, "m h"],
    bias: Float[Tensor, " m"] | None,
    loss: HeadLoss,
    *,
    dtype: torch.dtype | None = None,
    block_rows: int | None = None,
    backend: LinearLossBackend | None = None,
) -> LinearLossOutput:
    """Return the loss of the logits ``hidden @ weight.T + bias``, which never exist all at once.

    Args:
        hidden: Input of the head.
        weight: Weight of the head; entries after ``loss.states`` do not count.
        bias: Bias of the head.
        loss: The loss of every row.
        dtype: Dtype of matrix products; None: that of ``weight``. Everything else is in float32 or better.
        block_rows: Rows of logits that exist at a time; None: as many as `MAX_LOGITS` allows.
        backend: None: that of the device.
    """
    if weight.shape[0] < loss.states:
        raise ValueError(f"the head has {weight.shape[0]} entries per position; this loss needs {loss.states}")
    dtype = dtype or weight.dtype
    backend = linear_loss_backend(hidden.device.type, dtype) if backend is None else backend
    with_grad = torch.is_grad_enabled()  # inside the autograd function it never is
    output = _LinearLoss.apply(hidden, weight, bias, loss, dtype, block_rows, backend, with_grad)  # type: ignore[no-untyped-call]
    return LinearLossOutput(*output)


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
        head = _Head(weight, bias, loss.states, dtype, hidden.is_cuda)
        ctx.dtypes = [None if a is None else a.dtype for a in (hidden, weight, bias)]
        hidden = hidden.to(dtype)
        losses = hidden.new_empty(len(hidden), dtype=upcast_dtype(dtype))
        overflow_count = hidden.new_zeros((), dtype=torch.long)
        max_rows = block_rows or max(VOCAB_MULTIPLE, MAX_LOGITS["cuda" if hidden.is_cuda else "cpu"] // head.width)
        blocks = _blocks(len(hidden), max_rows)
        logits = hidden.new_empty(max((b.stop - b.start for b in blocks), default=0), head.width)  # of one block
        grads = _Grads(hidden, head) if with_grad else None
        for rows in blocks:
            z = logits[: rows.stop - rows.start]
            torch.mm(hidden[rows], head.weight.t(), out=z)
            block = loss.select(rows).loss_and_grad_(z, head.bias, backend)
            losses[rows] = block.loss
            overflow_count += block.overflow_count.sum()
            if grads is not None:
                grads.add(rows, z, block.bias_grad)
        if grads is not None:
            ctx.save_for_backward(*grads.padded(len(weight)))
        ctx.mark_non_differentiable(losses, overflow_count)
        return losses.sum(), losses, overflow_count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
        grads = ((d * grad).to(dtype) if needs else None for d, dtype, needs in needed)
        return *grads, None, None, None, None, None


def _blocks(count: int, max_rows: int) -> list[slice]:
    """Split ``count`` rows into slices of nearly equal length."""
    pieces = max(1, devices.cdiv(count, max_rows))
    ends = [count * i // pieces for i in range(pieces + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends) if a < b]


class _Head:
    """The entries of a head that count, in the dtype of matrix products."""

    def __init__(self, weight: Tensor, bias: Tensor | None, states: int, dtype: torch.dtype, pad: bool) -> None:
        self.width = devices.cdiv(states, VOCAB_MULTIPLE) * VOCAB_MULTIPLE if pad else states
        self.weight = weight[:states].to(dtype)
        if self.width > states:
            self.weight = torch.nn.functional.pad(self.weight, (0, 0, 0, self.width - states))
        self.bias = None if bias is None else bias[:states].to(upcast_dtype(dtype))


class _Grads:
    """Gradients of the summed loss in hidden, weight and bias; sums over blocks are in float32 or better."""

    def __init__(self, hidden: Tensor, head: _Head) -> None:
        self.inputs, self.head = hidden, head
        self.hidden = torch.empty_like(hidden)
        self.weight = torch.zeros_like(head.weight, dtype=upcast_dtype(hidden.dtype))
        self.bias = torch.zeros_like(head.bias) if head.bias is not None else None

    def add(self, rows: slice, d_logits: Tensor, bias_grad: Tensor) -> None:
        """Add a block of rows."""
        torch.mm(d_logits, self.head.weight, out=self.hidden[rows])
        _addmm_upcast(self.weight, d_logits.t(), self.inputs[rows])
        if self.bias is not None:
            self.bias += bias_grad

    def padded(self, entries: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients for all entries of the head; those that do not count have the gradient 0."""
        return self.hidden, _resize(self.weight, entries), None if self.bias is None else _resize(self.bias, entries)


def _resize(rows: Tensor, count: int) -> Tensor:
    missing = count - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing > 0 else rows[:count]


def _addmm_upcast(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to ``total`` without rounding the product to half precision first."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


# The loss of a batch ---------------------------------------------------------------------------------------


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
