"""Operations of a transformer block besides attention: the PyTorch reference, for any device and precision.

`block_ops_triton` has the kernels for CUDA. Weights are passed as they are stored and cast here to their input's dtype.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.ops import fp8
from sedd.ops.fp8 import Fp8Tensor
from sedd.runtime import device as devices
from sedd.tensors import upcast

Hidden = Float[Tensor, "*s h"]
"""Hidden states of all positions, (b, L, h), or of packed ones, (n, h)."""
Pair = tuple[Tensor, Tensor] | None
"""Shift and scale of adaLN, (b, h), or weights of QK-norm for queries and keys, (d,); None: without."""


class NormSpec(NamedTuple):
    """Layer normalization (x − mean)/√(variance + eps)·weight + bias; RMS normalization if not ``centred``."""

    eps: float
    centred: bool
    weight: Float[Tensor, " h"] | None = None
    bias: Float[Tensor, " h"] | None = None


RMS_NORM = NormSpec(eps=1e-6, centred=False)
"""x/√(mean x² + 1e-6), without a weight: the matrix that follows can hold it."""


class PackedTokens(NamedTuple):
    """The selected positions of a batch of b sequences, in order."""

    positions: Int[Tensor, " n"]  # flat position of every selected token
    inverse: Int[Tensor, " s"]  # for every flat position its row among the selected tokens; n where it is not selected
    cu_seqlens: Int[Tensor, " b+1"]  # cumulative numbers of selected tokens per sequence, from 0

    @property
    def seq_len(self) -> int:
        return len(self.inverse) // (len(self.cu_seqlens) - 1)

    @property
    def sequence(self) -> Int[Tensor, " n"]:
        return self.positions // self.seq_len


class Lookup(NamedTuple):
    """A table and the row of it that each position, or all positions of a sequence, read."""

    keys: Int[Tensor, "b ..."]
    table: Float[Tensor, "rows h"]


class Rotation(NamedTuple):
    """Cosine and sine of the rotary angle of every position and frequency."""

    cos: Float[Tensor, "L half"]
    sin: Float[Tensor, "L half"]


class ResidualBranch(NamedTuple):
    """The output of a block that is yet to be added to the residual stream: gate·dropout(y + bias)."""

    y: Float[Tensor, "*s h"]
    gate: Float[Tensor, "b h"] | None
    dropout: float = 0.0  # probability of dropping an entry of y
    seed: Int[Tensor, " 2"] | None = None  # seed of the dropout mask; None: no dropout
    bias: Float[Tensor, " h"] | None = None


class BlockOps:
    """PyTorch reference of the operations; `block_ops_triton.TritonBlockOps` overrides all of them."""

    look_up: Callable[[Tensor, Tensor], Tensor] = staticmethod(F.embedding)

    def embed(
        self, lookups: Sequence[Lookup], position: Float[Tensor, "L h"] | None, norm: bool, dtype: torch.dtype
    ) -> Float[Tensor, "b L h"]:
        """Add up rows of tables, of the token itself first, and of positions; with ``norm`` return x/√(mean x² + ε).

        Both are in float32 or better, and ε is that dtype's.
        """
        token, *others = lookups
        h = upcast(self.look_up(token.keys, token.table))
        if others:
            h = h + functools.reduce(torch.add, [upcast(self.look_up(keys, table)) for keys, table in others])
        h = h if position is None else h + position
        return (F.rms_norm(h, h.shape[-1:]) if norm else h).to(dtype)

    def residual_norm_modulate(
        self,
        x: Hidden,
        branch: ResidualBranch | None,
        norm: NormSpec,
        modulation: Pair,
        dtype: torch.dtype,
        packed: PackedTokens | None = None,
        use_fp8: bool = False,
    ) -> tuple[Hidden, Hidden, Fp8Tensor | None]:
        """Add a branch to the residual stream, normalize the sum and modulate it: n·(1 + scale) + shift (adaLN).

        Return the stream, of all positions or of the packed ones, and the output in ``dtype``, and in float8 on demand.
        """

        def per_token(per_sequence: Tensor) -> Tensor:
            if packed is None:
                return per_sequence[:, None]
            return per_sequence.index_select(0, packed.sequence)  # the backward pass of [ ] adds in any order on a CPU

        if branch is not None:
            y = upcast(branch.y) if branch.bias is None else upcast(branch.y) + upcast(branch.bias)
            if branch.seed is not None:
                keep = dropout_mask(y.numel(), branch.dropout, branch.seed).view(y.shape)
                y = torch.where(keep, y / (1 - branch.dropout), 0)
            x = (upcast(x) + (y if branch.gate is None else per_token(branch.gate) * y)).to(x.dtype)
        weight = None if norm.weight is None else upcast(norm.weight)
        if norm.centred:
            bias = None if norm.bias is None else upcast(norm.bias)
            n = F.layer_norm(upcast(x), x.shape[-1:], weight, bias, eps=norm.eps)
        else:
            n = F.rms_norm(upcast(x), x.shape[-1:], weight, eps=norm.eps)
        if modulation is not None:
            shift, scale = modulation
            n = n * (1 + per_token(scale)) + per_token(shift)
        n = n.to(dtype)
        return x, n, fp8.quantize_rowwise(n.detach().flatten(0, -2)) if use_fp8 else None

    def qkv_rotary(
        self, x: Tensor, weight: Tensor, heads: int, rotation: Rotation, qk_scale: Pair, x_fp8: Fp8Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project (b, L, h) to queries, keys and values, (b, L, heads, d); apply rotary positions to queries and keys.

        With ``qk_scale`` each head of queries and keys is first RMS-normalized (QK-norm). With ``x_fp8``, ``x``
        quantized, products are in float8, except for weight gradients.
        """
        weight = weight.to(x.dtype)
        qkv = F.linear(x, weight) if x_fp8 is None else fp8.fp8_linear(x, x_fp8, weight, None)
        q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(-3)
        if qk_scale is not None:
            q = F.rms_norm(upcast(q), q.shape[-1:], upcast(qk_scale[0]), eps=RMS_NORM.eps).to(q.dtype)
            k = F.rms_norm(upcast(k), k.shape[-1:], upcast(qk_scale[1]), eps=RMS_NORM.eps).to(k.dtype)
        return apply_rotary(q, rotation), apply_rotary(k, rotation), v

    def mlp(
        self, x: Hidden, up: tuple[Tensor, Tensor | None], down: Tensor, activation: str, x_fp8: Fp8Tensor | None = None
    ) -> Hidden:
        """Compute activation(x·upᵀ + bias)·downᵀ, with ``gelu``, in its tanh form, or ``relu2``, max(0, z)².

        With ``x_fp8``, ``x`` quantized, products are in float8, except for weight gradients.
        """
        w1, b1, w2 = up[0].to(x.dtype), None if up[1] is None else up[1].to(x.dtype), down.to(x.dtype)
        z = F.linear(x, w1, b1) if x_fp8 is None else fp8.fp8_linear(x, x_fp8, w1, b1)
        inner = F.gelu(z, approximate="tanh") if activation == "gelu" else F.relu(z).square()
        if x_fp8 is None:
            return F.linear(inner, w2)
        return fp8.fp8_linear(inner, fp8.quantize_rowwise(inner.detach().flatten(0, -2)), w2, None)

    def linear(self, x: Float[Tensor, "*s k"], weight: Float[Tensor, "n k"]) -> Float[Tensor, "*s n"]:
        return F.linear(x, weight.to(x.dtype))


