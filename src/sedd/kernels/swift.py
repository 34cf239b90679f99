"""The twin of `glue` for CUDA: every tensor is read and written once, on the way there and on the way back."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

from sedd.kernels import joins, strips
from sedd.kernels.glue import Branch, Change, Matrix
from sedd.kernels.rows import Rows
from sedd.layers import HEAD_NORM, Norm, Rotation


def join(
    x: Tensor,
    branch: Branch | None,
    norm: Norm,
    change: Change | None,
    dtype: torch.dtype,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """See `glue.join`."""
    shift, scale = (None, None) if change is None else change
    if branch is None:
        rest = _Rest(norm, 0.0, None, dtype, rows)
        return x, _Join.apply(x, None, None, None, norm.weight, norm.bias, shift, scale, rest)[1]  # type: ignore[no-untyped-call]
    rest = _Rest(norm, branch.rate, branch.seed, dtype, rows)
    given = branch.y, branch.bias, branch.gate, norm.weight, norm.bias, shift, scale
    joined: tuple[Tensor, Tensor] = _Join.apply(x, *given, rest)  # type: ignore[no-untyped-call]
    return joined


class _Rest(NamedTuple):
    """What a join is told besides tensors with gradients."""

    norm: Norm
    rate: float
    seed: Tensor | None
    dtype: torch.dtype
    rows: Rows | None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        y_bias: Tensor | None,
        gate: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        shift: Tensor | None,
        scale: Tensor | None,
        rest: _Rest,
    ) -> tuple[Tensor | None, Tensor]:
        ctx.set_materialize_grads(False)
        x = x.contiguous()
        y = None if y is None else y.contiguous()
        length, starts = (x.shape[1], None) if rest.rows is None else (rest.rows.length, rest.rows.starts)
        plan = joins.Join(rest.norm.eps, rest.norm.centred, rest.rate if rest.seed is not None else 0.0, length)
        parts = joins.Parts(y, y_bias, gate, weight, bias, shift, scale, rest.seed, starts)
        total, n, mean, spread = joins.join(x, parts, plan, rest.dtype)
        ctx.plan = plan
        ctx.save_for_backward(total, *parts, mean, spread)
        return (None if y is None else total), n

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, dn: Tensor | None) -> tuple[Tensor | None, ...]:
        total, *parts, mean, spread = ctx.saved_tensors
        of = joins.Parts(*parts)
        if dn is None:
            dn = torch.zeros_like(total)
        back = joins.join_back(total, of, ctx.plan, mean, spread, dn.contiguous(), g)
        scale_sum, plain_sum, gate_sum, y_sum = back.sums  # over positions, for every sequence: dn·x̂, dn, dx·y, dy
        given = 1.0 if of.scale is None else 1 + of.scale
        weight = 1.0 if of.weight is None else of.weight
        d_weight = None if of.weight is None else (given * scale_sum).sum(0)
        d_bias = None if of.bias is None else (given * plain_sum).sum(0)
        d_scale = None if of.scale is None else weight * scale_sum
        if d_scale is not None and of.bias is not None:
            d_scale = d_scale + of.bias * plain_sum
        d_shift = None if of.shift is None else plain_sum
        d_gate = None if of.gate is None else gate_sum
        d_y_bias = None if of.y_bias is None else y_sum.sum(0).to(of.y_bias.dtype)
        return back.dx, back.dy, d_y_bias, d_gate, d_weight, d_bias, d_shift, d_scale, None


def turned(
    n: Tensor, weight: Tensor, heads: int, rotation: Rotation, gains: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `glue.turned`."""
    q, k, v = _Turned.apply(n, weight, heads, *rotation, *(gains or (None, None)))  # type: ignore[no-untyped-call]
    return q, k, v


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        n: Tensor,
        weight: Tensor,
        heads: int,
        cos: Tensor,
        sin: Tensor,
        q_gain: Tensor | None,
        k_gain: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gains = None if q_gain is None or k_gain is None else strips.Gains(q_gain, k_gain)
        qkv = n.new_empty(n.numel() // n.shape[-1], len(weight))
        torch.mm(n.reshape(-1, n.shape[-1]), weight.t(), out=qkv)  # `recompute.cheap` must not keep what is changed
        out = strips.turn(qkv, n.shape[1], heads, cos, sin, gains, HEAD_NORM.eps)
        ctx.save_for_backward(n, weight, cos, sin, None if gains is None else qkv, q_gain, k_gain)
        width = len(weight) // 3
        parts = out[:, :width], out[:, width : 2 * width], qkv[:, 2 * width :]
        q, k, v = (part.unflatten(0, n.shape[:2]).unflatten(-1, (heads, -1)) for part in parts)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        n, weight, cos, sin, qkv, q_gain, k_gain = ctx.saved_tensors
        gains = None if q_gain is None else strips.Gains(q_gain, k_gain)
        dqkv, d_gains = strips.turn_back(dq, dk, dv, cos if qkv is None else qkv, cos, sin, gains, HEAD_NORM.eps)
        of_gains = (None, None) if d_gains is None else d_gains
        return (dqkv @ weight).view(n.shape), dqkv.t() @ n.reshape(-1, n.shape[-1]), None, None, None, *of_gains


def thought(n: Tensor, up: Matrix, down: Tensor, bend: str) -> Tensor:
    """See `glue.thought`."""
    if torch.is_grad_enabled():
        said: Tensor = _Thought.apply(n, *up, down, bend)  # type: ignore[no-untyped-call]
        return said
    flat = n.reshape(-1, n.shape[-1])
    if bend == "gelu" and up[1] is not None:  # a matrix product that bends what it writes
        inner = torch._addmm_activation(up[1], flat, up[0].t(), use_gelu=True)
    else:
        inner = strips.bend(F.linear(flat, *up), bend)
    return F.linear(inner, down).view(n.shape)


class _Thought(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, n: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, bend: str) -> Tensor:
        flat = n.reshape(-1, n.shape[-1])
        z = F.linear(flat, w1, b1)
        ctx.bend, ctx.biased = bend, b1 is not None
        ctx.save_for_backward(n, z, w1, w2)
        return F.linear(strips.bend(z, bend), w2).view(n.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        n, z, w1, w2 = ctx.saved_tensors
        flat, dy = n.reshape(-1, n.shape[-1]), dy.reshape(-1, dy.shape[-1])
        inner, dz, columns = strips.bend_back(z, dy @ w2, ctx.bend, ctx.biased)
        d_b1 = columns.to(w1.dtype) if columns is not None else None
        return (dz @ w1).view(n.shape), dz.t() @ flat, d_b1, dy.t() @ inner, None
