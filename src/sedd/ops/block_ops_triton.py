"""Block operations for CUDA: Triton kernels that read and write every tensor once per pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.ops import activation_triton, embedding_triton, fp8, fp8_triton, residual_norm_triton, rotary_triton
from sedd.ops.block_ops import RMS_NORM, BlockOps, Lookup, NormSpec, PackedTokens, Pair, ResidualBranch, Rotation
from sedd.ops.fp8 import Fp8Tensor


@final
class TritonBlockOps(BlockOps):
    """Block operations by Triton kernels, with hand-written backward passes."""

    @staticmethod
    def look_up(keys: Tensor, table: Tensor) -> Tensor:
        """Return rows of a table; the gradient sums rows in a fixed order."""
        rows: Tensor = _Embedding.apply(keys, table)  # type: ignore[no-untyped-call]
        return rows

    def embed(self, lookups: Sequence[Lookup], position: Tensor | None, norm: bool, dtype: torch.dtype) -> Tensor:
        if not norm or len(lookups) > embedding_triton.MAX_TABLES:
            return super().embed(lookups, position, norm, dtype)
        keys = [lookup.keys.expand(lookups[0].keys.shape) for lookup in lookups]
        n: Tensor = _EmbedAndNorm.apply(keys, dtype, position, *(lookup.table for lookup in lookups))  # type: ignore[no-untyped-call]
        return n

    def residual_norm_modulate(
        self,
        x: Tensor,
        branch: ResidualBranch | None,
        norm: NormSpec,
        modulation: Pair,
        dtype: torch.dtype,
        packed: PackedTokens | None = None,
        use_fp8: bool = False,
    ) -> tuple[Tensor, Tensor, Fp8Tensor | None]:
        shift, scale = (None, None) if modulation is None else modulation
        y, gate, dropout, seed, bias = branch or (None, None, 0.0, None, None)
        tensors = y, bias, gate, norm.weight, norm.bias, shift, scale
        options = _ResidualNormOptions(norm, dropout, seed, dtype, packed, use_fp8)
        total, n, *n_fp8 = _ResidualNorm.apply(x, *tensors, options)  # type: ignore[no-untyped-call]
        return x if branch is None else total, n, Fp8Tensor(*n_fp8) if use_fp8 else None

    def qkv_rotary(
        self, x: Tensor, weight: Tensor, heads: int, rotation: Rotation, qk_scale: Pair, x_fp8: Fp8Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_scale, k_scale = qk_scale or (None, None)
        q, k, v = _QKVRotary.apply(x, weight, heads, *rotation, q_scale, k_scale, x_fp8)  # type: ignore[no-untyped-call]
        return q, k, v

    def mlp(
        self, x: Tensor, up: tuple[Tensor, Tensor | None], down: Tensor, activation: str, x_fp8: Fp8Tensor | None = None
    ) -> Tensor:
        if x_fp8 is not None or torch.is_grad_enabled():
            y: Tensor = _MLP.apply(x, *up, down, activation, x_fp8)  # type: ignore[no-untyped-call]
            return y
        flat, w1, w2 = x.reshape(-1, x.shape[-1]), up[0].to(x.dtype), down.to(x.dtype)
        b1 = None if up[1] is None else up[1].to(x.dtype)
        if activation == "gelu" and b1 is not None:  # a matrix product with GELU in its epilogue
            inner = torch._addmm_activation(b1, flat, w1.t(), use_gelu=True)
        else:
            inner = activation_triton.activation_forward(F.linear(flat, w1, b1), activation)
        return F.linear(inner, w2).view(x.shape)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
        return y


TRITON = TritonBlockOps()


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.states, ctx.dtype = len(table), table.dtype
        return F.embedding(keys, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (keys,) = ctx.saved_tensors
        rows = grad.flatten(0, -2).contiguous()
        return None, embedding_triton.segment_sum(rows, keys.flatten(), ctx.states).to(ctx.dtype)


class _EmbedAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: list[Tensor], dtype: torch.dtype, position: Tensor | None, *tables: Tensor) -> Tensor:
        keys = [k.contiguous() for k in keys]
        n, rstd = embedding_triton.embed_and_norm_forward(keys, tables, position, dtype)
        ctx.keys = keys
        ctx.save_for_backward(position, rstd, *tables)
        return n

    @staticmethod
    def backward(ctx: Any, dn: Tensor) -> tuple[Tensor | None, ...]:
        position, rstd, *tables = ctx.saved_tensors
        dh = embedding_triton.embed_and_norm_backward(ctx.keys, tables, position, rstd, dn.contiguous())
        rows = dh.flatten(0, -2)
        d_position = None if position is None else dh.sum(0, dtype=torch.float32).to(position.dtype)
        d_tables = (
            embedding_triton.segment_sum(rows, keys.flatten(), len(table)).to(table.dtype)
            for keys, table in zip(ctx.keys, tables, strict=True)
        )
        return None, None, d_position, *d_tables


class _ResidualNormOptions(NamedTuple):
    """Arguments without a gradient."""

    norm: NormSpec
    dropout: float
    seed: Tensor | None
    dtype: torch.dtype
    packed: PackedTokens | None
    use_fp8: bool


class _ResidualNorm(torch.autograd.Function):
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
        options: _ResidualNormOptions,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        x = x.contiguous()
        y = None if y is None else y.contiguous()
        norm, packed = options.norm, options.packed
        length, cu_seqlens = (x.shape[1], None) if packed is None else (packed.seq_len, packed.cu_seqlens)
        dropout = options.dropout if options.seed is not None else 0.0
        config = residual_norm_triton.ResidualNormConfig(norm.eps, norm.centred, dropout, length)
        inputs = residual_norm_triton.ResidualNormInputs(
            y, y_bias, gate, weight, bias, shift, scale, options.seed, cu_seqlens
        )
        n_fp8 = fp8_triton.empty_rowwise(x.flatten(0, -2)) if options.use_fp8 else None
        total, n, mean, rstd = residual_norm_triton.residual_norm_forward(x, inputs, config, options.dtype, n_fp8)
        ctx.config = config
        ctx.save_for_backward(total, *inputs, mean, rstd)
        ctx.mark_non_differentiable(*(n_fp8 or ()))
        return (None if y is None else total), n, *(n_fp8 or ())

    @staticmethod
    def backward(ctx: Any, d_total: Tensor | None, dn: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        total, *saved, mean, rstd = ctx.saved_tensors
        inputs = residual_norm_triton.ResidualNormInputs(*saved)
        if dn is None:
            dn = torch.zeros_like(total)
        grads = residual_norm_triton.residual_norm_backward(
            total, inputs, ctx.config, mean, rstd, dn.contiguous(), d_total
        )
        needed = {name: getattr(inputs, name) for name in ("y_bias", "gate", "weight", "bias", "shift", "scale")}
        given = (None if a is None else getattr(grads, name).to(a.dtype) for name, a in needed.items())
        return grads.dx, grads.dy, *given, None


class _QKVRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        heads: int,
        cos: Tensor,
        sin: Tensor,
        q_scale: Tensor | None,
        k_scale: Tensor | None,
        x_fp8: Fp8Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qk_scale = None if q_scale is None or k_scale is None else (q_scale, k_scale)
        flat, ctx.dtype = x.reshape(-1, x.shape[-1]), weight.dtype
        weight = weight.to(x.dtype)
        if x_fp8 is not None:
            qkv = fp8.scaled_mm(x_fp8, fp8_triton.quantize(weight), x.dtype)
        else:
            qkv = x.new_empty(len(flat), len(weight))
            # `out=` hides this product from selective activation checkpointing, which must not save what is overwritten
            torch.mm(flat, weight.t(), out=qkv)
        out = rotary_triton.qk_norm_rotary_forward(qkv, x.shape[1], heads, cos, sin, qk_scale, RMS_NORM.eps)
        ctx.save_for_backward(x, weight, cos, sin, None if qk_scale is None else qkv, q_scale, k_scale)
        ctx.use_fp8 = x_fp8 is not None
        width = len(weight) // 3
        parts = out[:, :width], out[:, width : 2 * width], qkv[:, 2 * width :]
        q, k, v = (part.unflatten(0, x.shape[:2]).unflatten(-1, (heads, -1)) for part in parts)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin, qkv, q_scale, k_scale = ctx.saved_tensors
        qk_scale = None if q_scale is None else (q_scale, k_scale)
        flat = x.reshape(-1, x.shape[-1])
        dqkv_fp8 = fp8_triton.empty_rowwise(flat, len(weight)) if ctx.use_fp8 else None
        dqkv, d_qk_scale = rotary_triton.qk_norm_rotary_backward(
            dq, dk, dv, cos if qkv is None else qkv, cos, sin, qk_scale, RMS_NORM.eps, dqkv_fp8
        )
        d_weight = _weight_grad(dqkv, flat, ctx.dtype)
        if dqkv_fp8 is not None:
            dx = fp8.scaled_mm(dqkv_fp8, fp8_triton.quantize(weight.t()), dqkv.dtype)
        else:
            dx = dqkv @ weight
        return dx.view(x.shape), d_weight, None, None, None, *(d_qk_scale or (None, None)), None


def _weight_grad(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute dyᵀx in the dtype of the weight: float32 gradients are not rounded to half precision first."""
    if dy.is_cuda and dtype == torch.float32 != dy.dtype:
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return (dy.t() @ x).to(dtype)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, activation: str, x_fp8: Fp8Tensor | None
    ) -> Tensor:
        flat, dtype = x.reshape(-1, x.shape[-1]), x.dtype
        ctx.activation, ctx.use_fp8 = activation, x_fp8 is not None
        ctx.dtypes = [None if a is None else a.dtype for a in (w1, b1, w2)]
        w1, b1, w2 = w1.to(dtype), None if b1 is None else b1.to(dtype), w2.to(dtype)
        if x_fp8 is not None:
            z = fp8.scaled_mm(x_fp8, fp8_triton.quantize(w1), dtype, b1)
            y = fp8.scaled_mm(fp8_triton.activate_and_quantize(z, activation), fp8_triton.quantize(w2), dtype)
        else:
            z = F.linear(flat, w1, b1)
            y = F.linear(activation_triton.activation_forward(z, activation), w2)
        ctx.save_for_backward(x, z, w1, w2)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, z, w1, w2 = ctx.saved_tensors
        w1_dtype, b1_dtype, w2_dtype = ctx.dtypes
        flat, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        has_bias = b1_dtype is not None
        if ctx.use_fp8:
            d_inner = fp8.scaled_mm(fp8_triton.quantize(dy), fp8_triton.quantize(w2.t()), dy.dtype)
            inner, dz, column_sums, dz_fp8 = fp8_triton.activation_backward_and_quantize(
                z, d_inner, ctx.activation, has_bias
            )
            dx = fp8.scaled_mm(dz_fp8, fp8_triton.quantize(w1.t()), dy.dtype)
        else:
            inner, dz, column_sums = activation_triton.activation_backward(z, dy @ w2, ctx.activation, has_bias)
            dx = dz @ w1
        d_b1 = None if column_sums is None else column_sums.to(b1_dtype)
        return dx.view(x.shape), _weight_grad(dz, flat, w1_dtype), d_b1, _weight_grad(dy, inner, w2_dtype), None, None


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
        return (flat @ weight).view(x.shape), _weight_grad(flat, x.reshape(-1, x.shape[-1]), ctx.dtype)
