"""Sums of rows by their key in Triton: the gradient of an embedding, where some tokens are rare and one is half of all.

In the order of their keys, rows of one key are a run; a program has a piece of some rows. What begins and ends in it
is summed and written. Its first and last run may go on next door, so their sums are two rows of a shorter list, which
is summed in the same way. Nothing is added by two programs to one place, so the same bits come out every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.runtime.device import cdiv, next_power_of_2

PIECE, STRIP = 64, 256
"""Rows and columns a program, which is one warp. A piece of less than 4 rows makes no shorter list."""


def summed(rows: Tensor, keys: Tensor, count: int) -> Tensor:
    """For each of ``count`` keys the sum of its rows, in float32."""
    width = rows.shape[1]
    table = rows.new_zeros(count, width, dtype=torch.float32)
    keys, order = keys.int().sort(stable=True)
    strip = min(STRIP, next_power_of_2(width))
    while len(keys):
        pieces = cdiv(len(keys), PIECE)
        parts, ends = rows.new_empty(2 * pieces, width, dtype=torch.float32), keys.new_empty(2 * pieces)
        _sums[(pieces, cdiv(width, strip))](
            rows, order, keys, table, parts, ends, len(keys), width,
            LAST=pieces == 1, PIECE=PIECE, STRIP=strip, num_warps=1,
        )  # fmt: skip
        if pieces == 1:
            break
        rows, keys, order = parts, ends, torch.arange(2 * pieces, device=rows.device)
    return table


@triton.jit
def _sums(
    rows, order, keys, table, parts, ends, count, width,
    LAST: tl.constexpr, PIECE: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    piece, column = tl.program_id(0), tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    held, start = column < width, piece * PIECE
    end = tl.minimum(start + PIECE, count)
    first, last = tl.load(keys + start), tl.load(keys + end - 1)
    parts += 2 * piece.to(tl.int64) * width
    key, total = first, tl.zeros((STRIP,), tl.float32)
    for i in tl.range(start, end, num_stages=3):
        total += tl.load(rows + tl.load(order + i) * width + column, mask=held, other=0).to(tl.float32)
        after = tl.load(keys + i + 1, mask=i + 1 < end, other=-1)
        over, whole = after != key, LAST or ((key != first) & (i + 1 < end))
        tl.store(table + key.to(tl.int64) * width + column, total, mask=held & over & whole)
        side = tl.where(key == first, 0, width)
        tl.store(parts + side + column, total, mask=held & over & (not whole))
        total, key = tl.where(over, 0.0, total), after
    if not LAST:
        tl.store(parts + width + column, tl.zeros((STRIP,), tl.float32), mask=held & (first == last))
        tl.store(ends + 2 * piece, first)
        tl.store(ends + 2 * piece + 1, last)
