"""Which positions count, packed together: no scatter on the way there or back, so the same bits every time."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its name everywhere)


class PackedTokens(NamedTuple):
    """The positions that count, in order, and the way back."""

    kept: Int[Tensor, " n"]
    back: Int[Tensor, " s"]
    """For every position its place among those that count; n where it is not among them."""
    starts: Int[Tensor, " b+1"]
    """Where the rows of each sequence begin among those that count, and the end."""

    @property
    def length(self) -> int:
        """How many positions a sequence has."""
        return len(self.back) // (len(self.starts) - 1)

    @property
    def which(self) -> Int[Tensor, " n"]:
        """The sequence of every row that counts."""
        return self.kept // self.length


def unknown_rows(unknown: Bool[Tensor, "*b L"], count: int | None = None) -> PackedTokens:
    """The positions where ``unknown`` is true, of which there are ``count``.

    Whoever made the batch on the CPU knows how many there are. Without ``count`` it is asked of the device, and an
    accelerator is waited for.
    """
    flat = unknown.flatten()
    count = int(flat.sum()) if count is None else count
    kept = flat.to(torch.uint8).argsort(descending=True, stable=True)[:count]
    starts = F.pad(unknown.sum(-1).flatten().cumsum(0), (1, 0))
    return PackedTokens(kept, torch.where(flat, flat.cumsum(0) - 1, count), starts)


def take(hidden: Float[Tensor, "*b h"], rows: PackedTokens | None) -> Float[Tensor, "*n h"]:
    """The rows that count, (n, h); None: all do, and stay as they are."""
    if rows is None:
        return hidden
    taken: Tensor = _Take.apply(hidden.flatten(0, -2), rows)  # type: ignore[no-untyped-call]
    return taken


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: PackedTokens) -> Tensor:
        ctx.save_for_backward(rows.back)
        return hidden.index_select(0, rows.kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        return torch.cat([grad, grad.new_zeros(1, grad.shape[-1])]).index_select(0, back), None
