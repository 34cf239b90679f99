"""The twin of `glue` for CUDA: every tensor is read and written once, on the way there and on the way back."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

from sedd.ops import embedding_triton, fp8, fp8_triton, residual_norm_triton, rotary_triton
from sedd.ops.block_ops import RMS_NORM, Matrix, Modulation, NormSpec, ResidualBranch, Rotation
from sedd.ops.fp8 import Fp8Tensor
from sedd.ops.packed_tokens import PackedTokens


def looked(x: Tensor, table: Tensor) -> Tensor:
    """See `glue.looked`."""
    rows: Tensor = _Looked.apply(x, table)  # type: ignore[no-untyped-call]
    return rows


class _Looked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.states, ctx.dtype = len(table), table.dtype
        return F.embedding(x, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, embedding_triton.summed(grad.flatten(0, -2).contiguous(), x.flatten(), ctx.states).to(ctx.dtype)


def join(
    x: Tensor,
    branch: ResidualBranch | None,
    norm: NormSpec,
    change: Modulation | None,
    dtype: torch.dtype,
    rows: PackedTokens | None = None,
    narrow: bool = False,
) -> tuple[Tensor, Tensor, Fp8Tensor | None]:
    """See `glue.join`."""
    shift, scale = (None, None) if change is None else change
    y, gate, rate, seed, bias = branch or (None, None, 0.0, None, None)
    given = y, bias, gate, norm.weight, norm.bias, shift, scale
    total, n, *few = _Join.apply(x, *given, _Rest(norm, rate, seed, dtype, rows, narrow))  # type: ignore[no-untyped-call]
    return x if branch is None else total, n, Fp8Tensor(*few) if narrow else None


class _Rest(NamedTuple):
    """What a join is told besides tensors with gradients."""

    norm: NormSpec
    rate: float
    seed: Tensor | None
    dtype: torch.dtype
    rows: PackedTokens | None
    narrow: bool


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
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        x = x.contiguous()
        y = None if y is None else y.contiguous()
        length, starts = (x.shape[1], None) if rest.rows is None else (rest.rows.length, rest.rows.starts)
        plan = residual_norm_triton.Join(
            rest.norm.eps, rest.norm.centred, rest.rate if rest.seed is not None else 0.0, length
        )
        parts = residual_norm_triton.Parts(y, y_bias, gate, weight, bias, shift, scale, rest.seed, starts)
        few = fp8_triton.empty(x.flatten(0, -2)) if rest.narrow else None
        total, n, mean, spread = residual_norm_triton.join(x, parts, plan, rest.dtype, few)
        ctx.plan = plan
        ctx.save_for_backward(total, *parts, mean, spread)
        ctx.mark_non_differentiable(*(few or ()))
        return (None if y is None else total), n, *(few or ())

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, dn: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        total, *parts, mean, spread = ctx.saved_tensors
        of = residual_norm_triton.Parts(*parts)
        if dn is None:
            dn = torch.zeros_like(total)
        back = residual_norm_triton.join_back(total, of, ctx.plan, mean, spread, dn.contiguous(), g)
        told = {"y_bias": of.y_bias, "gate": of.gate, "weight": of.weight, "bias": of.bias}
        told |= {"shift": of.shift, "scale": of.scale}
        given = (None if a is None else getattr(back, name).to(a.dtype) for name, a in told.items())
        return back.dx, back.dy, *given, None


def turned(
    n: Tensor,
    weight: Tensor,
    heads: int,
    rotation: Rotation,
    gains: tuple[Tensor, Tensor] | None,
    few: Fp8Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `glue.turned`."""
    q, k, v = _Turned.apply(n, weight, heads, *rotation, *(gains or (None, None)), few)  # type: ignore[no-untyped-call]
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
        few: Fp8Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gains = None if q_gain is None or k_gain is None else rotary_triton.Gains(q_gain, k_gain)
        flat, ctx.dtype = n.reshape(-1, n.shape[-1]), weight.dtype
        weight = weight.to(n.dtype)
        if few is not None:
            qkv = fp8.product(few, fp8_triton.press(weight), n.dtype)
        else:
            qkv = n.new_empty(len(flat), len(weight))
            torch.mm(flat, weight.t(), out=qkv)  # `recompute.cheap` must not keep what is changed
        out = rotary_triton.turn(qkv, n.shape[1], heads, cos, sin, gains, RMS_NORM.eps)
        ctx.save_for_backward(n, weight, cos, sin, None if gains is None else qkv, q_gain, k_gain)
        width = len(weight) // 3
        parts = out[:, :width], out[:, width : 2 * width], qkv[:, 2 * width :]
        q, k, v = (part.unflatten(0, n.shape[:2]).unflatten(-1, (heads, -1)) for part in parts)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        n, weight, cos, sin, qkv, q_gain, k_gain = ctx.saved_tensors
        gains = None if q_gain is None else rotary_triton.Gains(q_gain, k_gain)
        dqkv, d_gains = rotary_triton.turn_back(dq, dk, dv, cos if qkv is None else qkv, cos, sin, gains, RMS_NORM.eps)
        of_gains = (None, None) if d_gains is None else d_gains
        d_weight = _of_weight(dqkv, n.reshape(-1, n.shape[-1]), ctx.dtype)
        return (dqkv @ weight).view(n.shape), d_weight, None, None, None, *of_gains, None


