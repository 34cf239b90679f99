"""Blocks of transformers, in two styles, and what stands between the last of them and the head.

A block does not add its answer to the stream: it hands both on, and whoever reads next adds it, since that sum and the
norm that follows are one kernel.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple, final

from jaxtyping import Float
from torch import Tensor, nn

from sedd import kernels
from sedd.kernels import Branch, Change, Rows
from sedd.layers import RMS, Gain, LayerNorm, Linear, Shape, Sight, WideLinear, attend, working


class Block(nn.Module, ABC):
    """A part of a network that reads the stream and has something to add to it."""

    narrow = False
    """Whether its products are of `kernels.eighths`, where that is worth it."""

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "b L h"],
        branch: Branch | None,
        c: Float[Tensor, "b cond"] | None,
        sight: Sight,
        rows: Rows | None = None,
    ) -> tuple[Float[Tensor, "*s h"], Branch]:
        """The stream and what is still to be added to it: whoever reads next does that.

        With ``rows`` it goes no further than these: all are seen, and nobody reads the others.
        """


class Last(nn.Module, ABC):
    """Norm, modulation and head."""

    linear: Linear

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "*s h"],
        branch: Branch | None,
        c: Float[Tensor, "b cond"] | None,
        rows: Rows | None = None,
    ) -> Float[Tensor, "*s h"]:
        """What the head reads."""


class Told(NamedTuple):
    """What σ decides of a half of a block."""

    change: Change | None
    gate: Float[Tensor, "b h"] | None


def _told(modulation: WideLinear | None, c: Tensor | None) -> tuple[Told, Told]:
    """What σ decides of both halves of a block: shift, scale and gate of each, in this order."""
    if modulation is None or c is None:
        return Told(None, None), Told(None, None)
    shift1, scale1, gate1, shift2, scale2, gate2 = modulation(c).chunk(6, -1)
    return Told(Change(shift1, scale1), gate1), Told(Change(shift2, scale2), gate2)


def _changed(modulation: WideLinear | None, c: Tensor | None) -> Change | None:
    """What σ decides of the last norm."""
    return None if modulation is None or c is None else Change(*modulation(c).chunk(2, -1))


# The published network -------------------------------------------------------------------------------------


@final
class ReferenceBlock(Block):
    """LayerNorm → modulate → attention → gate, then LayerNorm → modulate → GELU MLP → gate, each beside a residual."""

    mlp: Mapping[str, Linear]

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, timed = shape.width, shape.cond is not None
        self.heads, self.dropout = shape.heads, shape.dropout
        self.norm1 = LayerNorm(width, bias=not timed)
        self.attn_qkv = Linear(width, 3 * width, bias=False)
        self.attn_out = Linear(width, width, bias=False)
        self.norm2 = LayerNorm(width, bias=not timed)
        mlp = nn.ModuleDict({"0": Linear(width, 4 * width), "2": Linear(4 * width, width)})  # GELU is between them
        self.mlp = mlp  # type: ignore[assignment]
        self.adaLN_modulation = None if shape.cond is None else WideLinear(shape.cond, 6 * width, zero=True)

    def forward(
        self,
        x: Float[Tensor, "b L h"],
        branch: Branch | None,
        c: Float[Tensor, "b cond"] | None,
        sight: Sight,
        rows: Rows | None = None,
    ) -> tuple[Float[Tensor, "*s h"], Branch]:
        """At the start, where the modulation is 0, nothing is added if σ is told."""
        dtype = working(self.attn_qkv.weight)
        via, drop = kernels.between(x.device.type, dtype), self.dropout if self.training else 0.0
        first, second = _told(self.adaLN_modulation, c)
        x, n, few = via.join(x, branch, self.norm1(), first.change, dtype, None, self.narrow)
        seen = attend(*via.turned(n, self.attn_qkv.weight, self.heads, sight.rotation, None, few), sight)
        x, seen = kernels.take(x, rows), kernels.take(seen, rows)
        added = kernels.branch(via.linear(seen, self.attn_out.weight), first.gate, drop)
        x, n, few = via.join(x, added, self.norm2(), second.change, dtype, rows, self.narrow)
        up, down = self.mlp.values()
        thought = via.thought(n, (up.weight, up.bias), down.weight, "gelu", few)
        bias = None if down.bias is None else down.bias.clone()  # whose shards are gone when the next block reads it
        return x, kernels.branch(thought, second.gate, drop, bias)


@final
class ReferenceLast(Last):
    """LayerNorm → modulate → projection with a bias."""

    def __init__(self, shape: Shape, outputs: int) -> None:
        super().__init__()
        self.norm_final = LayerNorm(shape.width, bias=shape.cond is None)
        self.linear = Linear(shape.width, outputs, zero=True)
        self.adaLN_modulation = None if shape.cond is None else WideLinear(shape.cond, 2 * shape.width, zero=True)

    def forward(
        self,
        x: Float[Tensor, "*s h"],
        branch: Branch | None,
        c: Float[Tensor, "b cond"] | None,
        rows: Rows | None = None,
    ) -> Float[Tensor, "*s h"]:
        """What the head reads."""
        dtype = working(self.linear.weight)
        via = kernels.between(x.device.type, dtype)
        return via.join(x, branch, self.norm_final(), _changed(self.adaLN_modulation, c), dtype, rows)[1]


# The network to train anew ---------------------------------------------------------------------------------


@final
class ModernBlock(Block):
    """RMSNorm → modulate → attention → gate, then RMSNorm → modulate → squared ReLU → gate, each beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.dropout = shape.heads, shape.dropout
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False)
        self.q_norm, self.k_norm = Gain(shape.head_dim), Gain(shape.head_dim)
        self.up = Linear(width, 4 * width, bias=False)
        self.down = Linear(4 * width, width, bias=False)
        self.modulation = None if shape.cond is None else WideLinear(shape.cond, 6 * width, bias=False, zero=True)

    def forward(
        self,
        x: Float[Tensor, "b L h"],
        branch: Branch | None,
        c: Float[Tensor, "b cond"] | None,
        sight: Sight,
        rows: Rows | None = None,
    ) -> tuple[Float[Tensor, "*s h"], Branch]:
        """At the start, where the modulation is 0, nothing is added if σ is told."""
        dtype = working(self.qkv.weight)
        via, drop = kernels.between(x.device.type, dtype), self.dropout if self.training else 0.0
        first, second = _told(self.modulation, c)
        x, n, few = via.join(x, branch, RMS, first.change, dtype, None, self.narrow)
        gains = self.q_norm(), self.k_norm()
        seen = attend(*via.turned(n, self.qkv.weight, self.heads, sight.rotation, gains, few), sight)
        x, seen = kernels.take(x, rows), kernels.take(seen, rows)
        added = kernels.branch(via.linear(seen, self.out.weight), first.gate, drop)
        x, n, few = via.join(x, added, RMS, second.change, dtype, rows, self.narrow)
        thought = via.thought(n, (self.up.weight, None), self.down.weight, "relu2", few)
        return x, kernels.branch(thought, second.gate, drop)


@final
class ModernLast(Last):
    """RMSNorm → modulate → projection."""

    def __init__(self, shape: Shape, outputs: int) -> None:
        super().__init__()
        self.linear = Linear(shape.width, outputs, bias=False, zero=True)
        self.modulation = None if shape.cond is None else WideLinear(shape.cond, 2 * shape.width, bias=False, zero=True)

    def forward(
        self,
        x: Float[Tensor, "*s h"],
        branch: Branch | None,
        c: Float[Tensor, "b cond"] | None,
        rows: Rows | None = None,
    ) -> Float[Tensor, "*s h"]:
        """What the head reads."""
        dtype = working(self.linear.weight)
        return kernels.between(x.device.type, dtype).join(x, branch, RMS, _changed(self.modulation, c), dtype, rows)[1]
