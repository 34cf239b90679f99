"""Layers with weights: linear maps, norms and embeddings, and their weight initialisation.

Mixed precision: matrix products of the blocks run in the dtype of the weights, or of autocast. Norms, the noise-level
embedding and the modulation computed from it run in float32, or in float64 if the weights are.
"""

import math
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.ops.block_ops import Lookup
from sedd.tensors import upcast, upcast_dtype


class Layer(nn.Module):
    """A module with weights of its own, initialised from U(−bound, bound); without a bound to ``fill``, biases to 0."""

    bound: float | None = None
    fill = 1.0

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Initialise the weights from ``generator``, or from torch's global one if None."""
        for name, parameter in self.named_parameters():
            if self.bound is None:
                parameter.fill_(0 if name == "bias" else self.fill)
            else:
                parameter.uniform_(-self.bound, self.bound, generator=generator)


class Linear(Layer):
    """Wx + b in the dtype of the weights, or of autocast; initialised from U(−1/√inputs, 1/√inputs), or to 0."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, zero: bool = False) -> None:
        super().__init__()
        self.bound = 0.0 if zero else 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Float[Tensor, "*s inputs"]) -> Float[Tensor, "*s outputs"]:
        return F.linear(x, self.weight, self.bias)


@final
class Float32Linear(Linear):
    """Wx + b in float32 or better, for noise conditioning: one row per sequence, which every block reads."""

    def forward(self, x: Float[Tensor, "*s inputs"]) -> Float[Tensor, "*s outputs"]:
        # torch.autocast does not accept the meta device
        with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
            return F.linear(x, upcast(self.weight), None if self.bias is None else upcast(self.bias))


@final
class NormWeights(Layer):
    """Weight and bias of a LayerNorm, initialised to 1 and 0; without a bias also of the RMSNorm of QK-norm.

    Reference: Henry et al. 2020, "Query-Key Normalization for Transformers", arXiv 2010.04245.
    """

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None


@final
class Embedding(Layer):
    """A table of one row per state or label, initialised from U(−1/√width, 1/√width)."""

    def __init__(self, states: int, width: int) -> None:
        super().__init__()
        self.bound = 1 / math.sqrt(width)
        self.embedding = nn.Parameter(torch.empty(states, width))


@final
class NgramEmbedding(Layer):
    """Embedding of the n tokens before a token and of the n tokens after it, summed over n = 1 … longest.

    The first block then reads local context, which attention would first have to learn to find. Each n and side has a
    table, with a row for every n-gram if that takes at most 2^16 rows; otherwise n-grams are hashed. One more token
    stands for padding and for positions beyond the ends of a sequence. Tables are initialised to 0.
    """

    MAX_ROWS = 2**16
    fill = 0.0

    def __init__(self, states: int, width: int, longest: int, causal: bool) -> None:
        super().__init__()
        self.states, self.longest = states, longest
        self.sides = (-1,) if causal else (-1, 1)
        rows = [min((states + 1) ** n, self.MAX_ROWS) for n in range(1, longest + 1)]
        self.whole = sum((states + 1) ** n <= self.MAX_ROWS for n in range(1, longest + 1))  # lengths not hashed
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(r, width)) for r in rows for _ in self.sides)

    def keys(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"] | None) -> list[Int[Tensor, "b L"]]:
        """Return the row of every table that each position reads."""
        x = x if valid is None else torch.where(valid, x, self.states)
        padded, length = F.pad(x, (self.longest, self.longest), value=self.states), x.shape[-1]
        found, key = [], [torch.zeros_like(x) for _ in self.sides]
        for n in range(1, self.longest + 1):
            for i, side in enumerate(self.sides):
                start = self.longest + side * n
                key[i] = key[i] * (self.states + 1) + padded[:, start : start + length]
                # hashed: the upper 16 bits of a product with an odd number near 2^64/φ, which wraps around
                found.append(key[i] if n <= self.whole else (key[i] * -0x61C8864680B583EB >> 48) & 0xFFFF)
        return found

    def lookups(
        self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"] | None, joined: bool | None = None
    ) -> list[Lookup]:
        """Return the tables and the row of each that every position reads.

        ``joined`` joins the tables of one side, see `join_tables`; None does where that saves work: on a GPU, for more
        positions than rows.
        """
        lookups = [Lookup(key, table) for key, table in zip(self.keys(x, valid), self.tables, strict=True)]
        count, sides = self.whole, len(self.sides)
        if joined is None:
            joined = x.is_cuda and count > 0 and x.numel() >= (self.states + 1) ** count
        if not joined or count < 2:
            return lookups
        longest = lookups[sides * (count - 1) : sides * count]
        tables = (join_tables(list(self.tables)[i : sides * count : sides]) for i in range(sides))
        return [Lookup(own.keys, table) for own, table in zip(longest, tables, strict=True)] + lookups[sides * count :]


def join_tables(tables: Sequence[Float[Tensor, "_ width"]]) -> Float[Tensor, "rows width"]:
    """Sum tables of n-grams, in float32 or better, to one for the longest: its rows hold the sums of all lengths.

    key(x₁…xₙ) = key(x₁…xₙ₋₁)·(states + 1) + xₙ, nearest token first: a row for n − 1 belongs to adjacent rows for n.
    """
    total, *longer = map(upcast, tables)
    for table in longer:
        total = (table.view(len(total), -1, table.shape[-1]) + total[:, None]).view(table.shape)
    return total


def angles(positions: Float[Tensor, " n"], width: int) -> Float[Tensor, "n half"]:
    """Return the angles p·10⁴^(−2k/width) of positions p, for 2k < width."""
    k = torch.arange(0, width, 2, device=positions.device, dtype=positions.dtype)
    return positions[:, None] * torch.exp(-math.log(1e4) / width * k)


@final
class PositionEmbedding(Layer):
    """Absolute sinusoidal position embedding gain·[cos(iω), sin(iω)] of position i, with ω_k = 10⁴^(−2k/width).

    Rotary attention depends on distances alone, so it cannot distinguish the positions of a sequence of masks: the
    network could not learn that records begin with a certain token. The gain is initialised to 1/√width, the scale of a
    token's embedding.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fill = 1 / math.sqrt(width)
        self.gain = nn.Parameter(torch.empty(width))

    def forward(self, positions: Float[Tensor, " L"]) -> Float[Tensor, "L width"]:
        angle = angles(positions, len(self.gain))
        return upcast(self.gain) * torch.cat([angle.cos(), angle.sin()], -1)[:, : len(self.gain)]