TORCH = BlockOps()


def select_backend(device: str, dtype: torch.dtype) -> BlockOps:
    """Return the Triton kernels on CUDA, except for float64 and inside a compiled graph; else the reference."""
    if torch.compiler.is_compiling() or device != "cuda" or dtype == torch.float64 or not devices.has_triton():
        return TORCH
    from sedd.ops import block_ops_triton

    return block_ops_triton.TRITON


def apply_rotary(x: Float[Tensor, "b L heads d"], rotation: Rotation) -> Float[Tensor, "b L heads d"]:
    """Rotate the halves a, b of every head: [a cos − b sin, a sin + b cos].

    Reference: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864.
    """
    a, b = upcast(x).chunk(2, -1)
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


_LOW_32_BITS = 0xFFFFFFFF


def dropout_mask(count: int, dropout: float, seed: Int[Tensor, " 2"]) -> Bool[Tensor, " count"]:
    """Return which of ``count`` entries to keep: a hash of their index, so that the mask need not be stored."""
    first = _hash32(seed[0])
    index = (torch.arange(count, device=seed.device) * 0x9E3779B9 + first) & _LOW_32_BITS
    return _hash32(index, _hash32(seed[1] ^ first)) >= dropout_threshold(dropout)


def dropout_threshold(dropout: float) -> int:
    """Return the 32-bit hash below which an entry is dropped."""
    return round(dropout * 2**32)


def _hash32(h: Tensor, word: Tensor | int = 0) -> Tensor:
    h = (h ^ (h >> 16)) * 0x21F0AAAD & _LOW_32_BITS
    h = (h ^ (h >> 15) ^ word) * 0xD35A2D97 & _LOW_32_BITS
    return h ^ (h >> 15)


def pack_tokens(selected: Bool[Tensor, "*b L"], count: int | None = None) -> PackedTokens:
    """Pack the ``count`` positions where ``selected`` is true; None counts them, for which the host waits for a GPU."""
    flat = selected.flatten()
    count = int(flat.sum()) if count is None else count
    positions = flat.to(torch.uint8).argsort(descending=True, stable=True)[:count]
    cu_seqlens = F.pad(selected.sum(-1).flatten().cumsum(0), (1, 0))
    return PackedTokens(positions, torch.where(flat, flat.cumsum(0) - 1, count), cu_seqlens)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, packed: PackedTokens) -> Tensor:
        ctx.shape = hidden.shape
        ctx.save_for_backward(packed.inverse)
        return hidden.flatten(0, -2).index_select(0, packed.positions)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        return torch.cat([grad, grad.new_zeros(1, grad.shape[-1])]).index_select(0, inverse).view(ctx.shape), None


gather: Callable[[Tensor, PackedTokens], Tensor] = _Gather.apply
"""Return the rows of the selected tokens: of shape (b…, h), as (n, h)."""
