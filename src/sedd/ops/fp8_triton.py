"""Triton kernels that quantize rows to float8: a program reads whole rows, so their maximum is known when it writes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.ops.activation_triton import ACTIVATION_IDS, activation_and_slope
from sedd.ops.fp8 import FP8_MAX, MIN_ABS_MAX, Fp8Tensor
from sedd.runtime.device import cdiv, next_power_of_2

# mypy: disable-error-code=assignment

COLUMNS = 1024
"""Entries of a row per load, at most."""
ROWS, WARPS = 4, 4
"""Rows and warps per program."""
NO_ACTIVATION = -1


def empty_rowwise(x: Tensor) -> Fp8Tensor:
    """Allocate the quantized form of a matrix."""
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return Fp8Tensor(values, x.new_empty(len(x), 1, dtype=torch.float32))


def quantize(x: Tensor) -> Fp8Tensor:
    """Quantize rows; see `fp8.quantize_rowwise`."""
    return _launch(x.contiguous(), NO_ACTIVATION)


def activate_and_quantize(z: Tensor, activation: str) -> Fp8Tensor:
    """Apply an activation and quantize its rows, without rounding in between."""
    return _launch(z, ACTIVATION_IDS[activation])


def _launch(x: Tensor, activation: int) -> Fp8Tensor:
    m, k = x.shape
    out = empty_rowwise(x)
    columns = min(COLUMNS, next_power_of_2(k))
    _quantize[(cdiv(m, ROWS),)](
        x, *out, m, k, FP8_MAX=FP8_MAX, MIN_ABS_MAX=MIN_ABS_MAX, C=columns, N=cdiv(k, columns),
        ACTIVATION=activation, ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _quantize(
    x, values, scale, m, width, FP8_MAX: tl.constexpr, MIN_ABS_MAX: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, C)
    top = tl.program_id(0) * ROWS
    for row in range(top, tl.minimum(top + ROWS, m)):
        at = row * width.to(tl.int64) + col
        parts = ()
        highest = tl.full([C], MIN_ABS_MAX, tl.float32)
        for i in tl.static_range(N):
            part = tl.load(x + at + i * C, mask=i * C + col < width, other=0).to(tl.float32)
            if ACTIVATION >= 0:
                part, _ = activation_and_slope(part, ACTIVATION)
            parts = parts + (part,)  # noqa: RUF005  (Triton cannot unpack)
            highest = tl.maximum(highest, tl.abs(part))
        abs_max = tl.max(highest, 0)
        tl.store(scale + row, abs_max / FP8_MAX)
        for i in tl.static_range(N):
            quantized = (parts[i] * (FP8_MAX / abs_max)).to(values.dtype.element_ty)
            tl.store(values + at + i * C, quantized, mask=i * C + col < width)
