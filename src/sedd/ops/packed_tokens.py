"""Packing of the positions that count in a loss.

Forward and backward are gathers without atomic additions, so the same bits come out every time.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the conventional name)


class PackedTokens(NamedTuple):
    """The selected positions of a batch of b sequences, in order."""

    positions: Int[Tensor, " n"]
    """Flat position of every selected token."""
    inverse: Int[Tensor, " s"]
    """For every flat position its row among the selected tokens; n where it is not selected."""
    cu_seqlens: Int[Tensor, " b+1"]
    """Cumulative numbers of selected tokens per sequence, from 0."""

    @property
    def seq_len(self) -> int:
        """Positions per sequence."""
        return len(self.inverse) // (len(self.cu_seqlens) - 1)

    @property
    def sequence(self) -> Int[Tensor, " n"]:
        """The sequence of every selected token."""
        return self.positions // self.seq_len


def pack_tokens(selected: Bool[Tensor, "*b L"], count: int | None = None) -> PackedTokens:
    """Pack the positions where ``selected`` is true.

    Args:
        selected: The mask.
        count: How many are selected; None counts them, which on a GPU waits for the device.
    """
    flat = selected.flatten()
    count = int(flat.sum()) if count is None else count
    positions = flat.to(torch.uint8).argsort(descending=True, stable=True)[:count]
    cu_seqlens = F.pad(selected.sum(-1).flatten().cumsum(0), (1, 0))
    return PackedTokens(positions, torch.where(flat, flat.cumsum(0) - 1, count), cu_seqlens)


def gather(hidden: Float[Tensor, "*b h"], packed: PackedTokens | None) -> Float[Tensor, "*n h"]:
    """Return the rows of the selected tokens, (n, h); without a selection ``hidden`` unchanged."""
    if packed is None:
        return hidden
    rows: Tensor = _Gather.apply(hidden.flatten(0, -2), packed)  # type: ignore[no-untyped-call]
    return rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, packed: PackedTokens) -> Tensor:
        ctx.save_for_backward(packed.inverse)
        return hidden.index_select(0, packed.positions)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        return torch.cat([grad, grad.new_zeros(1, grad.shape[-1])]).index_select(0, inverse), None
