"""Transformers that map noisy tokens to logits.

``network(x, sigma)`` reads ids ``(*b, L)`` and the total noise ``(*b,)`` and returns ``(*b, L, outputs)``, in float32
or better; a model of `parameterization` turns that into log-scores. There are two architectures: `Reference` is the
network of the published models, down to the names of its weights; `Modern` is the one to train from scratch. They
differ in the weights of a block and compute the same with them. The head is initialised to 0. No length is fixed.

A block returns the residual stream and the branch that is still to be added to it: the next block, or the final layer,
adds it, since that sum and the norm that follows are one fused kernel.

Reference: Vaswani et al. 2017, "Attention Is All You Need", arXiv 1706.03762.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd import tensors
from sedd.nn import layers
from sedd.nn.layers import Float32Linear, Linear, NormWeights
from sedd.ops import block_ops, fp8
from sedd.ops.block_ops import RMS_NORM, Hidden, Lookup, NormSpec, PackedTokens, ResidualBranch, Rotation, gather
from sedd.runtime import activation_checkpointing
from sedd.runtime.cuda_graphs import GraphedFunction, OptionalTensors
from sedd.tensors import PerSequence, Tokens, compute_dtype, upcast, upcast_dtype

Stream = Float[Tensor, "b L h"]
Condition = Float[Tensor, "b cond"] | None
"""The embedding of each sequence's noise level; None in a network without noise conditioning."""
Mask = Bool[Tensor, "#b 1 #L L"] | None
"""True where the query (row) attends to the key (column); None: everywhere, but for causal attention."""
Valid = Bool[Tensor, "*b L"] | None
Labels = Int[Tensor, "*b"] | None
Packed = PackedTokens | None


class AttentionContext(NamedTuple):
    """The inputs of attention besides queries, keys and values, the same for all blocks."""

    rotation: Rotation
    mask: Mask
    causal: bool  # whether a token attends to itself and earlier tokens alone; False where ``mask`` covers that


def attention_mask(valid: Valid, pattern: Bool[Tensor, "L L"] | None) -> Mask:
    """Return the mask by which valid tokens attend within a pattern, and not to padding.

    Every query has a key: kernels differ on a softmax over none.
    """
    if valid is None:
        return None if pattern is None else pattern[None, None]
    if pattern is None:
        return (valid | ~valid.any(-1, keepdim=True))[:, None, None]
    return (valid[:, None, None] & pattern) | torch.eye(len(pattern), dtype=torch.bool, device=valid.device)


STREAMS = 3  # copies of a sequence that a hollow network reads: forward, backward and query stream


def hollow_mask(length: int, device: torch.device) -> Bool[Tensor, "n n"]:
    """Return the attention of a hollow network, whose output at a position depends on all tokens but its own.

    The network reads three streams side by side, with the same positions and weights:

    - in the *forward* stream position j attends to positions up to j, so it depends on x_1 … x_j;
    - in the *backward* stream it attends to positions from j on, so it depends on x_j … x_L;
    - in the *query* stream one more token replaces every token, and position i attends to itself, to the forward stream
      before i and to the backward stream after i: in every block it depends on all of x but x_i.

    Masking the diagonal of ordinary attention is not enough: one block carries x_i to neighbours, the next one back.

    Reference: Sun et al. 2022, "Score-based Continuous-time Discrete Diffusion Models", arXiv 2211.16750.
    """
    every = torch.ones(length, length, dtype=torch.bool, device=device)
    none = torch.zeros_like(every)
    forward, backward = (every.tril(), none, none), (none, every.triu(), none)
    query = every.tril(-1), every.triu(1), every.tril() & every.triu()
    return torch.cat([torch.cat(row, -1) for row in (forward, backward, query)])


class BlockWeights(NamedTuple):
    """The weights of a block: norm and attention, then norm and MLP."""

    norms: tuple[NormSpec, NormSpec]
    qkv: Linear
    qk_scale: tuple[Tensor, Tensor] | None  # scales of normalized queries and keys; None: they are not normalized
    out: Linear
    up: Linear
    down: Linear
    activation: str  # ``gelu`` or ``relu2``
    modulation: Float32Linear | None  # adaLN (Peebles and Xie 2022, arXiv 2212.09748); None without noise conditioning


