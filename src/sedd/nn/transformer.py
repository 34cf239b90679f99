"""Transformers: what stands between noisy tokens and a log-score.

``network(x, sigma)`` reads ids ``(*b, L)`` and the total noise ``(*b,)`` and gives ``(*b, L, outputs)``, in float32
or better. It is wrapped by a `parameterization`. Two styles: `Reference` is the network of the published models, to
the names of its weights; `Modern` is the one to train anew. The head starts at 0, so the first loss is known.
"""

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd.diffusion import check
from sedd.diffusion.precision import compute_dtype, upcast, upcast_dtype
from sedd.nn.blocks import Block, FinalLayer, ModernBlock, ModernFinalLayer, ReferenceBlock, ReferenceFinalLayer
from sedd.nn.layers import (
    AttentionContext,
    Embedding,
    Linear,
    NoiseEmbedding,
    Part,
    PositionEmbedding,
    Rotary,
    Shape,
    sight,
)
from sedd.ops import block_ops, fp8
from sedd.ops.block_ops import ResidualBranch, Rotation
from sedd.ops.packed_tokens import PackedTokens, gather
from sedd.runtime import activation_checkpointing
from sedd.runtime.cuda_graphs import GraphedFunction, OptionalTensors


class Transformer(nn.Module, ABC):
    """A transformer over the states of a token, told the total noise σ or not.

    ``states`` are the rows of the embedding, ``outputs`` those of the head (as many, if None), ``cond`` the width of
    the embedding of σ. With ``timed=False`` there is none, and σ is not read; with ``causal=True`` the output at i
    depends on x up to i alone. With ``labels`` of them, sequences may have one: its embedding, or that of no label, is
    added to every token's. Weights are drawn from ``generator``, or from torch's global one. No length is fixed.
    """

    pass_through: activation_checkpointing.ActivationCheckpointing
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
        self.pass_through, self.compiled = activation_checkpointing.none, False
        self.recorded: GraphedFunction | None = None
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
    def _place(self, shape: Shape) -> PositionEmbedding | None:
        """What is added to the embedding of a token for where it stands; None: nothing."""

    @abstractmethod
    def _block(self, shape: Shape) -> Block:
        """One block."""

    @abstractmethod
    def _last(self, shape: Shape, outputs: int) -> FinalLayer:
        """What comes after the blocks."""

    def draw(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew: what a network made on the meta device needs once it has memory."""
        for part in self.modules():
            if isinstance(part, Part):
                part.draw(generator)

    @property
    def depends_on_sigma(self) -> bool:
        """Whether the output depends on the noise level."""
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
        rows: PackedTokens | None = None,
        label: Int[Tensor, "*b"] | None = None,
    ) -> Float[Tensor, "*s width"]:
        """What the head reads, in the dtype of its weights or of autocast; see `forward`.

        For every position, (*b, L, width), or for some ``rows`` of them, (n, width).
        """
        check.states(x, self.states)
        b, length = sigma.numel(), x.shape[-1]
        backend = block_ops.select_backend(x.device.type, compute_dtype(self.head.weight))
        h = upcast(backend.embedding(x.reshape(b, length), self.vocab_embed()))
        if self.label_embed is not None:
            label = x.new_full((b,), self.labels) if label is None else label.reshape(b)
            h = h + upcast(backend.embedding(label[:, None], self.label_embed()))
        valid = None if valid is None else valid.reshape(b, length)
        within, after = (None, rows) if self.compiled else (rows, None)  # how many they are would be a shape of a graph
        last = gather(self.trunk(h, sigma.reshape(-1), valid, self.rotary_emb(length), within), after)
        return last.view(*x.shape, -1) if rows is None else last

    def trunk(
        self,
        h: Float[Tensor, "b L width"],
        sigma: Float[Tensor, " b"],
        valid: Bool[Tensor, "b L"] | None,
        rotation: Rotation,
        rows: PackedTokens | None = None,
    ) -> Float[Tensor, "*s width"]:
        """From the embedding of tokens to what the head reads: one graph, in which nothing depends on values.

        The rotation is an argument, or a compiler would compute sines again wherever it needs them. In the last block
        all that follows attention is done for ``rows`` alone, if they are given.
        """
        place = sight(rotation, valid, self.causal)
        c = self._condition(sigma)
        h = h if self.place is None else h + self.place(h.shape[1])
        h = h.to(compute_dtype(self.head.weight)) if self.blocks[0].narrow else h
        replays = self.recorded is not None and self.training and torch.is_grad_enabled() and h.is_cuda
        h, branch = self._replayed(h, c, place) if replays else self._first(h, c, place)
        h, branch = self.pass_through(self.blocks[-1], h, branch, c, place, rows)
        last: Tensor = self.output_layer(h, branch, c, rows)
        return last

    def _first(self, h: Tensor, c: Tensor | None, place: AttentionContext) -> tuple[Tensor, ResidualBranch | None]:
        """All blocks but the last. What they say of c is summed apart, in the order of a recording."""
        c, branch = None if c is None else c.view_as(c), None
        for block in self.blocks[:-1]:
            h, branch = self.pass_through(block, h, branch, c, place)
        return h, branch

    def _replayed(self, h: Tensor, c: Tensor | None, place: AttentionContext) -> tuple[Tensor, ResidualBranch | None]:
        """The same, by a recording."""
        assert self.recorded is not None
        h, y, gate, seed, bias = self.recorded(self._tensors, h, c, place.mask, *place.rotation)
        rate: Any = self.blocks[-2].dropout
        return h, ResidualBranch(y, gate, rate, seed, bias)

    def record(self) -> None:
        """From now on all blocks but the last are replayed in training: see `record.GraphedFunction`.

        On a GPU, that is, where there are several, not compiled and with nothing computed twice. Weights must be whole;
        if they become other tensors than those that are there now, it is to be called again.
        """
        plain = self.pass_through is activation_checkpointing.none and not self.compiled
        if plain and len(self.blocks) > 1 and self.head.weight.is_cuda:
            self.recorded = GraphedFunction(self.blocks[:-1].parameters())

    def _tensors(self, h: Tensor, c: Tensor | None, mask: Tensor | None, cos: Tensor, sin: Tensor) -> OptionalTensors:
        """`_first` of tensors alone."""
        h, branch = self._first(h, c, AttentionContext(Rotation(cos, sin), mask, self.causal and mask is None))
        assert branch is not None
        return h, branch.y, branch.gate, branch.seed, branch.bias

    def narrow(self) -> None:
        """From now on blocks multiply in float8 where that is worth it, and the stream has the dtype of the trunk."""
        head = self.head.weight
        if refusal := fp8.unsupported_reason(head.device.type, head.shape[-1]):
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
        *,
        label: Int[Tensor, "*b"] | None = None,
        packed: PackedTokens | None = None,
        return_hidden: bool = False,
    ) -> Float[Tensor, "*s outputs"]:
        """An entry for every output, in float32 or better; or what ``read`` makes of the last states and the head.

        With ``rows`` the last states are of these alone, which is less work than to leave the others out afterwards.

        Where ``valid`` is False there is padding: no valid position sees it, and what stands there in the output
        means nothing. Positions count from the left, so padding on the right moves nothing. ``label`` is an id for each
        sequence; None, and the id after the last, are no label.
        """
        hidden = self.hidden(x, sigma, valid, packed, label)
        return hidden if return_hidden else upcast(self.head(hidden))

    def _condition(self, sigma: Tensor) -> Tensor | None:
        if self.sigma_map is None:
            return None
        check.noise(sigma)
        c: Tensor = self.sigma_map(sigma.to(upcast_dtype(self.head.weight.dtype)))
        return c


@final
class Reference(Transformer):
    """The network of the published models, weight by weight.

    Told σ, it has the layout of SEDD; with ``timed=False`` that of RADD, a plain pre-norm transformer.
    """

    def _place(self, shape: Shape) -> PositionEmbedding | None:
        return None

    def _block(self, shape: Shape) -> Block:
        return ReferenceBlock(shape)

    def _last(self, shape: Shape, outputs: int) -> FinalLayer:
        return ReferenceFinalLayer(shape, outputs)


@final
class Modern(Transformer):
    """RMSNorm, queries and keys normed with a gain, squared ReLU, no biases; gates that start at 0 if σ is told.

    Tokens also know where they stand, not just how far apart: see `layers.PositionEmbedding`.
    """

    def _place(self, shape: Shape) -> PositionEmbedding | None:
        return PositionEmbedding(shape.width)

    def _block(self, shape: Shape) -> Block:
        return ModernBlock(shape)

    def _last(self, shape: Shape, outputs: int) -> FinalLayer:
        return ModernFinalLayer(shape, outputs)
