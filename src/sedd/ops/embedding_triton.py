"""Segment sum in Triton: the gradient of an embedding, where some tokens are rare and the mask is half of all.

Rows are sorted by key, so that the rows of one key are a segment; a program sums a chunk of rows. Segments that lie
inside the chunk are complete and are written to the result. The first and the last may continue in another chunk:
their partial sums are two rows of a shorter list, which is summed in the same way. There are no atomic additions, so
the same bits come out every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.runtime.device import cdiv, next_power_of_2

CHUNK, COLUMNS = 64, 256
"""Rows and columns per program, which is one warp. The list gets shorter only with chunks of at least 4 rows."""


def segment_sum(rows: Tensor, keys: Tensor, count: int) -> Tensor:
    """Return for each of ``count`` keys the sum of its rows, in float32."""
    width = rows.shape[1]
    table = rows.new_zeros(count, width, dtype=torch.float32)
    keys, order = keys.int().sort(stable=True)
    columns = min(COLUMNS, next_power_of_2(width))
    while len(keys):
        chunks = cdiv(len(keys), CHUNK)
        partial, ends = rows.new_empty(2 * chunks, width, dtype=torch.float32), keys.new_empty(2 * chunks)
        _segment_sum[(chunks, cdiv(width, columns))](
            rows, order, keys, table, partial, ends, len(keys), width,
            LAST=chunks == 1, CHUNK=CHUNK, COLUMNS=columns, num_warps=1,
        )  # fmt: skip
        if chunks == 1:
            break
        rows, keys, order = partial, ends, torch.arange(2 * chunks, device=rows.device)
    return table


@triton.jit
def _segment_sum(
    rows, order, keys, table, partial, ends, count, width,
    LAST: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, start = column < width, chunk * CHUNK
    end = tl.minimum(start + CHUNK, count)
    first, last = tl.load(keys + start), tl.load(keys + end - 1)
    partial += 2 * chunk.to(tl.int64) * width
    key, total = first, tl.zeros((COLUMNS,), tl.float32)
    for i in tl.range(start, end, num_stages=3):
        total += tl.load(rows + tl.load(order + i) * width + column, mask=inside, other=0).to(tl.float32)
        next_key = tl.load(keys + i + 1, mask=i + 1 < end, other=-1)
        ends_here, complete = next_key != key, LAST or ((key != first) & (i + 1 < end))
        tl.store(table + key.to(tl.int64) * width + column, total, mask=inside & ends_here & complete)
        side = tl.where(key == first, 0, width)
        tl.store(partial + side + column, total, mask=inside & ends_here & (not complete))
        total, key = tl.where(ends_here, 0.0, total), next_key
    if not LAST:
        tl.store(partial + width + column, tl.zeros((COLUMNS,), tl.float32), mask=inside & (first == last))
        tl.store(ends + 2 * chunk, first)
        tl.store(ends + 2 * chunk + 1, last)