class Block(nn.Module, ABC):
    """A transformer block: attention and MLP, each after a norm and next to a residual connection."""

    use_fp8 = False  # whether matrix products run in float8 where that is faster; see `ops.fp8`

    def __init__(self, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout

    @abstractmethod
    def block_weights(self) -> BlockWeights: ...

    def forward(
        self, x: Stream, branch: ResidualBranch | None, c: Condition, context: AttentionContext, packed: Packed = None
    ) -> tuple[Hidden, ResidualBranch]:
        """Return the residual stream and the branch that is still to be added to it.

        In the last block ``packed`` are the positions that are read: all after attention is computed for these alone.
        """
        w = self.block_weights()
        dtype = compute_dtype(w.qkv.weight)
        backend, dropout = block_ops.select_backend(x.device.type, dtype), self.dropout if self.training else 0.0
        attention_adaln = mlp_adaln = attention_gate = mlp_gate = None
        if w.modulation is not None:
            shift1, scale1, attention_gate, shift2, scale2, mlp_gate = w.modulation(c).chunk(6, -1)
            attention_adaln, mlp_adaln = (shift1, scale1), (shift2, scale2)

        x, n, n_fp8 = backend.residual_norm_modulate(x, branch, w.norms[0], attention_adaln, dtype, None, self.use_fp8)
        q, k, v = backend.qkv_rotary(n, w.qkv.weight, self.heads, context.rotation, w.qk_scale, n_fp8)
        # softmax(q·k/√d) v with concatenated heads, which are adjacent in memory: transposes are views
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask, is_causal=context.causal)
        attended = attended.transpose(1, 2).flatten(-2)
        if packed is not None:
            x, attended = gather(x, packed), gather(attended, packed)
        seed = torch.randint(2**32, (2,), device=x.device) if dropout else None
        branch = ResidualBranch(backend.linear(attended, w.out.weight), attention_gate, dropout, seed)

        x, n, n_fp8 = backend.residual_norm_modulate(x, branch, w.norms[1], mlp_adaln, dtype, packed, self.use_fp8)
        y = backend.mlp(n, (w.up.weight, w.up.bias), w.down.weight, w.activation, n_fp8)
        # a copy: FSDP has freed this block's weights when the next block adds the bias
        bias = None if w.down.bias is None else w.down.bias.clone()
        seed = torch.randint(2**32, (2,), device=x.device) if dropout else None
        return x, ResidualBranch(y, mlp_gate, dropout, seed, bias)


@final
class ReferenceBlock(Block):
    """LayerNorm → modulate → attention → gate, then LayerNorm → modulate → GELU MLP → gate, each with a residual."""

    def __init__(self, width: int, heads: int, cond_dim: int | None, dropout: float, zero_branches: bool) -> None:
        super().__init__(heads, dropout)
        self.norm1 = NormWeights(width, bias=cond_dim is None)
        self.attn_qkv = Linear(width, 3 * width, bias=False)
        self.attn_out = Linear(width, width, bias=False)
        self.norm2 = NormWeights(width, bias=cond_dim is None)
        self.mlp = nn.Sequential(Linear(width, 4 * width), nn.GELU("tanh"), Linear(4 * width, width))
        self.adaLN_modulation = None if cond_dim is None else Float32Linear(cond_dim, 6 * width, zero=True)

    def block_weights(self) -> BlockWeights:
        norms, (up, _, down) = (_layer_norm(self.norm1), _layer_norm(self.norm2)), self.mlp
        return BlockWeights(norms, self.attn_qkv, None, self.attn_out, up, down, "gelu", self.adaLN_modulation)  # type: ignore[arg-type]


def _layer_norm(weights: NormWeights) -> NormSpec:
    return NormSpec(1e-5, True, weights.weight, weights.bias)


