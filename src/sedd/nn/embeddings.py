"""Embeddings of tokens and positions."""

import math
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.nn.layers import Layer
from sedd.ops.block_ops import Lookup, Rotation
from sedd.tensors import upcast, upcast_dtype


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
