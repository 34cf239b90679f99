"""Hollow attention: the output at a position depends on all tokens but its own.

The network reads three copies (streams) of a sequence side by side, with the same positions and weights:

- in the *forward* stream position j attends to positions up to j, so it depends on x_1 … x_j;
- in the *backward* stream it attends to positions from j on, so it depends on x_j … x_L;
- in the *query* stream every token is replaced by one that is not in the vocabulary, and position i attends to itself,
  to the forward stream before i and to the backward stream after i.

In every block the query stream at i therefore depends on x_1 … x_{i−1} and x_{i+1} … x_L, and never on x_i. To mask the
diagonal of ordinary attention would not be enough: one block carries x_i to the neighbours, the next one back.

Reference: Sun et al. 2022, "Score-based Continuous-time Discrete Diffusion Models", arXiv 2211.16750.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.nn.blocks import AttentionContext
from sedd.ops.block_ops import Rotation

STREAMS = 3


def to_streams(x: Int[Tensor, "b L"], query: int) -> Int[Tensor, "b L3"]:
    """Return the forward, the backward and the query stream of sequences; ``query`` is the token of the last."""
    return torch.cat([x, x, torch.full_like(x, query)], -1)


def query_stream(hidden: Float[Tensor, "b L3 h"]) -> Float[Tensor, "b L h"]:
    """Return the query stream of hidden states."""
    return hidden[:, -(hidden.shape[1] // STREAMS) :]


def hollow_context(rotation: Rotation, valid: Bool[Tensor, "b L3"] | None) -> AttentionContext:
    """Return the attention mask of the streams; no position attends to padding but to itself."""
    mask = hollow_mask(len(rotation.cos) // STREAMS, rotation.cos.device)[None, None]
    if valid is not None:
        mask = (mask & valid[:, None, None]) | torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
    return AttentionContext(rotation, mask, False)


def hollow_mask(length: int, device: torch.device) -> Bool[Tensor, "n n"]:
    """Return which streams and positions (columns) each stream and position (row) attends to."""
    every = torch.ones(length, length, dtype=torch.bool, device=device)
    none = torch.zeros_like(every)
    rows = (
        (every.tril(), none, none),
        (none, every.triu(), none),
        (every.tril(-1), every.triu(1), every.tril() & every.triu()),
    )
    return torch.cat([torch.cat(row, -1) for row in rows])