@final
class RotaryEmbedding(Layer):
    """The frequencies 10⁴^(−2i/head_dim) of rotary position embeddings, which published checkpoints store.

    `Transformer.hidden` computes them again: in a bfloat16 model these are rounded, and far angles would be wrong.

    Reference: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864.
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(head_dim // 2))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None) -> None:
        one = torch.ones(1, device=self.inv_freq.device, dtype=upcast_dtype(self.inv_freq.dtype))
        self.inv_freq.copy_(angles(one, 2 * len(self.inv_freq))[0])


@final
class NoiseEmbedding(nn.Module):
    """Noise-level embedding c = SiLU(W₂ SiLU(W₀ [cos(σf), sin(σf)] + b₀) + b₂), f_i = 10⁴^(−i/128) for i < 128."""

    def __init__(self, cond_dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Float32Linear(256, cond_dim), nn.SiLU(), Float32Linear(cond_dim, cond_dim), nn.SiLU())

    def forward(self, sigma: Float[Tensor, " b"]) -> Float[Tensor, "b cond"]:
        # σ(1) may be infinite, and its cosine NaN; above 10³, e^−σ is 0 even in float64
        angle = angles(sigma.clamp_max(1e3), 256)
        c: Tensor = self.mlp(torch.cat([angle.cos(), angle.sin()], -1))
        return c
