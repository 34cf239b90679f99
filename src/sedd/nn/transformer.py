"""Transformers that map noisy tokens to logits.

``network(x, sigma)`` reads ids ``(*b, L)`` and the total noise ``(*b,)`` and returns ``(*b, L, outputs)``, in float32
or better; a model of `diffusion.parameterization` turns that into log-scores. There are two architectures: `Reference`
is the network of the published models, down to the names of its weights; `Modern` is the one to train from scratch.
The head is initialised to 0, so the first loss is known. No sequence length is fixed.

Reference: Vaswani et al. 2017, "Attention Is All You Need", arXiv 1706.03762.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd import tensors
from sedd.nn import hollow
from sedd.nn.blocks import (
    AttentionContext,
    Block,
    FinalLayer,
    ModernBlock,
    ModernFinalLayer,
    ReferenceBlock,
    ReferenceFinalLayer,
    attention_context,
)
from sedd.nn.layers import (
    Embedding,
    Layer,
    Linear,
    NgramEmbedding,
    NoiseEmbedding,
    PositionEmbedding,
    RotaryEmbedding,
    TransformerShape,
)
from sedd.ops import block_ops, fp8
from sedd.ops.block_ops import Lookup, PackedTokens, ResidualBranch, Rotation, gather
from sedd.runtime import activation_checkpointing
from sedd.runtime.activation_checkpointing import ActivationCheckpointing
from sedd.runtime.cuda_graphs import GraphedFunction, OptionalTensors
from sedd.tensors import compute_dtype, upcast, upcast_dtype


class Transformer(nn.Module, ABC):
    """A transformer over the states of a token, with or without noise conditioning.

    Args:
        states: Rows of the token embedding.
        outputs: Outputs of the head; as many as states if None.
        width: Width of the residual stream.
        depth: Number of blocks.
        heads: Number of attention heads.
        cond_dim: Width of the noise-level embedding.
        dropout: Dropout probability of the residual branches.
        time_conditioning: Whether the network depends on σ.
        causal: Whether the output at i depends on x up to i alone.
        hollow: Whether the output at i depends on all of x but x_i; see `nn.hollow`. It takes three times the work.
        ngrams: Length of the longest n-grams whose embeddings are added; see `embeddings.NgramEmbedding`. 0: none.
        embedding_norm: RMSNorm after the embeddings. Without time conditioning, whose gates start at 0, the last matrix
            of every residual branch is then initialised to 0.
        labels: Number of labels. The embedding of a sequence's label, or of no label, is added to that of its tokens.
        generator: Source of the initial weights; torch's global one if None.
    """

    activation_checkpointing: ActivationCheckpointing
    """How a block is called: `none`, `selective` or `full` of `runtime.activation_checkpointing`."""

    def __init__(
        self,
        *,
        states: int,
        outputs: int | None = None,
        width: int,
        depth: int,
        heads: int,
        cond_dim: int = 128,
        dropout: float = 0.0,
        time_conditioning: bool = True,
        causal: bool = False,
        hollow: bool = False,
        ngrams: int = 0,
        embedding_norm: bool = False,
        labels: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        outputs = states if outputs is None else outputs
        if states < 2 or outputs < 2:
            raise ValueError(f"states is {states} and outputs is {outputs}; a token needs at least 2 of each")
        if depth < 1:
            raise ValueError(f"depth is {depth}; a network needs at least 1 block")
        if hollow and (causal or ngrams):
            raise ValueError(
                "a hollow network is not causal and has no n-gram embeddings: those of neighbours contain x_i"
            )
        shape = TransformerShape(
            width=width,
            heads=heads,
            cond_dim=cond_dim if time_conditioning else None,
            dropout=dropout,
            zero_branches=embedding_norm and not time_conditioning,
        )
        self.states, self.causal, self.hollow, self.labels = states, causal, hollow, labels
        self.embedding_norm = embedding_norm
        self.activation_checkpointing, self.compiled = activation_checkpointing.none, False
        self.graphed_blocks: GraphedFunction | None = None
        # the names of these modules are those of the weights in checkpoints
        self.vocab_embed = Embedding(states + hollow, width)  # the last row of a hollow network: its query stream
        self.label_embed = Embedding(labels + 1, width) if labels else None  # the last row: no label
        self.ngram_embed = NgramEmbedding(states, width, ngrams, causal) if ngrams else None
        self.sigma_map = NoiseEmbedding(cond_dim) if time_conditioning else None
        self.position_embedding = self._build_position_embedding(shape)
        self.rotary_emb = RotaryEmbedding(shape.head_dim)
        self.blocks = nn.ModuleList(self._build_block(shape) for _ in range(depth))
        self.output_layer = self._build_final_layer(shape, outputs)
        if not self.head.weight.is_meta:  # which has no memory to initialise
            self.reset_parameters(generator)

    @abstractmethod
    def _build_position_embedding(self, shape: TransformerShape) -> PositionEmbedding | None:
        """Build the absolute position embedding; None: there is none."""

    @abstractmethod
    def _build_block(self, shape: TransformerShape) -> Block:
        """Build one block."""

    @abstractmethod
    def _build_final_layer(self, shape: TransformerShape, outputs: int) -> FinalLayer:
        """Build the final norm and the head."""

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise all weights; a network built on the meta device needs this once it has memory."""
        for module in self.modules():
            if isinstance(module, Layer):
                module.reset_parameters(generator)

    @property
    def depends_on_sigma(self) -> bool:
        """Whether the output depends on the noise level."""
        return self.sigma_map is not None

    @property
    def head(self) -> Linear:
        """The last linear map: the output is ``head(hidden(x, sigma))``."""
        return self.output_layer.linear

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
        """Return the logits of every position, in float32 or better.

        Args:
            x: Token ids.
            sigma: Total noise of each sequence; not read without time conditioning.
            valid: False at padding: no valid position attends to it, and the output there is meaningless. Positions
                count from the left, so padding on the right changes nothing.
            label: Label id of each sequence; None, and the id after the last, mean no label.
            packed: Compute the output at these positions alone, (n, outputs), with less work in the last block.
            return_hidden: Return the hidden states that the head reads instead, for a loss that is fused with the
                head. Unlike `hidden`, this runs the hooks of DDP and FSDP, and autocast.
        """
        hidden = self.hidden(x, sigma, valid, packed, label)
        return hidden if return_hidden else upcast(self.head(hidden))

    def hidden(
        self,
        x: Int[Tensor, "*b L"],
        sigma: Float[Tensor, "*b"],
        valid: Bool[Tensor, "*b L"] | None = None,
        packed: PackedTokens | None = None,
        label: Int[Tensor, "*b"] | None = None,
    ) -> Float[Tensor, "*s width"]:
        """Return the hidden states that the head reads, in the dtype of its weights or of autocast; see `forward`.

        Of every position, (*b, L, width), or of the packed ones, (n, width).
        """
        tensors.check_states(x, self.states)
        shape, b, length = x.shape, sigma.numel(), x.shape[-1]
        x, valid = x.reshape(b, length), None if valid is None else valid.reshape(b, length)
        rotation = self.rotary_emb(length)
        if self.hollow:
            x, valid = hollow.to_streams(x, self.states), None if valid is None else valid.repeat(1, hollow.STREAMS)
            rotation = Rotation(*(angles.repeat(hollow.STREAMS, 1) for angles in rotation))
        backend = block_ops.select_backend(x.device.type, compute_dtype(self.head.weight))
        lookups = [Lookup(x, self.vocab_embed())]
        if self.ngram_embed is not None:
            lookups += self.ngram_embed.lookups(x, valid)
        if self.label_embed is not None:
            label = x.new_full((b,), self.labels) if label is None else label.reshape(b)
            lookups.append(Lookup(label[:, None], self.label_embed()))
        weight = self.head.weight
        dtype = compute_dtype(weight) if self.blocks[0].use_fp8 else upcast_dtype(weight.dtype)
        h = backend.embed(lookups, self._position_embedding(x.shape[1]), self.embedding_norm, dtype)
        # a compiled trunk computes all positions: their number would be a shape that triggers recompilation
        packed_in_trunk, packed_after = (None, packed) if self.compiled or self.hollow else (packed, None)
        hidden = self.trunk(h, sigma.reshape(-1), valid, rotation, packed_in_trunk)
        hidden = gather(hollow.query_stream(hidden) if self.hollow else hidden, packed_after)
        return hidden.reshape(*shape, -1) if packed is None else hidden

    def trunk(
        self,
        h: Float[Tensor, "b L width"],
        sigma: Float[Tensor, " b"],
        valid: Bool[Tensor, "b L"] | None,
        rotation: Rotation,
        packed: PackedTokens | None = None,
    ) -> Float[Tensor, "*s width"]:
        """Compute the hidden states from the embeddings: one graph without control flow on values.

        The rotation is an argument, since a compiler would recompute its sines wherever they are used. In the last
        block everything after attention is computed for the packed positions alone, if they are given.
        """
        build_context = hollow.hollow_context if self.hollow else partial(attention_context, causal=self.causal)
        context = build_context(rotation, valid)
        c = self._noise_embedding(sigma)
        use_graphs = self.graphed_blocks is not None and self.training and torch.is_grad_enabled() and h.is_cuda
        first_blocks = self._graphed_first_blocks if use_graphs else self._first_blocks
        h, branch = first_blocks(h, c, context)
        h, branch = self.activation_checkpointing(self.blocks[-1], h, branch, c, context, packed)
        hidden: Tensor = self.output_layer(h, branch, c, packed)
        return hidden

    def _position_embedding(self, length: int) -> Tensor | None:
        if self.position_embedding is None:
            return None
        streams = hollow.STREAMS if self.hollow else 1
        embedding: Tensor = self.position_embedding(length // streams)
        return embedding.repeat(streams, 1) if self.hollow else embedding

    def _noise_embedding(self, sigma: Tensor) -> Tensor | None:
        if self.sigma_map is None:
            return None
        tensors.check_sigma(sigma)
        c: Tensor = self.sigma_map(sigma.to(upcast_dtype(self.head.weight.dtype)))
        return c

    def _first_blocks(
        self, h: Tensor, c: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, ResidualBranch | None]:
        """Run all blocks but the last."""
        # a separate view: the gradient of c is summed over these blocks first, in the same order as with CUDA graphs
        c, branch = None if c is None else c.view_as(c), None
        for block in self.blocks[:-1]:
            h, branch = self.activation_checkpointing(block, h, branch, c, context)
        return h, branch

    # CUDA graphs, fp8, compilation -------------------------------------------------------------------------

    def enable_cuda_graphs(self) -> None:
        """Use CUDA graphs in training for all blocks but the last; see `runtime.cuda_graphs.GraphedFunction`.

        Nothing happens without a GPU, with a single block, in a compiled network, or with activation checkpointing.
        Weights must not be sharded; if they are replaced by other tensors, call this again.
        """
        eager = self.activation_checkpointing is activation_checkpointing.none and not self.compiled
        if eager and len(self.blocks) > 1 and self.head.weight.is_cuda:
            self.graphed_blocks = GraphedFunction(self.blocks[:-1].parameters())

    def _graphed_first_blocks(
        self, h: Tensor, c: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, ResidualBranch | None]:
        """Run all blocks but the last by a CUDA graph."""
        assert self.graphed_blocks is not None
        h, y, gate, seed, bias = self.graphed_blocks(
            self._first_blocks_of_tensors, h, c, context.mask, *context.rotation
        )
        dropout: float = self.blocks[-2].dropout  # type: ignore[assignment]
        return h, ResidualBranch(y, gate, dropout, seed, bias)

    def _first_blocks_of_tensors(
        self, h: Tensor, c: Tensor | None, mask: Tensor | None, cos: Tensor, sin: Tensor
    ) -> OptionalTensors:
        """Run all blocks but the last, with tensors alone as inputs and outputs."""
        context = AttentionContext(Rotation(cos, sin), mask, self.causal and mask is None)
        h, branch = self._first_blocks(h, c, context)
        assert branch is not None
        return h, branch.y, branch.gate, branch.seed, branch.bias

    def enable_fp8(self) -> None:
        """Use float8 products in the blocks where they are faster; the residual stream is then in the compute dtype."""
        head = self.head.weight
        if reason := fp8.unsupported_reason(head.device.type, head.shape[-1]):
            raise ValueError(reason)
        for block in self.blocks:
            block.use_fp8 = True  # type: ignore[assignment]

    def compile_trunk(self, backend: str = "inductor") -> None:
        """Compile `trunk`, once for each batch shape.

        The embedding stays outside: compilers make its gradient, a sum over equal tokens, nondeterministic. So does
        what reads the hidden states, of which the number of packed positions differs in every step.
        """
        self.trunk = torch.compile(self.trunk, fullgraph=True, dynamic=False, backend=backend)  # type: ignore[method-assign]
        self.compiled = True

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile every block by itself, for a network whose weights FSDP gathers between them."""
        for block in self.blocks:
            block.compile(backend=backend)
        self.compiled = True


@final
class Reference(Transformer):
    """The network of the published models, weight by weight.

    With time conditioning it has the layout of SEDD, without it that of RADD, a plain pre-norm transformer.

    References: Lou et al. 2024, "Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution",
    arXiv 2310.16834; Ou et al. 2024, "Your Absorbing Discrete Diffusion Secretly Models the Conditional Distributions
    of Clean Data", arXiv 2406.03736.
    """

    def _build_position_embedding(self, shape: TransformerShape) -> PositionEmbedding | None:
        return None

    def _build_block(self, shape: TransformerShape) -> Block:
        return ReferenceBlock(shape)

    def _build_final_layer(self, shape: TransformerShape, outputs: int) -> FinalLayer:
        return ReferenceFinalLayer(shape, outputs)


@final
class Modern(Transformer):
    """RMSNorm, QK-norm, squared ReLU and no biases; with time conditioning, gates are initialised to 0.

    Tokens also have an absolute position embedding; see `embeddings.PositionEmbedding`.
    """

    def _build_position_embedding(self, shape: TransformerShape) -> PositionEmbedding | None:
        return PositionEmbedding(shape.width)

    def _build_block(self, shape: TransformerShape) -> Block:
        return ModernBlock(shape)

    def _build_final_layer(self, shape: TransformerShape, outputs: int) -> FinalLayer:
        return ModernFinalLayer(shape, outputs)
