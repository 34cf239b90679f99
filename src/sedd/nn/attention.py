"""Multi-head attention."""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.nn.layers import Layer
from sedd.ops.block_ops import Rotation


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


class AttentionContext(NamedTuple):
    """The inputs of attention besides queries, keys and values, the same for all blocks."""

    rotation: Rotation
    mask: Bool[Tensor, "b 1 #L L"] | None
    """True where the query (row) attends to the key (column); None: no mask but ``causal``."""
    causal: bool
    """Whether a token attends to itself and earlier tokens alone; False where ``mask`` covers that."""


def attention_context(rotation: Rotation, valid: Bool[Tensor, "b L"] | None, causal: bool) -> AttentionContext:
    """Build the mask by which valid tokens do not attend to padding.

    Every query attends to at least one key, since kernels differ on a softmax over no key.
    """
    if valid is None:
        return AttentionContext(rotation, None, causal)
    length = valid.shape[-1]
    if not causal:
        return AttentionContext(rotation, (valid | ~valid.any(-1, keepdim=True))[:, None, None], False)
    lower_triangle = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()
    diagonal = torch.eye(length, dtype=torch.bool, device=valid.device)
    return AttentionContext(rotation, (valid[:, None, None] & lower_triangle) | diagonal, False)


def attention(
    q: Float[Tensor, "b L heads d"],
    k: Float[Tensor, "b L heads d"],
    v: Float[Tensor, "b L heads d"],
    context: AttentionContext,
) -> Float[Tensor, "b L h"]:
    """Compute softmax(q·k/√d) v with concatenated heads; q and k already carry the rotary embedding."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # views, since heads are adjacent in memory
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask, is_causal=context.causal)
    return output.transpose(1, 2).flatten(-2)