@final
class ModernBlock(Block):
    """RMSNorm → modulate → attention with QK-norm → gate, then RMSNorm → modulate → squared-ReLU MLP → gate.

    References: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv 1910.07467; So et al. 2021,
    "Primer: Searching for Efficient Transformers for Language Modeling", arXiv 2109.08668 (squared ReLU).
    """

    def __init__(self, width: int, heads: int, cond_dim: int | None, dropout: float, zero_branches: bool) -> None:
        super().__init__(heads, dropout)
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False, zero=zero_branches)
        self.q_norm, self.k_norm = (NormWeights(width // heads, bias=False) for _ in "qk")
        self.up = Linear(width, 4 * width, bias=False)
        self.down = Linear(4 * width, width, bias=False, zero=zero_branches)
        self.modulation = None if cond_dim is None else Float32Linear(cond_dim, 6 * width, bias=False, zero=True)

    def block_weights(self) -> BlockWeights:
        norms, scales = (RMS_NORM, RMS_NORM), (self.q_norm.weight, self.k_norm.weight)
        return BlockWeights(norms, self.qkv, scales, self.out, self.up, self.down, "relu2", self.modulation)


@final
class FinalLayer(nn.Module):
    """Norm → modulate → head: LayerNorm and a head with a bias if ``reference``, else RMSNorm and no bias."""

    def __init__(self, width: int, outputs: int, cond_dim: int | None, reference: bool) -> None:
        super().__init__()
        self.norm_final = NormWeights(width, bias=cond_dim is None) if reference else None
        self.linear = Linear(width, outputs, bias=reference, zero=True)
        adaln = None if cond_dim is None else Float32Linear(cond_dim, 2 * width, bias=reference, zero=True)
        self.adaLN_modulation = adaln if reference else None
        self.modulation = None if reference else adaln

    def forward(self, x: Hidden, branch: ResidualBranch | None, c: Condition, packed: Packed = None) -> Hidden:
        """Return what the head reads."""
        norm = RMS_NORM if self.norm_final is None else _layer_norm(self.norm_final)
        layer = self.adaLN_modulation or self.modulation
        modulation = None if layer is None else layer(c).chunk(2, -1)
        dtype = compute_dtype(self.linear.weight)
        backend = block_ops.select_backend(x.device.type, dtype)
        return backend.residual_norm_modulate(x, branch, norm, modulation, dtype, packed)[1]


class Transformer(nn.Module, ABC):
    """A transformer over the ``states`` of a token, with ``outputs`` entries of the head, as many if None.

    Args:
        dropout: Dropout probability of the residual branches.
        time_conditioning: Whether the network depends on σ, by an embedding of width ``cond_dim``.
        causal: Whether the output at i depends on x up to i alone.
        hollow: Whether the output at i depends on all of x but x_i; see `hollow_mask`. It takes three times the work.
        ngrams: Length of the longest n-grams whose embeddings are added; see `layers.NgramEmbedding`. 0: none.
        embedding_norm: RMSNorm after the embeddings. Without time conditioning, whose gates start at 0, the last matrix
            of every residual branch is then initialised to 0.
        labels: Number of labels. The embedding of a sequence's label, or of no label, is added to that of its tokens.
        generator: Source of the initial weights; torch's global one if None.
    """

    block_class: ClassVar[type[ReferenceBlock | ModernBlock]]
    is_reference: ClassVar[bool]

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
        if width % (2 * heads):
            raise ValueError(f"width {width} is no multiple of twice heads {heads}; rotary embeddings rotate pairs")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}; it must lie in [0, 1)")
        if hollow and (causal or ngrams):
            raise ValueError("a hollow network is neither causal nor has n-gram embeddings: neighbours' contain x_i")
        condition = cond_dim if time_conditioning else None
        block = width, heads, condition, dropout, embedding_norm and not time_conditioning
        self.states, self.causal, self.hollow, self.labels = states, causal, hollow, labels
        self.depends_on_sigma, self.embedding_norm, self.head_dim = time_conditioning, embedding_norm, width // heads
        self.activation_checkpointing, self.compiled = activation_checkpointing.none, False
        self.graphed_blocks: GraphedFunction | None = None
        # modules are named as in checkpoints
        self.vocab_embed = layers.Embedding(states + hollow, width)  # the last row if hollow: the query stream
        self.label_embed = layers.Embedding(labels + 1, width) if labels else None  # the last row: no label
        self.ngram_embed = layers.NgramEmbedding(states, width, ngrams, causal) if ngrams else None
        self.sigma_map = layers.NoiseEmbedding(cond_dim) if time_conditioning else None
        self.position_embedding = None if self.is_reference else layers.PositionEmbedding(width)
        self.rotary_emb = layers.RotaryEmbedding(width // heads)
        self.blocks = nn.ModuleList(self.block_class(*block) for _ in range(depth))
        self.output_layer = FinalLayer(width, outputs, condition, self.is_reference)
        if not self.head.weight.is_meta:  # which has no memory to initialise
            self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise all weights; a network built on the meta device needs this once it has memory."""
        for module in self.modules():
            if isinstance(module, layers.Layer):
                module.reset_parameters(generator)

    @property
    def head(self) -> Linear:
        """The last linear map: the output is ``head(hidden(x, sigma))``."""
        return self.output_layer.linear

    def forward(
        self,
        x: Tokens,
        sigma: PerSequence,
        valid: Valid = None,
        *,
        label: Labels = None,
        packed: Packed = None,
        return_hidden: bool = False,
    ) -> Float[Tensor, "*s outputs"]:
        """Return the logits of every position, in float32 or better; without time conditioning ``sigma`` is not read.

        No valid position attends to padding, where ``valid`` is False and the output is meaningless. A ``label`` of
        None, and the id after the last, mean no label. With ``packed`` the output is that of these positions, (n,
        outputs), for less work in the last block. ``return_hidden`` returns what the head reads, for a loss that is
        fused with the head: unlike `hidden`, this runs the hooks of DDP and FSDP, and autocast.
        """
        hidden = self.hidden(x, sigma, valid, packed, label)
        return hidden if return_hidden else upcast(self.head(hidden))

    def hidden(
        self, x: Tokens, sigma: PerSequence, valid: Valid = None, packed: Packed = None, label: Labels = None
    ) -> Hidden:
        """Return the hidden states that the head reads, in the dtype of its weights or of autocast; see `forward`."""
        tensors.check_states(x, self.states)
        shape, b, length = x.shape, sigma.numel(), x.shape[-1]
        x, valid = x.reshape(b, length), None if valid is None else valid.reshape(b, length)
        weight = self.output_layer.linear.weight
        positions = torch.arange(length, device=x.device, dtype=upcast_dtype(weight.dtype))
        angle = layers.angles(positions, self.head_dim)
        position = None if self.position_embedding is None else self.position_embedding(positions)
        if self.hollow:
            x, angle = torch.cat([x, x, torch.full_like(x, self.states)], -1), angle.repeat(STREAMS, 1)
            valid = None if valid is None else valid.repeat(1, STREAMS)
            position = None if position is None else position.repeat(STREAMS, 1)
        rotation = Rotation(angle.cos(), angle.sin())
        lookups = [Lookup(x, self.vocab_embed.embedding)]
        if self.ngram_embed is not None:
            lookups += self.ngram_embed.lookups(x, valid)
        if self.label_embed is not None:
            label = x.new_full((b,), self.labels) if label is None else label.reshape(b)
            lookups.append(Lookup(label[:, None], self.label_embed.embedding))
        dtype = compute_dtype(weight)
        backend = block_ops.select_backend(x.device.type, dtype)
        dtype = dtype if self.blocks[0].use_fp8 else upcast_dtype(weight.dtype)
        h = backend.embed(lookups, position, self.embedding_norm, dtype)
        # a compiled trunk computes all positions: their number would be a shape that triggers recompilation
        packs_last_block = not (self.compiled or self.hollow)
        hidden = self.trunk(h, sigma.reshape(-1), valid, rotation, packed if packs_last_block else None)
        if self.hollow:
            hidden = hidden[:, -length:]  # the query stream
        if packed is None:
            return hidden.reshape(*shape, -1)
        return hidden if packs_last_block else gather(hidden, packed)

    def trunk(self, h: Stream, sigma: PerSequence, valid: Valid, rotation: Rotation, packed: Packed = None) -> Hidden:
        """Compute the hidden states from the embeddings: one graph without control flow on values.

        The rotation is an argument: a compiler would recompute its sines wherever they are used.
        """
        pattern = c = None
        if self.hollow:
            pattern = hollow_mask(h.shape[1] // STREAMS, h.device)
        elif self.causal and valid is not None:
            pattern = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).tril()
        mask = attention_mask(valid, pattern)
        if self.sigma_map is not None:
            tensors.check_sigma(sigma)
            c = self.sigma_map(sigma.to(upcast_dtype(self.output_layer.linear.weight.dtype)))
        context = AttentionContext(rotation, mask, self.causal and mask is None)
        use_graphs = self.graphed_blocks is not None and self.training and torch.is_grad_enabled() and h.is_cuda
        first_blocks = self._graphed_first_blocks if use_graphs else self._first_blocks
        h, branch = first_blocks(h, c, context)
        h, branch = self.activation_checkpointing(self.blocks[-1], h, branch, c, context, packed)
        hidden: Tensor = self.output_layer(h, branch, c, packed)
        return hidden

    def _first_blocks(self, h: Stream, c: Condition, context: AttentionContext) -> tuple[Stream, ResidualBranch | None]:
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
        Weights must not be sharded. Call this again after they are replaced by other tensors.
        """
        eager = self.activation_checkpointing is activation_checkpointing.none and not self.compiled
        if eager and len(self.blocks) > 1 and self.head.weight.is_cuda:
            self.graphed_blocks = GraphedFunction(self.blocks[:-1].parameters())

    def _graphed_first_blocks(
        self, h: Tensor, c: Condition, context: AttentionContext
    ) -> tuple[Tensor, ResidualBranch]:
        """Run all blocks but the last by a CUDA graph."""
        assert self.graphed_blocks is not None
        h, y, gate, seed, bias = self.graphed_blocks(self._blocks_of_tensors, h, c, context.mask, *context.rotation)
        dropout: float = self.blocks[-2].dropout  # type: ignore[assignment]
        return h, ResidualBranch(y, gate, dropout, seed, bias)

    def _blocks_of_tensors(
        self, h: Tensor, c: Tensor | None, mask: Tensor | None, cos: Tensor, sin: Tensor
    ) -> OptionalTensors:
        """Run all blocks but the last, with tensors alone as inputs and outputs."""
        context = AttentionContext(Rotation(cos, sin), mask, self.causal and mask is None)
        h, branch = self._first_blocks(h, c, context)
        assert branch is not None
        return h, branch.y, branch.gate, branch.seed, branch.bias

    def enable_fp8(self) -> None:
        """Use float8 products in the blocks where they are faster; the residual stream is then in the compute dtype."""
        fp8.check_supported(self.head.weight.device.type, self.head.weight.shape[-1])
        for block in self.blocks:
            block.use_fp8 = True  # type: ignore[assignment]

    def compile_trunk(self, backend: str = "inductor") -> None:
        """Compile `trunk`, once for each batch shape.

        The embedding stays outside: compilers make its gradient, a sum over equal tokens, nondeterministic. So does
        what reads the hidden states at packed positions, whose number differs in every step.
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

    With time conditioning it has the layout of SEDD, without it the layout of RADD, a plain pre-norm transformer.

    References: Lou et al. 2024, "Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution",
    arXiv 2310.16834; Ou et al. 2024, "Your Absorbing Discrete Diffusion Secretly Models the Conditional Distributions
    of Clean Data", arXiv 2406.03736.
    """

    block_class, is_reference = ReferenceBlock, True


@final
class Modern(Transformer):
    """RMSNorm, QK-norm, squared ReLU, `layers.PositionEmbedding` and no biases; gates are initialised to 0."""

    block_class, is_reference = ModernBlock, False
