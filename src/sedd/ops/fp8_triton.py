"""What `eighths` are made of, in Triton: a program reads whole rows, and knows the largest entry before it writes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.ops.fp8 import LARGEST, LEAST, Fp8Tensor
from sedd.ops.rotary_triton import BENDS, _bent
from sedd.runtime.device import cdiv, next_power_of_2

# mypy: disable-error-code=assignment

COLUMNS = 1024
"""Rows are read in parts of so many entries at most."""
STRIP, WARPS = 4, 4
"""Rows a program, and its warps."""


def empty(x: Tensor) -> Fp8Tensor:
    """Room for those of a matrix."""
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return Fp8Tensor(values, x.new_empty(len(x), 1, dtype=torch.float32))


def _sizes(width: int) -> dict[str, float]:
    columns = min(COLUMNS, next_power_of_2(width))
    return {"LARGEST": LARGEST, "LEAST": LEAST, "C": columns, "N": cdiv(width, columns)}


def press(x: Tensor) -> Fp8Tensor:
    """See `eighths.eighths`."""
    m, k = x.shape
    out = empty(x)
    _press[(cdiv(m, STRIP),)](x.contiguous(), *out, m, k, **_sizes(k), BEND=-1, STRIP=STRIP, num_warps=WARPS)
    return out


def bend(z: Tensor, kind: str) -> Fp8Tensor:
    """The eighths of what `strips.bend` gives, before that is rounded."""
    m, k = z.shape
    out = empty(z)
    _press[(cdiv(m, STRIP),)](z, *out, m, k, **_sizes(k), BEND=BENDS[kind], STRIP=STRIP, num_warps=WARPS)
    return out


@triton.jit
def _press(
    x, values, scale, m, width, LARGEST: tl.constexpr, LEAST: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    BEND: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, C)
    top = tl.program_id(0) * STRIP
    for row in range(top, tl.minimum(top + STRIP, m)):
        at = row * width.to(tl.int64) + col
        parts = ()
        high = tl.full([C], LEAST, tl.float32)
        for i in tl.static_range(N):
            each = tl.load(x + at + i * C, mask=i * C + col < width, other=0).to(tl.float32)
            if BEND >= 0:
                each, _ = _bent(each, BEND)
            parts = parts + (each,)  # noqa: RUF005  (the compiler knows no other way)
            high = tl.maximum(high, tl.abs(each))
        most = tl.max(high, 0)
        tl.store(scale + row, most / LARGEST)
        for i in tl.static_range(N):
            pressed = (parts[i] * (LARGEST / most)).to(values.dtype.element_ty)
            tl.store(values + at + i * C, pressed, mask=i * C + col < width)
