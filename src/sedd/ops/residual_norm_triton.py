"""Triton kernels of residual + dropout + norm + adaLN modulation, forward and backward. Arithmetic is in float32.

    s = x + gate·dropout(y + y_bias)
    n = norm(s)·(1 + scale) + shift

A row belongs to one warp where it fits, so that its sums need no synchronization. A program computes some rows of one
sequence; partial sums of the backward pass are added up without atomics, so the same bits come out every time.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sedd.ops.block_ops import dropout_threshold
from sedd.ops.fp8 import FP8_MAX, MIN_ABS_MAX, Fp8Tensor
from sedd.runtime.device import cdiv, next_power_of_2

# mypy: disable-error-code=assignment

COLUMNS = 256  # entries of a row per load and warp
FORWARD_ROWS, FORWARD_STAGES = 8, 2  # rows per program and pipeline stages of the forward pass
BACKWARD_ROWS, BACKWARD_STAGES = 64, 2  # the same of the backward pass
FORWARD_LOADS, BACKWARD_LOADS = 4, 3
"""Loads of a row that fit into the registers of a warp; longer rows take more warps."""
SUM_ROWS, SUM_COLUMNS = 16, 128  # partial sums and columns per load of the kernel that adds them up


class ResidualNormConfig(NamedTuple):
    """The operation without its tensors."""

    eps: float
    centred: bool  # whether the norm subtracts the mean (layer norm) or not (RMS norm)
    dropout: float
    length: int  # rows per sequence, or the most that a sequence may have, for packed tokens


class ResidualNormInputs(NamedTuple):
    """The tensors of the operation beside the residual stream."""

    y: Tensor | None
    y_bias: Tensor | None
    gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    shift: Tensor | None
    scale: Tensor | None
    seed: Tensor | None
    cu_seqlens: Tensor | None  # cumulative numbers of rows per sequence, for packed tokens

    def sequences(self, x: Tensor) -> int:
        return len(x) if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def flags(self, dropout: bool) -> dict[str, bool]:
        """Return which of the inputs are present, as compile-time constants of the kernels."""
        names = {
            "Y": self.y,
            "Y_BIAS": self.y_bias,
            "GATE": self.gate,
            "WEIGHT": self.weight,
            "BIAS": self.bias,
            "MODULATE": self.scale,
            "PACKED": self.cu_seqlens,
        }
        return {name: part is not None for name, part in names.items()} | {"DROPOUT": dropout and self.seed is not None}

    def pointers(self, unused: Tensor) -> list[Tensor]:
        """Return all inputs, with ``unused`` for those that are absent and never read."""
        return [unused if part is None else part for part in self]

    def strides(self) -> tuple[int, int]:
        """Return the strides over sequences of the gate and of the modulation, which are views of wider tables."""
        if self.shift is not None and self.scale is not None and self.shift.stride() != self.scale.stride():
            raise ValueError(
                f"shift has strides {self.shift.stride()} and scale {self.scale.stride()}; they must be equal"
            )
        return 0 if self.gate is None else self.gate.stride(0), 0 if self.scale is None else self.scale.stride(0)


@functools.cache
def _sizes(width: int, max_loads: int) -> dict[str, Any]:
    """Return how a row is split into loads, and the number of warps."""
    columns, warps = min(COLUMNS, next_power_of_2(width)), 1
    while cdiv(width, columns) > max_loads * warps:
        warps *= 2
    columns *= warps
    return {"C": columns, "N": cdiv(width, columns), "WHOLE": width % columns == 0, "num_warps": warps}


def residual_norm_forward(
    x: Tensor,
    inputs: ResidualNormInputs,
    config: ResidualNormConfig,
    dtype: torch.dtype,
    n_fp8: Fp8Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return s, n in ``dtype``, and the mean and 1/√(variance + eps) of every row of s.

    n is also quantized before it is rounded, into ``n_fp8``.
    """
    b, length, width = inputs.sequences(x), config.length, x.shape[-1]
    total = x if inputs.y is None else torch.empty_like(x)
    n = torch.empty_like(x, dtype=dtype)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    rows = FORWARD_ROWS if b * length >= 2**15 else 4 if b * length >= 2**12 else 1
    _residual_norm_forward[(cdiv(length, rows), b)](
        x, *inputs.pointers(x), total, n, mean, rstd, *(n_fp8 or (n, mean)), length, width, *inputs.strides(),
        dropout_threshold(config.dropout), 1 / (1 - config.dropout), config.eps, FP8_MAX=FP8_MAX,
        MIN_ABS_MAX=MIN_ABS_MAX, USE_FP8=n_fp8 is not None, ROWS=rows, STAGES=FORWARD_STAGES, CENTRED=config.centred,
        **inputs.flags(config.dropout > 0), **_sizes(width, FORWARD_LOADS),
    )  # fmt: skip
    return total, n, mean, rstd


