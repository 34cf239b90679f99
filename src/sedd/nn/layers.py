"""Layers with weights: linear maps, norms and embeddings, and their weight initialisation.

Mixed precision: matrix products of the blocks run in the dtype of the weights, or of autocast. Norms, the noise-level
embedding and the modulation computed from it run in float32, or in float64 if the weights are.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.ops.block_ops import Lookup, NormSpec, Rotation
from sedd.tensors import upcast, upcast_dtype


@dataclass(frozen=True)
class TransformerShape:
    """The sizes that all blocks of a network have in common."""

    width: int
    heads: int
    cond_dim: int | None
    """Width of the noise-level embedding; None for a network without noise conditioning."""
    dropout: float
    zero_branches: bool = False
    """Whether the last matrix of every residual branch is initialised to 0."""

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width < 1 or self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"width {self.width} over {self.heads} heads leaves {self.head_dim} per head; "
                "rotary embeddings rotate pairs, so it must be even"
            )
        if self.cond_dim is not None and self.cond_dim < 1:
            raise ValueError(
                f"cond_dim is {self.cond_dim}; the noise-level embedding must be at least 1 wide "
                "(time_conditioning=False has none)"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must lie in [0, 1)")

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.width // self.heads


class Layer(nn.Module, ABC):
    """A module with weights of its own."""

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Initialise the weights from ``generator``, or from torch's global one if None."""


class LinearBase(Layer, ABC):
    """A linear map Wx + b, initialised from U(−1/√inputs, 1/√inputs), or to 0."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, zero: bool = False) -> None:
        super().__init__()
        self.bound = 0.0 if zero else 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Draw weight and bias from U(−bound, bound)."""
        for parameter in self.parameters():
            parameter.uniform_(-self.bound, self.bound, generator=generator)

    @abstractmethod
    def forward(self, x: Float[Tensor, "*s inputs"]) -> Float[Tensor, "*s outputs"]:
        """Compute Wx + b."""


@final
class Linear(LinearBase):
    """Wx + b in the dtype of the weights, or of autocast."""

    def forward(self, x: Float[Tensor, "*s inputs"]) -> Float[Tensor, "*s outputs"]:
        """Compute Wx + b."""
        return F.linear(x, self.weight, self.bias)


@final
class Float32Linear(LinearBase):
    """Wx + b in float32 or better, for noise conditioning: one row per sequence, which every block reads."""

    def forward(self, x: Float[Tensor, "*s inputs"]) -> Float[Tensor, "*s outputs"]:
        """Compute Wx + b."""
        with _no_autocast(x):
            return F.linear(x, upcast(self.weight), None if self.bias is None else upcast(self.bias))


def _no_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    # torch.autocast does not accept the meta device
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


@final
class LayerNorm(Layer):
    """The weights of layer normalization (x − mean)/√(variance + 1e-5)·weight + bias, initialised to 1 and 0."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Set the weight to 1 and the bias to 0."""
        self.weight.fill_(1)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self) -> NormSpec:
        """Return the normalization parameters."""
        return NormSpec(1e-5, True, self.weight, self.bias)


@final
class QKScale(Layer):
    """The learned scale of normalized queries or keys (QK-norm), initialised to 1.

    Reference: Henry et al. 2020, "Query-Key Normalization for Transformers", arXiv 2010.04245.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_dim))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Set the scale to 1."""
        self.weight.fill_(1)

    def forward(self) -> Float[Tensor, " d"]:
        """Return the scale."""
        return self.weight


# Embeddings ------------------------------------------------------------------------------------------------


