"""The parts of a network: what it is told of the noise, of positions, and how tokens look at each other.

Matrix products of the trunk run in the dtype of the weights, or of autocast. Norms, the noise embedding and what it
modulates are computed in float32 whatever that is, or in float64 if the weights are.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

from sedd.diffusion.precision import upcast, upcast_dtype
from sedd.ops.block_ops import NormSpec, Rotation


@dataclass(frozen=True)
class Shape:
    """What every block of a network has in common."""

    width: int
    heads: int
    cond: int | None
    """How wide the embedding of σ is; None: the network is not told σ."""
    dropout: float

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width < 1 or self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"width {self.width} over {self.heads} heads leaves {self.head_dim} a head; "
                "rotary positions turn pairs, so it must be even"
            )
        if self.cond is not None and self.cond < 1:
            raise ValueError(f"cond is {self.cond}; the embedding of σ must be at least 1 wide (timed=False has none)")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must lie in [0, 1)")

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.width // self.heads


class Part(nn.Module, ABC):
    """A module with weights of its own, and the law they are first drawn from."""

    @abstractmethod
    def draw(self, generator: torch.Generator | None) -> None:
        """Draw the weights anew; None is torch's global generator."""


class LinearBase(Part, ABC):
    """Wx + b, each entry of W and b drawn from U(−1/√inputs, 1/√inputs), or 0."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, zero: bool = False) -> None:
        super().__init__()
        self.bound = 0.0 if zero else 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    @torch.no_grad()
    def draw(self, generator: torch.Generator | None) -> None:
        """U(−bound, bound)."""
        for parameter in self.parameters():
            parameter.uniform_(-self.bound, self.bound, generator=generator)

    @abstractmethod
    def forward(self, x: Float[Tensor, "*s inputs"]) -> Float[Tensor, "*s outputs"]:
        """Wx + b."""


@final
class Linear(LinearBase):
    """Wx + b in the dtype of the weights, or of autocast: the trunk's."""

    def forward(self, x: Float[Tensor, "*s inputs"]) -> Float[Tensor, "*s outputs"]:
        """Wx + b."""
        return F.linear(x, self.weight, self.bias)


@final
class Float32Linear(LinearBase):
    """Wx + b in float32 or better. For what σ decides: it costs one row a sequence, and every block reads it."""

    def forward(self, x: Float[Tensor, "*s inputs"]) -> Float[Tensor, "*s outputs"]:
        """Wx + b."""
        with _without_autocast(x):
            return F.linear(x, upcast(self.weight), None if self.bias is None else upcast(self.bias))


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    # the meta device has none, and asking for none is an error; so would be asking torch 2.11 in a compiled graph
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


@final
class LayerNorm(Part):
    """The weights of (x − mean)/√(variance + 1e-5)·weight + bias: first 1 and 0."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    @torch.no_grad()
    def draw(self, generator: torch.Generator | None) -> None:
        """Nothing is drawn: 1 and 0."""
        self.weight.fill_(1)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self) -> NormSpec:
        """What whoever norms is told."""
        return NormSpec(1e-5, True, self.weight, self.bias)


@final
class QKScale(Part):
    """What a normed query or key is multiplied by, first 1: they are of a length that is learnt."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_dim))

    @torch.no_grad()
    def draw(self, generator: torch.Generator | None) -> None:
        """Nothing is drawn: 1."""
        self.weight.fill_(1)

    def forward(self) -> Float[Tensor, " d"]:
        """The gain."""
        return self.weight


@final
class Embedding(Part):
    """A row for every state, drawn from U(−1/√width, 1/√width)."""

    def __init__(self, states: int, width: int) -> None:
        super().__init__()
        self.bound = 1 / math.sqrt(width)
        self.embedding = nn.Parameter(torch.empty(states, width))

    @torch.no_grad()
    def draw(self, generator: torch.Generator | None) -> None:
        """U(−bound, bound)."""
        self.embedding.uniform_(-self.bound, self.bound, generator=generator)

    def forward(self) -> Float[Tensor, "states width"]:
        """The table, for whoever looks into it."""
        return self.embedding


