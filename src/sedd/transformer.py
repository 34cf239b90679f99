"""Transformers: what stands between noisy tokens and a log-score.

``network(x, sigma)`` reads ids ``(*b, L)`` and the total noise ``(*b,)`` and gives ``(*b, L, outputs)``, in float32
or better. It is wrapped by a `parameterization`. Two styles: `Reference` is the network of the published models, to
the names of its weights; `Modern` is the one to train anew. The head starts at 0, so the first loss is known.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd import check, kernels, recompute
from sedd.kernels import Branch, Change, Rows, eighths
from sedd.layers import (
    RMS,
    Embedding,
    Gain,
    LayerNorm,
    Linear,
    NoiseEmbedding,
    Part,
    Place,
    Rotary,
    Rotation,
    Shape,
    Sight,
    WideLinear,
    attend,
    sight,
    wide,
    widened,
    working,
)


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


def every_entry(hidden: Float[Tensor, "*b L width"], head: Linear) -> Float[Tensor, "*b L outputs"]:
    """All that a head says, in float32 or better."""
    return wide(head(hidden))


class Transformer(nn.Module, ABC):
    """A transformer over the states of a token, told the total noise σ or not.

    ``states`` are the rows of the embedding, ``outputs`` those of the head (as many, if None), ``cond`` the width of
    the embedding of σ. With ``timed=False`` there is none, and σ is not read; with ``causal=True`` the output at i
    depends on x up to i alone. With ``labels`` of them, sequences may have one: its embedding, or that of no label, is
    added to every token's. Weights are drawn from ``generator``, or from torch's global one. No length is fixed.
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
        labels: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        outputs = states if outputs is None else outputs
        if states < 2 or outputs < 2:
            raise ValueError(f"states is {states} and outputs is {outputs}; a token needs at least 2 of each")
        if depth < 1:
            raise ValueError(f"depth is {depth}; a network needs at least 1 block")
        shape = Shape(width=width, heads=heads, cond=cond if timed else None, dropout=dropout)
        self.states, self.causal, self.labels = states, causal, labels
        self.pass_through, self.compiled = recompute.nothing, False
        self.vocab_embed = Embedding(states, width)
        self.label_embed = Embedding(labels + 1, width) if labels else None  # the last: no label
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
    def _block(self, shape: Shape) -> Block:
        """One block."""

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
        self,
        x: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
        valid: Bool[Tensor, "*b L"] | None = None,
        rows: Rows | None = None,
        label: Int[Tensor, "*b"] | None = None,
    ) -> Float[Tensor, "*s width"]:
        """What the head reads, in the dtype of its weights or of autocast; see `forward`.

        For every position, (*b, L, width), or for some ``rows`` of them, (n, width).
        """
        check.states(x, self.states)
        b, length = sigma.numel(), x.shape[-1]
        h = wide(self.vocab_embed(x.reshape(b, length)))
        if self.label_embed is not None:
            label = x.new_full((b,), self.labels) if label is None else label.reshape(b)
            h = h + wide(self.label_embed(label[:, None]))
        valid = None if valid is None else valid.reshape(b, length)
        within, after = (None, rows) if self.compiled else (rows, None)  # how many they are would be a shape of a graph
        last = kernels.take(self.trunk(h, sigma.reshape(-1), valid, self.rotary_emb(length), within), after)
        return last.view(*x.shape, -1) if rows is None else last

    def trunk(
        self,
        h: Float[Tensor, "b L width"],
        sigma: Float[Tensor, " b"],
        valid: Bool[Tensor, "b L"] | None,
        rotation: Rotation,
        rows: Rows | None = None,
    ) -> Float[Tensor, "*s width"]:
        """From the embedding of tokens to what the head reads: one graph, in which nothing depends on values.

        The rotation is an argument, or a compiler would compute sines again wherever it needs them. In the last block
        all that follows attention is done for ``rows`` alone, if they are given.
        """
        place = sight(rotation, valid, self.causal)
        c, branch = self._condition(sigma), None
        h = h if self.place is None else h + self.place(h.shape[1])
        h = h.to(working(self.head.weight)) if self.blocks[0].narrow else h
        for block in self.blocks:
            h, branch = self.pass_through(block, h, branch, c, place, rows if block is self.blocks[-1] else None)
        last: Tensor = self.output_layer(h, branch, c, rows)
        return last

    def narrow(self) -> None:
        """From now on blocks multiply in float8 where that is worth it, and the stream has the dtype of the trunk."""
        head = self.head.weight
        if refusal := eighths.refusal(head.device.type, head.shape[-1]):
            raise ValueError(refusal)
        for block in self.blocks:
            block.narrow = True  # type: ignore[assignment]

    def compile_trunk(self, backend: str = "inductor") -> None:
        """Compile `trunk`, once for every shape of a batch.

        Around it are the embedding, whose gradient is a sum over equal tokens that compilers leave to chance, and
        whatever reads the last states, which may be a few of the rows and another number in every step.
        """
        self.trunk = torch.compile(self.trunk, fullgraph=True, dynamic=False, backend=backend)  # type: ignore[method-assign]
        self.compiled = True

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile every block by itself: for a network whose weights are gathered between them."""
        for block in self.blocks:
            block.compile(backend=backend)
        self.compiled = True

    def forward(
        self,
        x: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
        valid: Bool[Tensor, "*b L"] | None = None,
        read: Callable[[Tensor, Linear], Any] = every_entry,
        rows: Rows | None = None,
        label: Int[Tensor, "*b"] | None = None,
    ) -> Any:
        """An entry for every output, in float32 or better; or what ``read`` makes of the last states and the head.

        With ``rows`` the last states are of these alone, which is less work than to leave the others out afterwards.

        Where ``valid`` is False there is padding: no valid position sees it, and what stands there in the output
        means nothing. Positions count from the left, so padding on the right moves nothing. ``label`` is an id for each
        sequence; None, and the id after the last, are no label.
        """
        return read(self.hidden(x, sigma, valid, rows, label), self.head)

    def _condition(self, sigma: Tensor) -> Tensor | None:
        if self.sigma_map is None:
            return None
        check.noise(sigma)
        c: Tensor = self.sigma_map(sigma.to(widened(self.head.weight.dtype)))
        return c


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
class Reference(Transformer):
    """The network of the published models, weight by weight.

    Told σ, it has the layout of SEDD; with ``timed=False`` that of RADD, a plain pre-norm transformer.
    """

    def _place(self, shape: Shape) -> Place | None:
        return None

    def _block(self, shape: Shape) -> Block:
        return ReferenceBlock(shape)

    def _last(self, shape: Shape, outputs: int) -> Last:
        return ReferenceLast(shape, outputs)


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
class Modern(Transformer):
    """RMSNorm, queries and keys normed with a gain, squared ReLU, no biases; gates that start at 0 if σ is told.

    Tokens also know where they stand, not just how far apart: see `layers.Place`.
    """

    def _place(self, shape: Shape) -> Place | None:
        return Place(shape.width)

    def _block(self, shape: Shape) -> Block:
        return ModernBlock(shape)

    def _last(self, shape: Shape, outputs: int) -> Last:
        return ModernLast(shape, outputs)


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
