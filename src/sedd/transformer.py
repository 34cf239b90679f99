"""Transformers: what stands between noisy tokens and a log-score.

``network(x, sigma)`` reads ids ``(*b, L)`` and the total noise ``(*b,)`` and gives ``(*b, L, outputs)``, in float32
or better. It is wrapped by a `parameterization`. Two styles: `Reference` is the network of the published models, to
the names of its weights; `Modern` is the one to train anew. The head starts at 0, so the first loss is known.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

from sedd import check, recompute
from sedd.layers import (
    Embedding,
    HeadNorm,
    LayerNorm,
    Linear,
    NoiseEmbedding,
    Part,
    Place,
    Rotary,
    Sight,
    WideLinear,
    attend,
    modulate,
    rms_norm,
    sight,
    split_heads,
    wide,
    widened,
)


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


class Last(nn.Module, ABC):
    """Norm, modulation and head."""

    linear: Linear

    @abstractmethod
    def forward(self, x: Float[Tensor, "b L h"], c: Float[Tensor, "b cond"] | None) -> Float[Tensor, "b L h"]:
        """What the head reads."""


def every_entry(hidden: Float[Tensor, "*b L width"], head: Linear) -> Float[Tensor, "*b L outputs"]:
    """All that a head says, in float32 or better."""
    return wide(head(hidden))


class Transformer(nn.Module, ABC):
    """A transformer over the states of a token, told the total noise σ or not.

    ``states`` are the rows of the embedding, ``outputs`` those of the head (as many, if None), ``cond`` the width of
    the embedding of σ. With ``timed=False`` there is none, and σ is not read; with ``causal=True`` the output at i
    depends on x up to i alone. Weights are drawn from ``generator``, or from torch's global one. No length is fixed.
    """

    pass_through: recompute.Recompute
    """How a block is gone through: what it keeps for the way back and what it computes again."""

    def __init__(
        self,
        *,
        states: int,
        outputs: int | None = None,
        width: int,
        depth: int,
        heads: int,
        cond: int = 128,
        dropout: float = 0.0,
        timed: bool = True,
        causal: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        outputs = states if outputs is None else outputs
        if states < 2 or outputs < 2:
            raise ValueError(f"states is {states} and outputs is {outputs}; a token needs at least 2 of each")
        if depth < 1:
            raise ValueError(f"depth is {depth}; a network needs at least 1 block")
        shape = Shape(width=width, heads=heads, cond=cond if timed else None, dropout=dropout)
        self.states, self.causal = states, causal
        self.pass_through = recompute.nothing
        self.vocab_embed = Embedding(states, width)
        self.sigma_map = NoiseEmbedding(cond) if timed else None
        self.place = self._place(shape)
        self.rotary_emb = Rotary(shape.head_dim)
        self.blocks = nn.ModuleList(self._block(shape) for _ in range(depth))
        self.output_layer = self._last(shape, outputs)
        if not self.head.weight.is_meta:  # nothing is there to be drawn
            self.draw(generator)

    @abstractmethod
    def _place(self, shape: Shape) -> Place | None:
        """What is added to the embedding of a token for where it stands; None: nothing."""

    @abstractmethod
    def _block(self, shape: Shape) -> nn.Module:
        """One block: ``(x, c, sight) -> x``, in float32 or better on both sides."""

    @abstractmethod
    def _last(self, shape: Shape, outputs: int) -> Last:
        """What comes after the blocks."""

    def draw(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew: what a network made on the meta device needs once it has memory."""
        for part in self.modules():
            if isinstance(part, Part):
                part.draw(generator)

    @property
    def timed(self) -> bool:
        """Whether it is told σ."""
        return self.sigma_map is not None

    @property
    def head(self) -> Linear:
        """The last matrix: the output is ``head(hidden(x, sigma))``."""
        return self.output_layer.linear

    def hidden(
        self, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], valid: Bool[Tensor, "*b L"] | None = None
    ) -> Float[Tensor, "*b L width"]:
        """What the head reads, in the dtype of its weights; see `forward`."""
        check.states(x, self.states)
        rows = sigma.numel(), x.shape[-1]
        h = wide(self.vocab_embed(x.reshape(rows)))
        last = self.trunk(h, sigma.reshape(-1), None if valid is None else valid.reshape(rows))
        return last.to(self.head.weight.dtype).view(*x.shape, -1)

    def trunk(
        self, h: Float[Tensor, "b L width"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None
    ) -> Float[Tensor, "b L width"]:
        """From the embedding of tokens to what the head reads: one graph, in which nothing depends on values."""
        place = sight(self.rotary_emb(h.shape[1]), valid, self.causal)
        c = self._condition(sigma)
        h = h if self.place is None else h + self.place(h.shape[1])
        for block in self.blocks:
            h = self.pass_through(block, h, c, place)
        last: Tensor = self.output_layer(h, c)
        return last

    def compile_trunk(self, backend: str = "inductor") -> None:
        """Compile `trunk`, once for every shape of a batch.

        Around it are the embedding, whose gradient is a sum over equal tokens that compilers leave to chance, and
        whatever reads the last states, which may be a few of the rows and another number in every step.
        """
        self.trunk = torch.compile(self.trunk, fullgraph=True, dynamic=False, backend=backend)  # type: ignore[method-assign]

    def forward(
        self,
        x: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
        valid: Bool[Tensor, "*b L"] | None = None,
        read: Callable[[Tensor, Linear], Any] = every_entry,
    ) -> Any:
        """An entry for every output, in float32 or better; or what ``read`` makes of the last states and the head.

        Where ``valid`` is False there is padding: no valid position sees it, and what stands there in the output
        means nothing. Positions count from the left, so padding on the right moves nothing.
        """
        return read(self.hidden(x, sigma, valid), self.head)

    def _condition(self, sigma: Tensor) -> Tensor | None:
        if self.sigma_map is None:
            return None
        check.noise(sigma)
        c: Tensor = self.sigma_map(sigma.to(widened(self.head.weight.dtype)))
        return c


def _parts(modulation: WideLinear, c: Tensor, count: int) -> tuple[Tensor, ...]:
    """What σ decides, ``count`` rows of the width for every sequence."""
    rows: Tensor = modulation(c)
    return rows[:, None].chunk(count, -1)


# The published network -------------------------------------------------------------------------------------


@final
class Reference(Transformer):
    """The network of the published models, weight by weight.

    Told σ, it has the layout of SEDD; with ``timed=False`` that of RADD, a plain pre-norm transformer.
    """

    def _place(self, shape: Shape) -> Place | None:
        return None

    def _block(self, shape: Shape) -> nn.Module:
        return ReferenceBlock(shape)

    def _last(self, shape: Shape, outputs: int) -> Last:
        return ReferenceLast(shape, outputs)


@final
class ReferenceBlock(nn.Module):
    """LayerNorm → modulate → attention → gate, then LayerNorm → modulate → GELU MLP → gate, each beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, timed = shape.width, shape.cond is not None
        self.heads = shape.heads
        self.norm1 = LayerNorm(width, bias=not timed)
        self.attn_qkv = Linear(width, 3 * width, bias=False)
        self.attn_out = Linear(width, width, bias=False)
        self.norm2 = LayerNorm(width, bias=not timed)
        self.mlp = nn.Sequential(Linear(width, 4 * width), nn.GELU(approximate="tanh"), Linear(4 * width, width))
        self.dropout = nn.Dropout(shape.dropout)
        self.adaLN_modulation = None if shape.cond is None else WideLinear(shape.cond, 6 * width, zero=True)

    def forward(
        self, x: Float[Tensor, "b L h"], c: Float[Tensor, "b cond"] | None, sight: Sight
    ) -> Float[Tensor, "b L h"]:
        """x after the block; at the start, where the modulation is 0, x itself if σ is told."""
        if self.adaLN_modulation is None or c is None:
            x = x + self._look(self.norm1(x), sight)
            return x + self._think(self.norm2(x))
        shift1, scale1, gate1, shift2, scale2, gate2 = _parts(self.adaLN_modulation, c, 6)
        x = x + gate1 * self._look(modulate(self.norm1(x), shift1, scale1), sight)
        return x + gate2 * self._think(modulate(self.norm2(x), shift2, scale2))

    def _look(self, x: Tensor, sight: Sight) -> Tensor:
        q, k, v = split_heads(self.attn_qkv(x.to(self.attn_qkv.weight.dtype)), self.heads)
        looked: Tensor = self.dropout(self.attn_out(attend(q, k, v, sight)))
        return looked

    def _think(self, x: Tensor) -> Tensor:
        thought: Tensor = self.dropout(self.mlp(x.to(self.attn_qkv.weight.dtype)))
        return thought


@final
class ReferenceLast(Last):
    """LayerNorm → modulate → projection with a bias."""

    def __init__(self, shape: Shape, outputs: int) -> None:
        super().__init__()
        self.norm_final = LayerNorm(shape.width, bias=shape.cond is None)
        self.linear = Linear(shape.width, outputs, zero=True)
        self.adaLN_modulation = None if shape.cond is None else WideLinear(shape.cond, 2 * shape.width, zero=True)

    def forward(self, x: Float[Tensor, "b L h"], c: Float[Tensor, "b cond"] | None) -> Float[Tensor, "b L h"]:
        """What the head reads."""
        x = self.norm_final(x)
        return x if self.adaLN_modulation is None or c is None else modulate(x, *_parts(self.adaLN_modulation, c, 2))


# The network to train anew ---------------------------------------------------------------------------------


@final
class Modern(Transformer):
    """RMSNorm, queries and keys normed with a gain, squared ReLU, no biases; gates that start at 0 if σ is told.

    Tokens also know where they stand, not just how far apart: see `layers.Place`.
    """

    def _place(self, shape: Shape) -> Place | None:
        return Place(shape.width)

    def _block(self, shape: Shape) -> nn.Module:
        return ModernBlock(shape)

    def _last(self, shape: Shape, outputs: int) -> Last:
        return ModernLast(shape, outputs)


@final
class ModernBlock(nn.Module):
    """RMSNorm → modulate → attention → gate, then RMSNorm → modulate → squared ReLU → gate, each beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False)
        self.q_norm, self.k_norm = HeadNorm(shape.head_dim), HeadNorm(shape.head_dim)
        self.up = Linear(width, 4 * width, bias=False)
        self.down = Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)
        self.modulation = None if shape.cond is None else WideLinear(shape.cond, 6 * width, bias=False, zero=True)

    def forward(
        self, x: Float[Tensor, "b L h"], c: Float[Tensor, "b cond"] | None, sight: Sight
    ) -> Float[Tensor, "b L h"]:
        """x after the block; at the start, where the modulation is 0, x itself if σ is told."""
        if self.modulation is None or c is None:
            x = x + self._look(rms_norm(x), sight)
            return x + self._think(rms_norm(x))
        shift1, scale1, gate1, shift2, scale2, gate2 = _parts(self.modulation, c, 6)
        x = x + gate1 * self._look(modulate(rms_norm(x), shift1, scale1), sight)
        return x + gate2 * self._think(modulate(rms_norm(x), shift2, scale2))

    def _look(self, x: Tensor, sight: Sight) -> Tensor:
        q, k, v = split_heads(self.qkv(x.to(self.qkv.weight.dtype)), self.heads)
        looked: Tensor = self.dropout(self.out(attend(self.q_norm(q), self.k_norm(k), v, sight)))
        return looked

    def _think(self, x: Tensor) -> Tensor:
        thought: Tensor = self.dropout(self.down(F.relu(self.up(x.to(self.up.weight.dtype))).square()))
        return thought


@final
class ModernLast(Last):
    """RMSNorm → modulate → projection."""

    def __init__(self, shape: Shape, outputs: int) -> None:
        super().__init__()
        self.linear = Linear(shape.width, outputs, bias=False, zero=True)
        self.modulation = None if shape.cond is None else WideLinear(shape.cond, 2 * shape.width, bias=False, zero=True)

    def forward(self, x: Float[Tensor, "b L h"], c: Float[Tensor, "b cond"] | None) -> Float[Tensor, "b L h"]:
        """What the head reads."""
        x = rms_norm(x)
        return x if self.modulation is None or c is None else modulate(x, *_parts(self.modulation, c, 2))