@final
class PositionEmbedding(Part):
    """gain·[cos(iω), sin(iω)] for position i, ω_k = 10⁴^(−2k/width): where a token stands, of any length.

    Rotary attention sees distances alone, so a sequence of masks looks the same from everywhere; records that begin
    with a certain token cannot be learnt without this.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.gain = nn.Parameter(torch.empty(width))

    @torch.no_grad()
    def draw(self, generator: torch.Generator | None) -> None:
        """Nothing is drawn: as large as the embedding of a token."""
        self.gain.fill_(1 / math.sqrt(self.width))

    def forward(self, length: int) -> Float[Tensor, "L width"]:
        """A row for every position, in float32 or better."""
        gain = upcast(self.gain)
        k = torch.arange(0, self.width, 2, device=gain.device, dtype=gain.dtype)
        i = torch.arange(length, device=gain.device, dtype=gain.dtype)
        angle = i[:, None] * torch.exp(-math.log(1e4) / self.width * k)
        return gain * torch.cat([angle.cos(), angle.sin()], -1)[:, : self.width]


@final
class NoiseEmbedding(nn.Module):
    """c = SiLU(W₂ SiLU(W₀ [cos(σω), sin(σω)] + b₀) + b₂), ω_i = 10⁴^(−i/128) for i < 128, in float32 or better."""

    def __init__(self, cond: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Float32Linear(256, cond), nn.SiLU(), Float32Linear(cond, cond), nn.SiLU())

    def forward(self, sigma: Float[Tensor, " b"]) -> Float[Tensor, "b cond"]:
        """The embedding c of the total noise σ, which is given in float32 or better."""
        # t = 1 may mean infinite noise, whose cosine is NaN; past 10³ no float64 tells e^−σ from 0
        sigma = sigma.clamp_max(1e3)
        i = torch.arange(128, device=sigma.device, dtype=sigma.dtype)
        angle = sigma[:, None] * torch.exp(-math.log(1e4) / 128 * i)
        c: Tensor = self.mlp(torch.cat([angle.cos(), angle.sin()], -1))
        return c


@final
class Rotary(Part):
    """Position m turns the plane (x_i, x_{i+d/2}) of a head by the angle m·10⁴^(−2i/d), d = head_dim.

    So scores between queries and keys depend on how far apart they are, and on nothing else of where they stand.
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.register_buffer("inv_freq", torch.empty(head_dim // 2))

    @torch.no_grad()
    def draw(self, generator: torch.Generator | None) -> None:
        """Nothing is drawn: the frequencies, which published layouts store."""
        self.inv_freq.copy_(self._frequencies(self.inv_freq))

    def forward(self, length: int) -> Rotation:
        """The rotations of positions 0 … length − 1, in float32 or better."""
        # never from the buffer: a model turned to bfloat16 has it rounded, and far positions would blur
        frequencies = self._frequencies(self.inv_freq)
        angle = torch.arange(length, device=frequencies.device, dtype=frequencies.dtype)[:, None] * frequencies
        return Rotation(angle.cos(), angle.sin())

    def _frequencies(self, like: Tensor) -> Tensor:
        i = torch.arange(0, self.head_dim, 2, device=like.device, dtype=upcast_dtype(like.dtype))
        return torch.exp(-math.log(1e4) / self.head_dim * i)


class AttentionContext(NamedTuple):
    """Where tokens stand and which of them see which."""

    rotation: Rotation
    mask: Bool[Tensor, "b 1 #L L"] | None
    """True where the query (rows) sees the key (columns); None: everywhere, or all before it."""
    causal: bool
    """Whether a token sees itself and those before it alone, where no mask says so."""


def sight(rotation: Rotation, valid: Bool[Tensor, "b L"] | None, causal: bool) -> AttentionContext:
    """Padding is seen by nobody valid; everybody sees somebody, for kernels differ on a softmax over no key."""
    if valid is None:
        return AttentionContext(rotation, None, causal)
    length = valid.shape[-1]
    if not causal:
        return AttentionContext(rotation, (valid | ~valid.any(-1, keepdim=True))[:, None, None], False)
    past = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()
    own = torch.eye(length, dtype=torch.bool, device=valid.device)
    return AttentionContext(rotation, (valid[:, None, None] & past) | own, False)


def attend(
    q: Float[Tensor, "b L heads d"],
    k: Float[Tensor, "b L heads d"],
    v: Float[Tensor, "b L heads d"],
    sight: AttentionContext,
) -> Float[Tensor, "b L h"]:
    """softmax(q·k/√d) v over the keys each query sees, heads side by side; q and k stand turned to their positions."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # views: heads lie side by side in memory on both sides
    seen = F.scaled_dot_product_attention(q, k, v, attn_mask=sight.mask, is_causal=sight.causal)
    return seen.transpose(1, 2).flatten(-2)
