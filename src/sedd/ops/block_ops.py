"""What stands between the matrix products of a block, in torch: on any device, in any precision, seen by autograd.

A block reads a normed stream and adds its answer to the stream. The sum, the dropout of what is added and the norm for
whoever reads next are one `join`; `turned` and `thought` are matrix products with what follows them, `linear` is one
alone. Before all blocks tokens are `looked` up. Weights are given as they are kept and cast here to the dtype of what
they meet. `swift` has the same five by hand, for CUDA.
"""

import sys
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

from sedd.diffusion.precision import upcast
from sedd.ops import fp8
from sedd.ops.fp8 import Fp8Tensor
from sedd.ops.packed_tokens import PackedTokens
from sedd.runtime import device as card

_LOW = 0xFFFFFFFF
Matrix = tuple[Tensor, Tensor | None]
"""A weight, and a bias if there is one."""


class NormSpec(NamedTuple):
    """Layer normalization (x − mean)/√(variance + eps)·weight + bias; RMS normalization if not ``centred``."""

    eps: float
    centred: bool
    weight: Float[Tensor, " h"] | None = None
    bias: Float[Tensor, " h"] | None = None


RMS_NORM = NormSpec(eps=1e-6, centred=False)
"""x/√(mean x² + 1e-6), without a weight: the matrix that follows can hold it."""


class Rotation(NamedTuple):
    """Cosine and sine of the rotary angle of every position and frequency."""

    cos: Float[Tensor, "L half"]
    sin: Float[Tensor, "L half"]


class Modulation(NamedTuple):
    """x·(1 + scale) + shift, for every sequence of a batch."""

    shift: Float[Tensor, "b h"]
    scale: Float[Tensor, "b h"]


class ResidualBranch(NamedTuple):
    """What is to be added to the stream: gate·dropout(y + bias)."""

    y: Float[Tensor, "*s h"]
    gate: Float[Tensor, "b h"] | None
    rate: float = 0.0
    """The share of y that is dropped."""
    seed: Int[Tensor, " 2"] | None = None
    """What decides which; None: nothing is dropped."""
    bias: Float[Tensor, " h"] | None = None


def branch(
    y: Float[Tensor, "*s h"], gate: Float[Tensor, "b h"] | None, rate: float, bias: Float[Tensor, " h"] | None = None
) -> ResidualBranch:
    """One with fresh dropout, drawn from torch's global generator of the device."""
    return ResidualBranch(y, gate, rate, torch.randint(2**32, (2,), device=y.device) if rate else None, bias)