@final
class Embedding(Layer):
    """A table of one row per state or label, initialised from U(−1/√width, 1/√width)."""

    def __init__(self, states: int, width: int) -> None:
        super().__init__()
        self.bound = 1 / math.sqrt(width)
        self.embedding = nn.Parameter(torch.empty(states, width))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Draw the table from U(−bound, bound)."""
        self.embedding.uniform_(-self.bound, self.bound, generator=generator)

    def forward(self) -> Float[Tensor, "states width"]:
        """Return the table, for `ops.block_ops.BlockOps.embed`."""
        return self.embedding


@final
class NgramEmbedding(Layer):
    """Embedding of what surrounds a token: the sum of those of the n tokens before it and after it, n = 1 … longest.

    The first block then reads local context, which attention would first have to learn to find. Each n and side has a
    table of its own, with a row for every n-gram if that takes no more than 2^16 rows, else n-grams are hashed. Beyond
    the ends of a sequence, and in place of padding, stands one more token. Tables are initialised to 0.

    Args:
        states: Number of states of a token.
        width: Width of the network.
        longest: The largest n.
        causal: Whether only tokens before count.
    """

    MAX_ROWS = 2**16

    def __init__(self, states: int, width: int, longest: int, causal: bool) -> None:
        super().__init__()
        self.states, self.longest = states, longest
        self.sides = (-1,) if causal else (-1, 1)
        rows = [min((states + 1) ** n, self.MAX_ROWS) for n in range(1, longest + 1)]
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(r, width)) for r in rows for _ in self.sides)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Set the tables to 0."""
        for table in self.tables:
            table.zero_()

    def keys(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"] | None) -> list[Int[Tensor, "b L"]]:
        """Return the row of every table that each position reads."""
        x = x if valid is None else torch.where(valid, x, self.states)
        padded, length = F.pad(x, (self.longest, self.longest), value=self.states), x.shape[-1]
        found, key = [], [torch.zeros_like(x) for _ in self.sides]
        for n in range(1, self.longest + 1):
            for i, side in enumerate(self.sides):
                start = self.longest + side * n
                key[i] = key[i] * (self.states + 1) + padded[:, start : start + length]
                found.append(key[i] if (self.states + 1) ** n <= self.MAX_ROWS else _hash16(key[i]))
        return found

    def lookups(
        self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"] | None, joined: bool | None = None
    ) -> list[Lookup]:
        """Return the tables and the row of each that every position reads.

        Args:
            x: Token ids.
            valid: False at padding.
            joined: Whether to join the tables of one side, see `join_tables`. If None they are joined on a GPU where
                there are more positions than rows, so that it saves work.
        """
        keys = self.keys(x, valid)
        count = sum((self.states + 1) ** n <= self.MAX_ROWS for n in range(1, self.longest + 1))  # not hashed
        if joined is None:
            joined = x.is_cuda and count > 0 and x.numel() >= (self.states + 1) ** count
        sides = len(self.sides)
        apart = [Lookup(key, table) for key, table in zip(keys, self.tables, strict=True)]
        if not joined or count < 2:
            return apart
        tables = list(self.tables)
        together = [
            Lookup(keys[sides * (count - 1) + i], join_tables(tables[i : sides * count : sides])) for i in range(sides)
        ]
        return [*together, *apart[sides * count :]]


def join_tables(tables: Sequence[Float[Tensor, "_ width"]]) -> Float[Tensor, "rows width"]:
    """Return one table for the n-grams of all lengths up to the longest, each row the sum of those it stands for.

    The key of n tokens, the nearest first, is that of the first n − 1 times (states + 1), plus the last token. So a row
    of the table for n − 1 belongs to adjacent rows of that for n. The sum is in float32 or better.
    """
    total, *longer = map(upcast, tables)
    for table in longer:
        total = (table.view(len(total), -1, table.shape[-1]) + total[:, None]).view(table.shape)
    return total


def _hash16(key: Tensor) -> Tensor:
    """Map integers to 0 … 2^16 − 1: the upper bits of a product with an odd number near 2^64/φ, which wraps around."""
    return (key * -0x61C8864680B583EB >> 48) & 0xFFFF


@final
class PositionEmbedding(Layer):
    """Absolute sinusoidal position embedding gain·[cos(iω), sin(iω)] of position i, with ω_k = 10⁴^(−2k/width).

    Rotary attention depends on distances alone, so it cannot distinguish the positions of a sequence of masks. Without
    this embedding the network could not learn that records begin with a certain token.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.gain = nn.Parameter(torch.empty(width))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Set the gain to 1/√width, the scale of a token's embedding."""
        self.gain.fill_(1 / math.sqrt(self.width))

    def forward(self, length: int) -> Float[Tensor, "L width"]:
        """Return the embeddings of positions 0 … length − 1, in float32 or better."""
        gain = upcast(self.gain)
        k = torch.arange(0, self.width, 2, device=gain.device, dtype=gain.dtype)
        i = torch.arange(length, device=gain.device, dtype=gain.dtype)
        angle = i[:, None] * torch.exp(-math.log(1e4) / self.width * k)
        return gain * torch.cat([angle.cos(), angle.sin()], -1)[:, : self.width]


@final
class RotaryEmbedding(Layer):
    """Rotary position embedding: position m rotates (x_i, x_{i+d/2}) of a head by m·10⁴^(−2i/d), d = head_dim.

    Attention scores then depend on the distance between query and key alone.

    Reference: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864.
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.register_buffer("inv_freq", torch.empty(head_dim // 2))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Compute the frequencies, which published checkpoints store."""
        self.inv_freq.copy_(self._frequencies(self.inv_freq))

    def forward(self, length: int) -> Rotation:
        """Return the rotations of positions 0 … length − 1, in float32 or better."""
        # not from the buffer: in a bfloat16 model it is rounded, and the angles of far positions would be wrong
        frequencies = self._frequencies(self.inv_freq)
        angle = torch.arange(length, device=frequencies.device, dtype=frequencies.dtype)[:, None] * frequencies
        return Rotation(angle.cos(), angle.sin())

    def _frequencies(self, like: Tensor) -> Tensor:
        i = torch.arange(0, self.head_dim, 2, device=like.device, dtype=upcast_dtype(like.dtype))
        return torch.exp(-math.log(1e4) / self.head_dim * i)


@final
class NoiseEmbedding(nn.Module):
    """Noise-level embedding c = SiLU(W₂ SiLU(W₀ [cos(σf), sin(σf)] + b₀) + b₂), f_i = 10⁴^(−i/128) for i < 128.

    Computed in float32 or better.
    """

    def __init__(self, cond_dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Float32Linear(256, cond_dim), nn.SiLU(), Float32Linear(cond_dim, cond_dim), nn.SiLU())

    def forward(self, sigma: Float[Tensor, " b"]) -> Float[Tensor, "b cond"]:
        """Embed the total noise σ, which is given in float32 or better."""
        # σ(1) may be infinite, and its cosine NaN; above 10³, e^−σ is 0 even in float64
        sigma = sigma.clamp_max(1e3)
        i = torch.arange(128, device=sigma.device, dtype=sigma.dtype)
        angle = sigma[:, None] * torch.exp(-math.log(1e4) / 128 * i)
        c: Tensor = self.mlp(torch.cat([angle.cos(), angle.sin()], -1))
        return c
