"""Int8 weights on disk: rounded to nearest, symmetric, one scale per row; nothing is calibrated on data."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int8
from torch import Tensor


class Int8Tensor(NamedTuple):
    """A quantized matrix: values·scale, with one scale per row."""

    values: Int8[Tensor, "m k"]
    scale: Float[Tensor, "m 1"]


def quantize_int8(weight: Float[Tensor, "m k"]) -> Int8Tensor:
    """Round each row to the nearest multiples of its scale: q = round(w/s), s = max |w|/127, so |w − s·q| ≤ s/2."""
    scale = (weight.abs().amax(-1, keepdim=True).double() / 127).float()
    scale = torch.where(scale > 0, scale, 1.0)  # a row of zeros
    return Int8Tensor((weight.double() / scale.double()).round().to(torch.int8), scale)
