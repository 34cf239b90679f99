"""Transformer blocks and the final layer, in the `reference` and the `modern` architecture.

A block returns the residual stream and the branch that is still to be added to it; the next block, or the final layer,
adds it, since that sum and the norm that follows are one fused kernel. An architecture defines the weights of a block;
the computation is the same for both.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.nn.layers import Float32Linear, LayerNorm, Linear, QKScale, TransformerShape
from sedd.ops import block_ops
from sedd.ops.block_ops import RMS_NORM, Modulation, NormSpec, PackedTokens, ResidualBranch, Rotation, gather
from sedd.tensors import compute_dtype


class AttentionContext(NamedTuple):
    """The inputs of attention besides queries, keys and values, the same for all blocks."""

    rotation: Rotation
    mask: Bool[Tensor, "b 1 #L L"] | None
    """True where the query (row) attends to the key (column); None: no mask but ``causal``."""
    causal: bool
    """Whether a token attends to itself and earlier tokens alone; False where ``mask`` covers that."""


def attention_context(rotation: Rotation, valid: Bool[Tensor, "b L"] | None, causal: bool) -> AttentionContext:
    """Build the mask by which valid tokens do not attend to padding.

    Every query attends to at least one key, since kernels differ on a softmax over no key.
    """
    if valid is None:
        return AttentionContext(rotation, None, causal)
    length = valid.shape[-1]
    if not causal:
        return AttentionContext(rotation, (valid | ~valid.any(-1, keepdim=True))[:, None, None], False)
    lower_triangle = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()
    diagonal = torch.eye(length, dtype=torch.bool, device=valid.device)
    return AttentionContext(rotation, (valid[:, None, None] & lower_triangle) | diagonal, False)


def attention(
    q: Float[Tensor, "b L heads d"],
    k: Float[Tensor, "b L heads d"],
    v: Float[Tensor, "b L heads d"],
    context: AttentionContext,
) -> Float[Tensor, "b L h"]:
    """Compute softmax(q·k/√d) v with concatenated heads; q and k already carry the rotary embedding."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # views, since heads are adjacent in memory
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask, is_causal=context.causal)
    return output.transpose(1, 2).flatten(-2)


class BlockModulation(NamedTuple):
    """adaLN of one half of a block: modulation of its norm and gate of its residual branch; None without σ."""

    modulation: Modulation | None
    gate: Float[Tensor, "b h"] | None


def block_modulations(layer: Float32Linear | None, c: Tensor | None) -> tuple[BlockModulation, BlockModulation]:
    """Return the modulation of the attention half and of the MLP half, from shift, scale and gate of each."""
    if layer is None or c is None:
        return BlockModulation(None, None), BlockModulation(None, None)
    shift1, scale1, gate1, shift2, scale2, gate2 = layer(c).chunk(6, -1)
    return BlockModulation(Modulation(shift1, scale1), gate1), BlockModulation(Modulation(shift2, scale2), gate2)


def final_modulation(layer: Float32Linear | None, c: Tensor | None) -> Modulation | None:
    """Return the modulation of the final norm."""
    return None if layer is None or c is None else Modulation(*layer(c).chunk(2, -1))


class BlockWeights(NamedTuple):
    """The weights of a block: norm and attention, then norm and MLP."""

    norms: tuple[NormSpec, NormSpec]
    qkv: Linear
    qk_scale: tuple[Tensor, Tensor] | None
    """Scales of normalized queries and keys; None: they are not normalized."""
    out: Linear
    up: Linear
    down: Linear
    activation: str
    """``gelu`` or ``relu2``."""
    modulation: Float32Linear | None
    """The adaLN layer; None without noise conditioning."""