_SUMMED = ("Y_BIAS", "GATE", "WEIGHT", "BIAS", "MODULATE")  # inputs whose gradients are sums over rows


class ResidualNormGrads(NamedTuple):
    """Gradients of the residual stream, the branch and all other inputs; undefined for absent inputs."""

    dx: Tensor
    dy: Tensor | None
    shift: Tensor
    scale: Tensor
    gate: Tensor
    weight: Tensor
    bias: Tensor
    y_bias: Tensor


def residual_norm_backward(
    total: Tensor,
    inputs: ResidualNormInputs,
    config: ResidualNormConfig,
    mean: Tensor,
    rstd: Tensor,
    dn: Tensor,
    d_total: Tensor | None,
) -> ResidualNormGrads:
    """Return the gradients of the inputs, given those of n and, if it was used otherwise, of s.

    Without gate and dropout, the gradients of branch and residual stream are one tensor.
    """
    b, length, width = inputs.sequences(total), config.length, total.shape[-1]
    programs, flags = cdiv(length, BACKWARD_ROWS), inputs.flags(config.dropout > 0)
    sum_flags = {name: flags[name] for name in _SUMMED}
    has_sums = any(sum_flags.values())
    dx, dy = torch.empty_like(total), None
    if inputs.y is not None:
        is_shared = not flags["GATE"] and not flags["DROPOUT"] and inputs.y.dtype == total.dtype
        dy = dx if is_shared else torch.empty_like(inputs.y)
    sums = total.new_empty(4, b, programs, width, dtype=torch.float32) if has_sums else mean
    _residual_norm_backward[(programs, b)](
        total, *inputs.pointers(total), mean, rstd, dn, total if d_total is None else d_total.contiguous(), dx,
        dx if dy is None else dy, sums, length, width, *inputs.strides(), sums.stride(0),
        dropout_threshold(config.dropout), 1 / (1 - config.dropout), ROWS=BACKWARD_ROWS, STAGES=BACKWARD_STAGES,
        CENTRED=config.centred, **flags, HAS_D_TOTAL=d_total is not None, STORE_DY=dy is not None and dy is not dx,
        SUMS=has_sums, **_sizes(width, BACKWARD_LOADS),
    )  # fmt: skip
    if not has_sums:
        return ResidualNormGrads(dx, dy, *mean.new_empty(6, 0))
    grads = total.new_empty(6, b, width, dtype=torch.float32)
    _, y_bias, gate, weight, bias, _, scale, *_ = inputs.pointers(total)
    _sum_partial_grads[(b, cdiv(width, SUM_COLUMNS))](
        sums, y_bias, gate, weight, bias, scale, grads, programs, width, *inputs.strides(), sums.stride(0),
        grads.stride(0), **sum_flags, R=SUM_ROWS, C=SUM_COLUMNS, num_warps=4,
    )  # fmt: skip
    return ResidualNormGrads(dx, dy, *grads[:3], *grads[3:].sum(1))


