"""Loss of a linear head and its gradients, a block of rows at a time, formed on the way forwards."""

import itertools
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.ops import linear_loss_reference
from sedd.ops.loss_terms import Cost, Twin
from sedd.runtime import device as card

LANES = 128
"""On an accelerator the output has a multiple of this many entries, the last of them unused."""
ENTRIES = {"cuda": 9 * 2**26, "cpu": 2**22}
"""How much of the output there is at a time, at most."""


class Loss(NamedTuple):
    """What a head's output costs."""

    total: Float[Tensor, ""]
    """The sum over rows: the only one of the three with a gradient."""
    rows: Float[Tensor, " n"]
    overflow_count: Int[Tensor, ""]
    """How many scores were beyond `definition.GUARD`. Their rows' losses are infinite, as they should be."""


def linear_loss(
    hidden: Float[Tensor, "n h"],
    weight: Float[Tensor, "m h"],
    bias: Float[Tensor, " m"] | None,
    cost: Cost,
    *,
    dtype: torch.dtype | None = None,
    block: int | None = None,
    twin: Twin | None = None,
) -> Loss:
    """What the rows of ``hidden @ weight.T + bias`` cost, without that product.

    Matrix products run in ``dtype`` (that of the weights, if None), everything else in float32 or better. ``block`` is
    how many rows there are at a time.
    """
    if weight.shape[0] < cost.states:
        raise ValueError(f"the head has {weight.shape[0]} entries a position; this cost needs {cost.states}")
    dtype = dtype or weight.dtype
    twin = chosen(hidden.device.type, dtype) if twin is None else twin
    formed = torch.is_grad_enabled()  # inside the function it never is
    return Loss(*_LinearLoss.apply(hidden, weight, bias, cost, dtype, block, twin, formed))  # type: ignore[no-untyped-call]


def chosen(device: str, dtype: torch.dtype) -> Twin:
    """The twin in Triton on CUDA, where it runs and float32 is exact enough; else the definition."""
    if device == "cuda" and dtype != torch.float64 and card.has_triton():
        from sedd.ops import linear_loss_triton

        return linear_loss_triton
    return linear_loss_reference


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cost: Cost,
        dtype: torch.dtype,
        block: int | None,
        twin: Twin,
        formed: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = torch.promote_types(dtype, torch.float32)
        head = _Head(weight, bias, cost.states, dtype, hidden.is_cuda)
        ctx.dtypes = [None if a is None else a.dtype for a in (hidden, weight, bias)]
        hidden = hidden.to(dtype)
        loss = hidden.new_empty(len(hidden), dtype=exact)
        overflow_count = hidden.new_zeros((), dtype=torch.long)
        most = block or max(LANES, ENTRIES["cuda" if hidden.is_cuda else "cpu"] // head.width)
        blocks = _blocks(len(hidden), most)
        output = hidden.new_empty(max((b.stop - b.start for b in blocks), default=0), head.width)  # of one at a time
        gradients = _Gradients(hidden, head) if formed else None
        for rows in blocks:
            z = output[: rows.stop - rows.start]
            torch.mm(hidden[rows], head.weight.t(), out=z)
            part = cost.part(rows).form_(z, head.bias, twin)
            loss[rows] = part.loss
            overflow_count += part.overflow_count.sum()
            if gradients is not None:
                gradients.add(rows, z, part.columns)
        if gradients is not None:
            ctx.save_for_backward(*gradients.whole(len(weight)))
        ctx.mark_non_differentiable(loss, overflow_count)
        return loss.sum(), loss, overflow_count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
        given = ((d * grad).to(dtype) if needs else None for d, dtype, needs in needed)
        return *given, None, None, None, None, None


def _blocks(count: int, most: int) -> list[slice]:
    """Slices of nearly equal length, ``most`` or less."""
    pieces = max(1, -(-count // most))
    ends = [count * i // pieces for i in range(pieces + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends) if a < b]


class _Head:
    """The entries of a head that count, in the dtype of matrix products."""

    def __init__(self, weight: Tensor, bias: Tensor | None, states: int, dtype: torch.dtype, pad: bool) -> None:
        self.width = -(-states // LANES) * LANES if pad else states
        self.weight = weight[:states].to(dtype)
        if self.width > states:
            self.weight = torch.nn.functional.pad(self.weight, (0, 0, 0, self.width - states))
        exact = torch.promote_types(dtype, torch.float32)
        self.bias = None if bias is None else bias[:states].to(exact)


class _Gradients:
    """Of the summed loss, in hidden, weight and bias. Sums over blocks are in float32 or better."""

    def __init__(self, hidden: Tensor, head: _Head) -> None:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        self.inputs, self.head = hidden, head
        self.hidden = torch.empty_like(hidden)
        self.weight = torch.zeros_like(head.weight, dtype=exact)
        self.bias = torch.zeros_like(head.bias) if head.bias is not None else None

    def add(self, rows: slice, slope: Tensor, columns: Tensor) -> None:
        """A block of rows, whose output has the gradient ``slope``."""
        torch.mm(slope, self.head.weight, out=self.hidden[rows])
        _add_product(self.weight, slope.t(), self.inputs[rows])
        if self.bias is not None:
            self.bias += columns

    def whole(self, entries: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """With as many entries as the head has; those that do not count have the gradient 0."""
        return self.hidden, _to(self.weight, entries), None if self.bias is None else _to(self.bias, entries)


def _to(rows: Tensor, count: int) -> Tensor:
    missing = count - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing > 0 else rows[:count]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b; products of half precision are not rounded to it before they are summed."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
