"""Embeddings in Triton: sums of table rows with a norm, and the segment sum that is the gradient of a table.

Rows are sorted by key, so that the rows of one key are a segment; some tokens are rare, and the mask is half of all. A
program sums a chunk of rows. Segments inside the chunk are complete and written to the result. The first and the last
may continue in another chunk: their partial sums are two rows of a shorter list, which is summed in the same way. There
are no atomic additions, so the same bits come out every time.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.runtime.device import cdiv, next_power_of_2

# mypy: disable-error-code=assignment

CHUNK, COLUMNS = 64, 256
"""Rows and columns per program, which is one warp. The list gets shorter only with chunks of at least 4 rows."""
MAX_TABLES = 4  # tables of `embed_and_norm_forward`, at most
NORM_ROWS, NORM_COLUMNS, NORM_WARPS = 4, 256, 1
"""Rows per program, entries per load and warps of the kernels with a norm."""


def embed_and_norm_forward(
    keys: Sequence[Tensor], tables: Sequence[Tensor], position: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return x/√(mean x² + ε) of x = Σ_j table_j[keys_j] + position, and that 1/√(mean x² + ε) of every row."""
    (b, length), width = keys[0].shape, tables[0].shape[1]
    n = tables[0].new_empty(b, length, width, dtype=dtype)
    rstd = tables[0].new_empty(b, length, dtype=torch.float32)
    _embed_and_norm[(cdiv(b * length, NORM_ROWS),)](
        *_padded(keys), *_padded(tables), rstd if position is None else position, rstd, n, n, b * length, length, width,
        torch.finfo(torch.float32).eps, BACKWARD=False, **_norm_sizes(tables, position),
    )  # fmt: skip
    return n, rstd


def embed_and_norm_backward(
    keys: Sequence[Tensor], tables: Sequence[Tensor], position: Tensor | None, rstd: Tensor, dn: Tensor
) -> Tensor:
    """Return the gradient of the sum, which is computed again from tables that are cached, in the dtype of ``dn``."""
    (b, length), width = keys[0].shape, tables[0].shape[1]
    dh = torch.empty_like(dn)
    _embed_and_norm[(cdiv(b * length, NORM_ROWS),)](
        *_padded(keys), *_padded(tables), rstd if position is None else position, rstd, dn, dh, b * length, length,
        width, 0.0, BACKWARD=True, **_norm_sizes(tables, position),
    )  # fmt: skip
    return dh


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `MAX_TABLES` tensors, the first repeated in place of absent ones; no rows of absent tables are read."""
    return [*tensors, *[tensors[0]] * (MAX_TABLES - len(tensors))]


def _norm_sizes(tables: Sequence[Tensor], position: Tensor | None) -> dict[str, int | bool]:
    width = tables[0].shape[1]
    columns = min(NORM_COLUMNS, next_power_of_2(width))
    return {
        "TABLES": len(tables),
        "POSITION": position is not None,
        "ROWS": NORM_ROWS,
        "C": columns,
        "N": cdiv(width, columns),
        "num_warps": NORM_WARPS,
    }


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


@triton.jit
def _embed_and_norm(
    keys_0, keys_1, keys_2, keys_3, table_0, table_1, table_2, table_3, position, rstd, n, out, rows, length, width,
    eps, BACKWARD: tl.constexpr, TABLES: tl.constexpr, POSITION: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Forward: write x·r to ``out``. Backward: ``n`` holds the gradient g of x·r; write r·(g − x·r·mean(g·x·r))."""
    col = tl.arange(0, C)
    top = tl.program_id(0) * ROWS
    for row in range(top, tl.minimum(top + ROWS, rows)):
        at_0 = table_0 + tl.load(keys_0 + row).to(tl.int64) * width
        at_1 = table_1 + tl.load(keys_1 + row).to(tl.int64) * width
        at_2 = table_2 + tl.load(keys_2 + row).to(tl.int64) * width
        at_3 = table_3 + tl.load(keys_3 + row).to(tl.int64) * width
        at_position = position + (row % length) * width
        to = row * width.to(tl.int64)
        parts = ()
        squares = tl.zeros([C], tl.float32)
        for i in tl.static_range(N):
            column = i * C + col
            inside = column < width
            x = tl.load(at_0 + column, mask=inside, other=0).to(tl.float32)
            if TABLES > 1:
                x += tl.load(at_1 + column, mask=inside, other=0).to(tl.float32)
            if TABLES > 2:
                x += tl.load(at_2 + column, mask=inside, other=0).to(tl.float32)
            if TABLES > 3:
                x += tl.load(at_3 + column, mask=inside, other=0).to(tl.float32)
            if POSITION:
                x += tl.load(at_position + column, mask=inside, other=0).to(tl.float32)
            parts = parts + (x,)  # noqa: RUF005  (Triton cannot unpack)
            squares += x * x
        if BACKWARD:
            r = tl.load(rstd + row)
            grads = ()
            dots = tl.zeros([C], tl.float32)
            for i in tl.static_range(N):
                g = tl.load(n + to + i * C + col, mask=i * C + col < width, other=0).to(tl.float32)
                grads = grads + (g,)  # noqa: RUF005
                dots += g * parts[i]
            mean_dot = tl.sum(dots, 0) * r / width
            for i in tl.static_range(N):
                d = r * (grads[i] - parts[i] * (r * mean_dot))
                tl.store(out + to + i * C + col, d.to(out.dtype.element_ty), mask=i * C + col < width)
        else:
            r = tl.rsqrt(tl.sum(squares, 0) / width + eps)
            tl.store(rstd + row, r)
            for i in tl.static_range(N):
                tl.store(out + to + i * C + col, (parts[i] * r).to(out.dtype.element_ty), mask=i * C + col < width)