@triton.jit
def _sum_partial_grads(
    sums, y_bias, gate, weight, bias, scale, grads, programs, width, gate_stride, modulation_stride, sums_stride,
    grads_stride, Y_BIAS: tl.constexpr, GATE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    MODULATE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of a sequence into its gradients and its part of those of weight and biases."""
    b = tl.program_id(0)
    col = tl.program_id(1) * C + tl.arange(0, C)
    inside = col < width
    by_scale = tl.zeros([R, C], tl.float32)
    by_shift = tl.zeros([R, C], tl.float32)
    by_gate = tl.zeros([R, C], tl.float32)
    by_y = tl.zeros([R, C], tl.float32)
    for start in range(0, programs, R):
        program = start + tl.arange(0, R)
        mask = (program < programs)[:, None] & inside[None, :]
        at = sums + (b * programs + program).to(tl.int64)[:, None] * width + col[None, :]
        by_scale += tl.load(at, mask=mask, other=0)
        by_shift += tl.load(at + sums_stride, mask=mask, other=0)
        by_gate += tl.load(at + 2 * sums_stride, mask=mask, other=0)
        by_y += tl.load(at + 3 * sums_stride, mask=mask, other=0)
    sum_scale, sum_shift, sum_y = tl.sum(by_scale, 0), tl.sum(by_shift, 0), tl.sum(by_y, 0)
    d_scale, d_gate = sum_scale, tl.sum(by_gate, 0)
    if WEIGHT:
        d_scale *= tl.load(weight + col, mask=inside, other=0)
    if BIAS:
        d_scale += sum_shift * tl.load(bias + col, mask=inside, other=0)
    if Y_BIAS:
        d_gate += sum_y * tl.load(y_bias + col, mask=inside, other=0)
    times = tl.full([C], 1.0, tl.float32)
    if MODULATE:
        times += tl.load(scale + b * modulation_stride + col, mask=inside, other=0)
    gated = tl.full([C], 1.0, tl.float32)
    if GATE:
        gated = tl.load(gate + b * gate_stride + col, mask=inside, other=0).to(tl.float32)
    to = grads + b * width + col
    tl.store(to, sum_shift, mask=inside)
    tl.store(to + grads_stride, d_scale, mask=inside)
    tl.store(to + 2 * grads_stride, d_gate, mask=inside)
    tl.store(to + 3 * grads_stride, times * sum_scale, mask=inside)
    tl.store(to + 4 * grads_stride, times * sum_shift, mask=inside)
    tl.store(to + 5 * grads_stride, gated * sum_y, mask=inside)


@triton.jit
def _hash32(h):
    """See `block_ops._hash32`."""
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0xD35A2D97
    return h ^ (h >> 15)


@triton.jit
def _seeds(seed):
    """Return the two hashed words of a dropout seed."""
    first = _hash32(tl.load(seed + tl.arange(0, 1)).to(tl.uint32))
    return first, _hash32(tl.load(seed + 1 + tl.arange(0, 1)).to(tl.uint32) ^ first)


@triton.jit
def _keep(index, first, second, threshold):
    """Return which entries to keep; see `block_ops.dropout_mask`."""
    h = index.to(tl.uint32) * 0x9E3779B9 + first
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15) ^ second) * 0xD35A2D97
    return (h ^ (h >> 15)) >= threshold.to(tl.uint32)


@triton.jit
def _rows(cu_seqlens, length, PACKED: tl.constexpr, ROWS: tl.constexpr):
    """Return the first row of a program and the one after its last."""
    begin = tl.program_id(1).to(tl.int64) * length
    end = begin + length
    if PACKED:
        begin = tl.load(cu_seqlens + tl.program_id(1))
        end = tl.load(cu_seqlens + tl.program_id(1) + 1)
    top = begin + tl.program_id(0) * ROWS
    return top, tl.minimum(top + ROWS, end)


@triton.jit
def _inside(i: tl.constexpr, width, WHOLE: tl.constexpr, C: tl.constexpr):
    """Return the mask of load i of a row."""
    inside = tl.full([C], 1, tl.int1)
    if not WHOLE:
        inside = i * C + tl.arange(0, C) < width
    return inside


@triton.jit
def _residual_norm_forward(
    x, y, y_bias, gate, weight, bias, shift, scale, seed, cu_seqlens, total, n, mean, rstd, fp8_values, fp8_scale,
    length, width, gate_stride, modulation_stride, threshold, inv_keep, eps, FP8_MAX: tl.constexpr,
    MIN_ABS_MAX: tl.constexpr, USE_FP8: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
    CENTRED: tl.constexpr, Y: tl.constexpr, Y_BIAS: tl.constexpr, GATE: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, MODULATE: tl.constexpr, DROPOUT: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    col = tl.arange(0, C)
    y_biases = ()
    gates = ()
    factors = ()
    offsets = ()
    for i in tl.static_range(N):
        inside = _inside(i, width, WHOLE, C)
        y_bias_i = tl.zeros([C], tl.float32)
        if Y_BIAS:
            y_bias_i += tl.load(y_bias + i * C + col, mask=inside, other=0)
        gated = tl.full([C], 1.0, tl.float32)
        if GATE:
            gated = tl.load(gate + b * gate_stride + i * C + col, mask=inside, other=0).to(tl.float32)
        factor = tl.full([C], 1.0, tl.float32)
        if WEIGHT:
            factor = tl.load(weight + i * C + col, mask=inside, other=0).to(tl.float32)
        offset = tl.zeros([C], tl.float32)
        if BIAS:
            offset += tl.load(bias + i * C + col, mask=inside, other=0)
        if MODULATE:
            times = 1 + tl.load(scale + b * modulation_stride + i * C + col, mask=inside, other=0)
            offset = offset * times + tl.load(shift + b * modulation_stride + i * C + col, mask=inside, other=0)
            factor *= times
        y_biases = y_biases + (y_bias_i,)  # noqa: RUF005  (Triton cannot unpack)
        gates = gates + (gated,)  # noqa: RUF005
        factors = factors + (factor,)  # noqa: RUF005
        offsets = offsets + (offset,)  # noqa: RUF005
    if DROPOUT:
        first, second = _seeds(seed)
    top, bottom = _rows(cu_seqlens, length, PACKED, ROWS)
    for row in tl.range(top, bottom, num_stages=STAGES):
        parts = ()
        sums = tl.zeros([C], tl.float32)
        for i in tl.static_range(N):
            inside = _inside(i, width, WHOLE, C)
            at = row * width + i * C + col
            s = tl.load(x + at, mask=inside, other=0).to(tl.float32)
            if Y:
                a = tl.load(y + at, mask=inside, other=0).to(tl.float32)
                if Y_BIAS:
                    a += y_biases[i]
                if DROPOUT:
                    a = tl.where(_keep(at, first, second, threshold), a * inv_keep, 0.0)
                if GATE:
                    a *= gates[i]
                s = (s + a).to(total.dtype.element_ty)  # normalize the rounded sum, which is what is stored
                tl.store(total + at, s, mask=inside)
                s = s.to(tl.float32)
                if Y_BIAS and not WHOLE:
                    s = tl.where(inside, s, 0.0)
            parts = parts + (s,)  # noqa: RUF005
            sums += s
        mean_r = tl.full([], 0.0, tl.float32)
        if CENTRED:
            mean_r = tl.sum(sums, 0) / width
            tl.store(mean + row, mean_r)
        squares = tl.zeros([C], tl.float32)
        for i in tl.static_range(N):
            d = parts[i] - mean_r
            if CENTRED and not WHOLE:
                d = tl.where(_inside(i, width, WHOLE, C), d, 0.0)
            squares += d * d
        r = tl.rsqrt(tl.sum(squares, 0) / width + eps)
        tl.store(rstd + row, r)
        normed = ()
        highest = tl.full([C], MIN_ABS_MAX, tl.float32)
        for i in tl.static_range(N):
            inside = _inside(i, width, WHOLE, C)
            value = (parts[i] - mean_r) * r * factors[i] + offsets[i]
            tl.store(n + row * width + i * C + col, value.to(n.dtype.element_ty), mask=inside)
            if USE_FP8:
                normed = normed + (value,)  # noqa: RUF005
                highest = tl.maximum(highest, tl.where(inside, tl.abs(value), 0.0))
        if USE_FP8:
            abs_max = tl.max(highest, 0)
            tl.store(fp8_scale + row, abs_max / FP8_MAX)
            for i in tl.static_range(N):
                n_fp8 = (normed[i] * (FP8_MAX / abs_max)).to(fp8_values.dtype.element_ty)
                tl.store(fp8_values + row * width + i * C + col, n_fp8, mask=_inside(i, width, WHOLE, C))


@triton.jit
def _residual_norm_backward(
    total, y, y_bias, gate, weight, bias, shift, scale, seed, cu_seqlens, mean, rstd, dn, d_total, dx, dy, sums, length,
    width, gate_stride, modulation_stride, sums_stride, threshold, inv_keep, ROWS: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, CENTRED: tl.constexpr, Y: tl.constexpr, Y_BIAS: tl.constexpr, GATE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, MODULATE: tl.constexpr, DROPOUT: tl.constexpr, HAS_D_TOTAL: tl.constexpr,
    STORE_DY: tl.constexpr, SUMS: tl.constexpr, C: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    col = tl.arange(0, C)
    factors = ()
    gates = ()
    by_scale = ()
    by_shift = ()
    by_gate = ()
    by_y = ()
    for i in tl.static_range(N):
        inside = _inside(i, width, WHOLE, C)
        factor = tl.full([C], 1.0, tl.float32)
        if WEIGHT:
            factor = tl.load(weight + i * C + col, mask=inside, other=0).to(tl.float32)
        if MODULATE:
            factor *= 1 + tl.load(scale + b * modulation_stride + i * C + col, mask=inside, other=0)
        gated = tl.full([C], 1.0, tl.float32)
        if GATE:
            gated = tl.load(gate + b * gate_stride + i * C + col, mask=inside, other=0).to(tl.float32)
        factors = factors + (factor,)  # noqa: RUF005
        gates = gates + (gated,)  # noqa: RUF005
        by_scale = by_scale + (tl.zeros([C], tl.float32),)  # noqa: RUF005
        by_shift = by_shift + (tl.zeros([C], tl.float32),)  # noqa: RUF005
        by_gate = by_gate + (tl.zeros([C], tl.float32),)  # noqa: RUF005
        by_y = by_y + (tl.zeros([C], tl.float32),)  # noqa: RUF005
    if DROPOUT:
        first, second = _seeds(seed)
    top, bottom = _rows(cu_seqlens, length, PACKED, ROWS)
    for row in tl.range(top, bottom, num_stages=STAGES):
        r = tl.load(rstd + row)
        mean_r = tl.full([], 0.0, tl.float32)
        if CENTRED:
            mean_r = tl.load(mean + row)
        normed = ()
        d_normed = ()
        scaled = ()
        shifted = ()
        dots = tl.zeros([C], tl.float32)
        grads_sum = tl.zeros([C], tl.float32)
        for i in tl.static_range(N):
            inside = _inside(i, width, WHOLE, C)
            at = row * width + i * C + col
            d = (tl.load(total + at, mask=inside, other=0).to(tl.float32) - mean_r) * r
            dn_i = tl.load(dn + at, mask=inside, other=0).to(tl.float32)
            scaled = scaled + (by_scale[i] + dn_i * d,)  # noqa: RUF005
            shifted = shifted + (by_shift[i] + dn_i,)  # noqa: RUF005
            dn_i *= factors[i]
            dots += dn_i * d
            grads_sum += dn_i
            normed = normed + (d,)  # noqa: RUF005
            d_normed = d_normed + (dn_i,)  # noqa: RUF005
        by_scale = scaled
        by_shift = shifted
        mean_dot = tl.sum(dots, 0) / width
        mean_grad = tl.full([], 0.0, tl.float32)
        if CENTRED:
            mean_grad = tl.sum(grads_sum, 0) / width
        gated_sums = ()
        y_sums = ()
        for i in tl.static_range(N):
            inside = _inside(i, width, WHOLE, C)
            at = row * width + i * C + col
            v = (d_normed[i] - normed[i] * mean_dot - mean_grad) * r
            if HAS_D_TOTAL:
                v += tl.load(d_total + at, mask=inside, other=0).to(tl.float32)
            tl.store(dx + at, v.to(dx.dtype.element_ty), mask=inside)
            if Y:
                if DROPOUT:
                    v = tl.where(_keep(at, first, second, threshold), v * inv_keep, 0.0)
                if GATE:
                    a = tl.load(y + at, mask=inside, other=0).to(tl.float32)
                    gated_sums = gated_sums + (by_gate[i] + v * a,)  # noqa: RUF005
                if Y_BIAS:
                    y_sums = y_sums + (by_y[i] + v,)  # noqa: RUF005
                if STORE_DY:
                    tl.store(dy + at, (v * gates[i]).to(dy.dtype.element_ty), mask=inside)
        if Y and GATE:
            by_gate = gated_sums
        if Y and Y_BIAS:
            by_y = y_sums
    if SUMS:
        for i in tl.static_range(N):
            inside = _inside(i, width, WHOLE, C)
            out = sums + (b * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * width + i * C + col
            tl.store(out, by_scale[i], mask=inside)
            tl.store(out + sums_stride, by_shift[i], mask=inside)
            tl.store(out + 2 * sums_stride, by_gate[i], mask=inside)
            tl.store(out + 3 * sums_stride, by_y[i], mask=inside)