class Block(nn.Module, ABC):
    """A transformer block: attention and MLP, each after a norm and beside a residual connection."""

    use_fp8 = False
    """Whether matrix products run in float8 where that is faster; see `ops.fp8`."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout

    @abstractmethod
    def block_weights(self) -> BlockWeights:
        """Return the weights."""

    def forward(
        self,
        x: Float[Tensor, "b L h"],
        branch: ResidualBranch | None,
        c: Float[Tensor, "b cond"] | None,
        context: AttentionContext,
        packed: PackedTokens | None = None,
    ) -> tuple[Float[Tensor, "*s h"], ResidualBranch]:
        """Return the residual stream and the branch that is still to be added to it.

        Args:
            x: The residual stream.
            branch: The previous block's branch, to be added to ``x``.
            c: The noise-level embedding.
            context: Rotary angles and the attention mask.
            packed: In the last block, the positions that are read. Attention is over all positions, and everything
                after it is computed for these alone.
        """
        w = self.block_weights()
        dtype = compute_dtype(w.qkv.weight)
        backend, dropout = block_ops.select_backend(x.device.type, dtype), self.dropout if self.training else 0.0
        attention_half, mlp_half = block_modulations(w.modulation, c)

        x, n, n_fp8 = backend.residual_norm_modulate(
            x, branch, w.norms[0], attention_half.modulation, dtype, None, self.use_fp8
        )
        q, k, v = backend.qkv_rotary(n, w.qkv.weight, self.heads, context.rotation, w.qk_scale, n_fp8)
        attended = attention(q, k, v, context)
        x, attended = gather(x, packed), gather(attended, packed)
        branch = ResidualBranch.with_dropout(backend.linear(attended, w.out.weight), attention_half.gate, dropout)

        x, n, n_fp8 = backend.residual_norm_modulate(
            x, branch, w.norms[1], mlp_half.modulation, dtype, packed, self.use_fp8
        )
        y = backend.mlp(n, (w.up.weight, w.up.bias), w.down.weight, w.activation, n_fp8)
        # a copy: FSDP has freed this block's weights when the next block adds the bias
        bias = None if w.down.bias is None else w.down.bias.clone()
        return x, ResidualBranch.with_dropout(y, mlp_half.gate, dropout, bias)


class FinalLayer(nn.Module, ABC):
    """Norm and modulation before the head, and the head itself."""

    linear: Linear

    @abstractmethod
    def norm_and_modulation(self) -> tuple[NormSpec, Float32Linear | None]:
        """Return the norm and its adaLN layer."""

    def forward(
        self,
        x: Float[Tensor, "*s h"],
        branch: ResidualBranch | None,
        c: Float[Tensor, "b cond"] | None,
        packed: PackedTokens | None = None,
    ) -> Float[Tensor, "*s h"]:
        """Return the hidden states that the head reads."""
        norm, layer = self.norm_and_modulation()
        dtype = compute_dtype(self.linear.weight)
        backend = block_ops.select_backend(x.device.type, dtype)
        return backend.residual_norm_modulate(x, branch, norm, final_modulation(layer, c), dtype, packed)[1]


# The architecture of the published models ------------------------------------------------------------------


@final
class ReferenceBlock(Block):
    """LayerNorm → modulate → attention → gate, then LayerNorm → modulate → GELU MLP → gate, each beside a residual."""

    mlp: Mapping[str, Linear]

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(shape)
        width, cond_dim = shape.width, shape.cond_dim
        self.norm1 = LayerNorm(width, bias=cond_dim is None)
        self.attn_qkv = Linear(width, 3 * width, bias=False)
        self.attn_out = Linear(width, width, bias=False)
        self.norm2 = LayerNorm(width, bias=cond_dim is None)
        mlp = nn.ModuleDict({"0": Linear(width, 4 * width), "2": Linear(4 * width, width)})  # GELU is between them
        self.mlp = mlp  # type: ignore[assignment]
        self.adaLN_modulation = None if cond_dim is None else Float32Linear(cond_dim, 6 * width, zero=True)

    def block_weights(self) -> BlockWeights:
        """Return the weights."""
        norms, (up, down) = (self.norm1(), self.norm2()), self.mlp.values()
        return BlockWeights(norms, self.attn_qkv, None, self.attn_out, up, down, "gelu", self.adaLN_modulation)


@final
class ReferenceFinalLayer(FinalLayer):
    """LayerNorm → modulate → head with a bias."""

    def __init__(self, shape: TransformerShape, outputs: int) -> None:
        super().__init__()
        width, cond_dim = shape.width, shape.cond_dim
        self.norm_final = LayerNorm(width, bias=cond_dim is None)
        self.linear = Linear(width, outputs, zero=True)
        self.adaLN_modulation = None if cond_dim is None else Float32Linear(cond_dim, 2 * width, zero=True)

    def norm_and_modulation(self) -> tuple[NormSpec, Float32Linear | None]:
        """Return the norm and its adaLN layer."""
        return self.norm_final(), self.adaLN_modulation


# The modern architecture -----------------------------------------------------------------------------------


@final
class ModernBlock(Block):
    """RMSNorm → modulate → attention with QK-norm → gate, then RMSNorm → modulate → squared-ReLU MLP → gate.

    References: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv 1910.07467; So et al. 2021,
    "Primer: Searching for Efficient Transformers for Language Modeling", arXiv 2109.08668 (squared ReLU).
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(shape)
        width, cond_dim = shape.width, shape.cond_dim
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False, zero=shape.zero_branches)
        self.q_norm, self.k_norm = QKScale(shape.head_dim), QKScale(shape.head_dim)
        self.up = Linear(width, 4 * width, bias=False)
        self.down = Linear(4 * width, width, bias=False, zero=shape.zero_branches)
        self.modulation = None if cond_dim is None else Float32Linear(cond_dim, 6 * width, bias=False, zero=True)

    def block_weights(self) -> BlockWeights:
        """Return the weights."""
        norms, scales = (RMS_NORM, RMS_NORM), (self.q_norm(), self.k_norm())
        return BlockWeights(norms, self.qkv, scales, self.out, self.up, self.down, "relu2", self.modulation)


@final
class ModernFinalLayer(FinalLayer):
    """RMSNorm → modulate → head without a bias."""

    def __init__(self, shape: TransformerShape, outputs: int) -> None:
        super().__init__()
        width, cond_dim = shape.width, shape.cond_dim
        self.linear = Linear(width, outputs, bias=False, zero=True)
        self.modulation = None if cond_dim is None else Float32Linear(cond_dim, 2 * width, bias=False, zero=True)

    def norm_and_modulation(self) -> tuple[NormSpec, Float32Linear | None]:
        """Return the norm and its adaLN layer."""
        return RMS_NORM, self.modulation
