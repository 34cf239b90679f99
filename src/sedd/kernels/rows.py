"""Which positions count, packed together: no scatter on the way there or back, so the same bits every time."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Rows(NamedTuple):
    """The positions that count, in order, and the way back."""

    kept: Int[Tensor, " n"]
    back: Int[Tensor, " s"]
    """For every position its place among those that count; n where it is not among them."""


def unknown_rows(unknown: Bool[Tensor, "*b"], count: int | None = None) -> Rows:
    """The positions where ``unknown`` is true, of which there are ``count``.

    Whoever made the batch on the CPU knows how many there are. Without ``count`` it is asked of the device, and an
    accelerator is waited for.
    """
    flat = unknown.flatten()
    count = int(flat.sum()) if count is None else count
    kept = flat.to(torch.uint8).argsort(descending=True, stable=True)[:count]
    return Rows(kept, torch.where(flat, flat.cumsum(0) - 1, count))


def take(hidden: Float[Tensor, "*b h"], rows: Rows) -> Float[Tensor, "n h"]:
    """The rows that count."""
    taken: Tensor = _Take.apply(hidden.flatten(0, -2), rows)  # type: ignore[no-untyped-call]
    return taken


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: Rows) -> Tensor:
        ctx.save_for_backward(rows.back)
        return hidden.index_select(0, rows.kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        return torch.cat([grad, grad.new_zeros(1, grad.shape[-1])]).index_select(0, back), None
