"""Blocks of transformers, and what stands between the last of them and the head; two styles of either.

A block does not add its answer to the stream: it hands both on, and whoever reads next adds it, since that sum and the
norm that follows are one kernel. A style says what a block is made of; what is done with it is the same for both.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple, final

from jaxtyping import Float
from torch import Tensor, nn

from sedd.diffusion.precision import compute_dtype
from sedd.nn.layers import AttentionContext, Float32Linear, LayerNorm, Linear, QKScale, Shape, attend
from sedd.ops import block_ops
from sedd.ops.block_ops import RMS_NORM, Modulation, NormSpec, ResidualBranch
from sedd.ops.packed_tokens import PackedTokens, gather


class Parts(NamedTuple):
    """What a block is made of: attention, then two matrices with an activation between them, a norm before each."""

    norms: tuple[NormSpec, NormSpec]
    qkv: Linear
    gains: tuple[Tensor, Tensor] | None
    """Of normed queries and keys; None: they are not normed."""
    out: Linear
    up: Linear
    down: Linear
    activation: str
    """The activation."""
    modulation: Float32Linear | None
    """What σ decides; None: nothing."""


class Block(nn.Module, ABC):
    """A part of a network that reads the stream and has something to add to it."""

    narrow = False
    """Whether its products are of `kernels.eighths`, where that is worth it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout

    @abstractmethod
    def parts(self) -> Parts:
        """What it is made of."""

    def forward(
        self,
        x: Float[Tensor, "b L h"],
        branch: ResidualBranch | None,
        c: Float[Tensor, "b cond"] | None,
        sight: AttentionContext,
        rows: PackedTokens | None = None,
    ) -> tuple[Float[Tensor, "*s h"], ResidualBranch]:
        """The stream and what is still to be added to it: whoever reads next does that.

        With ``rows`` it goes no further than these: all are seen, and nobody reads the others. At the start, where the
        modulation is 0, nothing is added if σ is told.
        """
        of = self.parts()
        dtype = compute_dtype(of.qkv.weight)
        backend, dropout = block_ops.select_backend(x.device.type, dtype), self.dropout if self.training else 0.0
        first, second = _told(of.modulation, c)
        x, n, n_fp8 = backend.residual_norm_modulate(x, branch, of.norms[0], first.change, dtype, None, self.narrow)
        seen = attend(*backend.qkv_rotary(n, of.qkv.weight, self.heads, sight.rotation, of.gains, n_fp8), sight)
        x, seen = gather(x, rows), gather(seen, rows)
        added = ResidualBranch.with_dropout(backend.linear(seen, of.out.weight), first.gate, dropout)
        x, n, n_fp8 = backend.residual_norm_modulate(x, added, of.norms[1], second.change, dtype, rows, self.narrow)
        y = backend.mlp(n, (of.up.weight, of.up.bias), of.down.weight, of.activation, n_fp8)
        bias = (
            None if of.down.bias is None else of.down.bias.clone()
        )  # its shards are gone when the next block reads it
        return x, ResidualBranch.with_dropout(y, second.gate, dropout, bias)


class FinalLayer(nn.Module, ABC):
    """NormSpec, modulation and head."""

    linear: Linear

    @abstractmethod
    def parts(self) -> tuple[NormSpec, Float32Linear | None]:
        """The norm, and what σ decides of it."""

    def forward(
        self,
        x: Float[Tensor, "*s h"],
        branch: ResidualBranch | None,
        c: Float[Tensor, "b cond"] | None,
        rows: PackedTokens | None = None,
    ) -> Float[Tensor, "*s h"]:
        """What the head reads."""
        norm, modulation = self.parts()
        dtype = compute_dtype(self.linear.weight)
        backend = block_ops.select_backend(x.device.type, dtype)
        return backend.residual_norm_modulate(x, branch, norm, _changed(modulation, c), dtype, rows)[1]