@runtime_checkable
class BlockOps(Protocol):
    """This module, or `swift`."""

    def looked(self, x: Tensor, table: Tensor) -> Tensor:
        """Rows of a table."""
        ...

    def join(
        self,
        x: Tensor,
        branch: ResidualBranch | None,
        norm: NormSpec,
        change: Modulation | None,
        dtype: torch.dtype,
        rows: PackedTokens | None = None,
        narrow: bool = False,
    ) -> tuple[Tensor, Tensor, Fp8Tensor | None]:
        """The stream with a branch added, and what the next block reads of it."""
        ...

    def turned(
        self,
        n: Tensor,
        weight: Tensor,
        heads: int,
        rotation: Rotation,
        gains: tuple[Tensor, Tensor] | None,
        few: Fp8Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        ...

    def thought(self, n: Tensor, up: Matrix, down: Tensor, bend: str, few: Fp8Tensor | None = None) -> Tensor:
        """Two matrix products with an activation between them."""
        ...

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """A matrix product."""
        ...


def between(device: str, dtype: torch.dtype) -> BlockOps:
    """`swift` on CUDA, where Triton runs and float32 is exact enough; this, for whatever a compiler is to see."""
    if torch.compiler.is_compiling() or device != "cuda" or dtype == torch.float64 or not card.has_triton():
        return sys.modules[__name__]
    from sedd.ops import block_ops_triton

    return block_ops_triton


def looked(x: Int[Tensor, "*s"], table: Float[Tensor, "states h"]) -> Float[Tensor, "*s h"]:
    """The rows of a table at x."""
    return F.embedding(x, table)


def join(
    x: Float[Tensor, "*s h"],
    branch: ResidualBranch | None,
    norm: NormSpec,
    change: Modulation | None,
    dtype: torch.dtype,
    rows: PackedTokens | None = None,
    narrow: bool = False,
) -> tuple[Float[Tensor, "*s h"], Float[Tensor, "*s h"], Fp8Tensor | None]:
    """The stream with a branch added, in the dtype it has, and what the next block reads of it, in ``dtype``.

    If that is ``narrow``, its eighths come with it. The stream is that of whole sequences, (b, L, h), or of some
    ``rows`` of theirs, (n, h).
    """

    def each(told: Tensor) -> Tensor:
        return told[:, None] if rows is None else told[rows.which]

    if branch is not None:
        y = upcast(branch.y) if branch.bias is None else upcast(branch.y) + upcast(branch.bias)
        if branch.seed is not None:
            kept = survivors(y.numel(), branch.rate, branch.seed).view(y.shape)
            y = torch.where(kept, y / (1 - branch.rate), 0)
        x = (upcast(x) + (y if branch.gate is None else each(branch.gate) * y)).to(x.dtype)
    n = normalize(x, norm)
    n = n if change is None else n * (1 + each(change.scale)) + each(change.shift)
    n = n.to(dtype)
    return x, n, fp8.eighths(n.detach().flatten(0, -2)) if narrow else None


def survivors(count: int, rate: float, seed: Int[Tensor, " 2"]) -> Bool[Tensor, " count"]:
    """Which of ``count`` entries dropout leaves: a hash of their number, so that nothing need be stored."""
    first = _mixed(seed[0])
    h = (torch.arange(count, device=seed.device) * 0x9E3779B9 + first) & _LOW
    h = (h ^ (h >> 16)) * 0x21F0AAAD & _LOW
    h = (h ^ (h >> 15) ^ _mixed(seed[1] ^ first)) * 0xD35A2D97 & _LOW
    return (h ^ (h >> 15)) >= threshold(rate)


def _mixed(h: Tensor) -> Tensor:
    """Numbers that are near each other are not any more."""
    h = (h ^ (h >> 16)) * 0x21F0AAAD & _LOW
    h = (h ^ (h >> 15)) * 0xD35A2D97 & _LOW
    return h ^ (h >> 15)


def threshold(rate: float) -> int:
    """Hashes below it are dropped."""
    return round(rate * 2**32)


def turned(
    n: Float[Tensor, "b L h"],
    weight: Float[Tensor, "hhh h"],
    heads: int,
    rotation: Rotation,
    gains: tuple[Float[Tensor, " d"], Float[Tensor, " d"]] | None,
    few: Fp8Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, (b, L, heads, d); queries and keys are turned to their positions.

    With ``gains``, queries and keys are first normed, head by head, and multiplied by them. With a ``few`` bits of n
    the product is one of `eighths`, on the way forwards alone: its gradient would cost as much to press as it saves.
    """
    weight = weight.to(n.dtype)
    said = F.linear(n, weight) if few is None else fp8.linear(n, few, weight, None, back=False)
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in said.chunk(3, -1))
    if gains is not None:
        q, k = (normalize(a, RMS_NORM._replace(weight=gain)).to(a.dtype) for a, gain in zip((q, k), gains, strict=True))
    return apply_rotary(q, rotation), apply_rotary(k, rotation), v


def thought(
    n: Float[Tensor, "*s h"], up: Matrix, down: Float[Tensor, "h wide"], bend: str, few: Fp8Tensor | None = None
) -> Float[Tensor, "*s h"]:
    """Two matrix products with an activation between them: ``gelu`` in its tanh form, or ``relu2``, max(0, z)².

    With a ``few`` bits of n they are of `eighths`, the second on its way back as well.
    """
    w1, b1, w2 = up[0].to(n.dtype), None if up[1] is None else up[1].to(n.dtype), down.to(n.dtype)
    if few is None:
        return F.linear(bent(F.linear(n, w1, b1), bend), w2)
    inner = bent(fp8.linear(n, few, w1, b1, back=False), bend)
    return fp8.linear(inner, fp8.eighths(inner.detach().flatten(0, -2)), w2, None, back=True)


def linear(x: Float[Tensor, "*s k"], weight: Float[Tensor, "n k"]) -> Float[Tensor, "*s n"]:
    """xWᵀ."""
    return F.linear(x, weight.to(x.dtype))


def bent(z: Float[Tensor, "*s"], bend: str) -> Float[Tensor, "*s"]:
    """The activation."""
    return F.gelu(z, approximate="tanh") if bend == "gelu" else F.relu(z).square()


def normalize(x: Float[Tensor, "*s h"], norm: NormSpec) -> Float[Tensor, "*s h"]:
    """Normalize over the last dimension, in float32 or better."""
    weight, bias = (None if a is None else upcast(a) for a in (norm.weight, norm.bias))
    if norm.centred:
        return F.layer_norm(upcast(x), x.shape[-1:], weight, bias, eps=norm.eps)
    return F.rms_norm(upcast(x), x.shape[-1:], weight, eps=norm.eps)


def apply_rotary(x: Float[Tensor, "b L heads d"], rotation: Rotation) -> Float[Tensor, "b L heads d"]:
    """Rotate the halves a, b of every head: [a cos − b sin, a sin + b cos].

    Reference: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    a, b = upcast(x).chunk(2, -1)
    cos, sin = (part[:, None] for part in rotation)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