def _of_weight(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dyᵀx, the gradient of a weight: not rounded to half precision on its way to a weight that is not."""
    if dy.is_cuda and dtype == torch.float32 != dy.dtype:
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return (dy.t() @ x).to(dtype)


def thought(n: Tensor, up: Matrix, down: Tensor, bend: str, few: Fp8Tensor | None = None) -> Tensor:
    """See `glue.thought`."""
    if few is not None or torch.is_grad_enabled():
        said: Tensor = _Thought.apply(n, *up, down, bend, few)  # type: ignore[no-untyped-call]
        return said
    flat, w1, w2 = n.reshape(-1, n.shape[-1]), up[0].to(n.dtype), down.to(n.dtype)
    b1 = None if up[1] is None else up[1].to(n.dtype)
    if bend == "gelu" and b1 is not None:  # a matrix product that bends what it writes
        inner = torch._addmm_activation(b1, flat, w1.t(), use_gelu=True)
    else:
        inner = rotary_triton.bend(F.linear(flat, w1, b1), bend)
    return F.linear(inner, w2).view(n.shape)


class _Thought(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, n: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, bend: str, few: Fp8Tensor | None
    ) -> Tensor:
        flat, dtype = n.reshape(-1, n.shape[-1]), n.dtype
        ctx.bend, ctx.narrow, ctx.dtypes = bend, few is not None, [None if a is None else a.dtype for a in (w1, b1, w2)]
        w1, b1, w2 = w1.to(dtype), None if b1 is None else b1.to(dtype), w2.to(dtype)
        if few is not None:
            z = fp8.product(few, fp8_triton.press(w1), dtype, b1)
            y = fp8.product(fp8_triton.bend(z, bend), fp8_triton.press(w2), dtype)
        else:
            z = F.linear(flat, w1, b1)
            y = F.linear(rotary_triton.bend(z, bend), w2)
        ctx.save_for_backward(n, z, w1, w2)
        return y.view(n.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        n, z, w1, w2 = ctx.saved_tensors
        of_w1, of_b1, of_w2 = ctx.dtypes
        flat, dy = n.reshape(-1, n.shape[-1]), dy.reshape(-1, dy.shape[-1])
        narrow = (fp8_triton.press(dy), fp8_triton.press(w2.t())) if ctx.narrow else None
        d_inner = dy @ w2 if narrow is None else fp8.product(*narrow, dy.dtype)
        inner, dz, columns = rotary_triton.bend_back(z, d_inner, ctx.bend, of_b1 is not None)
        d_b1 = None if columns is None else columns.to(of_b1)
        return (dz @ w1).view(n.shape), _of_weight(dz, flat, of_w1), d_b1, _of_weight(dy, inner, of_w2), None, None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `glue.linear`."""
    said: Tensor = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return said


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.dtype, weight = weight.dtype, weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat = dy.reshape(-1, dy.shape[-1])
        return (flat @ weight).view(x.shape), _of_weight(flat, x.reshape(-1, x.shape[-1]), ctx.dtype)