class Told(NamedTuple):
    """What σ decides of a half of a block."""

    change: Modulation | None
    gate: Float[Tensor, "b h"] | None


def _told(modulation: Float32Linear | None, c: Tensor | None) -> tuple[Told, Told]:
    """What σ decides of both halves of a block: shift, scale and gate of each, in this order."""
    if modulation is None or c is None:
        return Told(None, None), Told(None, None)
    shift1, scale1, gate1, shift2, scale2, gate2 = modulation(c).chunk(6, -1)
    return Told(Modulation(shift1, scale1), gate1), Told(Modulation(shift2, scale2), gate2)


def _changed(modulation: Float32Linear | None, c: Tensor | None) -> Modulation | None:
    """What σ decides of the last norm."""
    return None if modulation is None or c is None else Modulation(*modulation(c).chunk(2, -1))


# The published network -------------------------------------------------------------------------------------


@final
class ReferenceBlock(Block):
    """LayerNorm → modulate → attention → gate, then LayerNorm → modulate → GELU MLP → gate, each beside a residual."""

    mlp: Mapping[str, Linear]

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width, timed = shape.width, shape.cond is not None
        self.norm1 = LayerNorm(width, bias=not timed)
        self.attn_qkv = Linear(width, 3 * width, bias=False)
        self.attn_out = Linear(width, width, bias=False)
        self.norm2 = LayerNorm(width, bias=not timed)
        mlp = nn.ModuleDict({"0": Linear(width, 4 * width), "2": Linear(4 * width, width)})  # GELU is between them
        self.mlp = mlp  # type: ignore[assignment]
        self.adaLN_modulation = None if shape.cond is None else Float32Linear(shape.cond, 6 * width, zero=True)

    def parts(self) -> Parts:
        """What it is made of."""
        norms, (up, down) = (self.norm1(), self.norm2()), self.mlp.values()
        return Parts(norms, self.attn_qkv, None, self.attn_out, up, down, "gelu", self.adaLN_modulation)


@final
class ReferenceFinalLayer(FinalLayer):
    """LayerNorm → modulate → projection with a bias."""

    def __init__(self, shape: Shape, outputs: int) -> None:
        super().__init__()
        self.norm_final = LayerNorm(shape.width, bias=shape.cond is None)
        self.linear = Linear(shape.width, outputs, zero=True)
        self.adaLN_modulation = None if shape.cond is None else Float32Linear(shape.cond, 2 * shape.width, zero=True)

    def parts(self) -> tuple[NormSpec, Float32Linear | None]:
        """The norm, and what σ decides of it."""
        return self.norm_final(), self.adaLN_modulation


# The network to train anew ---------------------------------------------------------------------------------


@final
class ModernBlock(Block):
    """RMSNorm → modulate → attention → gate, then RMSNorm → modulate → squared ReLU → gate, each beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width = shape.width
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False)
        self.q_norm, self.k_norm = QKScale(shape.head_dim), QKScale(shape.head_dim)
        self.up = Linear(width, 4 * width, bias=False)
        self.down = Linear(4 * width, width, bias=False)
        self.modulation = None if shape.cond is None else Float32Linear(shape.cond, 6 * width, bias=False, zero=True)

    def parts(self) -> Parts:
        """What it is made of."""
        gains = self.q_norm(), self.k_norm()
        return Parts((RMS_NORM, RMS_NORM), self.qkv, gains, self.out, self.up, self.down, "relu2", self.modulation)


@final
class ModernFinalLayer(FinalLayer):
    """RMSNorm → modulate → projection."""

    def __init__(self, shape: Shape, outputs: int) -> None:
        super().__init__()
        self.linear = Linear(shape.width, outputs, bias=False, zero=True)
        self.modulation = (
            None if shape.cond is None else Float32Linear(shape.cond, 2 * shape.width, bias=False, zero=True)
        )

    def parts(self) -> tuple[NormSpec, Float32Linear | None]:
        """The norm, and what σ decides of it."""
        return RMS_NORM, self.modulation
