"""The weights of a network on disk: hashed as they are loaded, packed for sharing, and described by their header.

The header is read without torch.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError, safe_open

from sedd.training import checkpoint
from sedd.training.config import check_choice

if TYPE_CHECKING:
    from torch import Tensor

BUFFERS = ("inv_freq",)
"""Last parts of the names in a weights file that are not parameters."""
SCALE_SUFFIX = "_scale"
"""Ends the name of the scales of an int8 matrix, after the name of the matrix, which is there too."""
WEIGHT_DTYPES = ("int8", "bfloat16", "float32")
"""The forms in which weights are stored for sharing."""
DTYPE_NAMES = {"I8": "int8", "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Dtypes by their names in a .safetensors file."""


def pack_weights(weights: "Mapping[str, Tensor]", dtype: str) -> "dict[str, Tensor]":
    """Return weights in the form in which they are stored for sharing; `load_weights` reads it.

    Args:
        dtype: ``int8``: matrices in int8 with float32 scales, everything else, which is little, in float32;
            ``bfloat16`` or ``float32``: every parameter in that dtype.
    """
    import torch

    from sedd.ops.int8 import quantize_int8

    check_choice("dtype", dtype, WEIGHT_DTYPES)
    packed: dict[str, Tensor] = {}
    if name := checkpoint.nonfinite(weights):
        raise ValueError(f"weight {name} is not finite; its training diverged: take another checkpoint")
    for name, value in weights.items():
        is_buffer = name.rpartition(".")[2] in BUFFERS
        if dtype == "int8" and value.ndim == 2:
            packed[name], packed[name + SCALE_SUFFIX] = quantize_int8(value.float())
        else:
            packed[name] = value.to(torch.bfloat16 if dtype == "bfloat16" and not is_buffer else torch.float32)
    return packed


class HashedWeights(NamedTuple):
    """The weights of a network, and the SHA-256 hash of the file they were loaded from."""

    tensors: "dict[str, Tensor]"
    sha256: str


def load_weights(folder: Path, stem: str) -> HashedWeights:
    """Load and hash the weights of a network; those stored as int8 come back in float32."""
    import torch

    from sedd.ops.int8 import Int8Tensor, dequantize_int8

    path = folder / f"{stem}.safetensors"
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    with file:  # open, it is one file, whatever happens to its name meanwhile
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        stored = checkpoint.read_tensors(path, Path(f"/dev/fd/{file.fileno()}"))
    weights = dict(stored)
    for name, values in stored.items():
        if values.dtype == torch.int8:
            scale = weights.pop(name + SCALE_SUFFIX, None)
            if scale is None or scale.shape != (*values.shape[:-1], 1):
                shape = "are missing" if scale is None else f"have shape {tuple(scale.shape)}"
                raise ValueError(
                    f"{folder / stem}.safetensors: {name} is int8 of shape {tuple(values.shape)}, and its scales "
                    f"{shape}; there must be one per row: export the model again"
                )
            weights[name] = dequantize_int8(Int8Tensor(values, scale))
    return HashedWeights(weights, sha256)


class StoredWeights(NamedTuple):
    """What the header of a .safetensors file says about the weights of a network."""

    parameters: int
    dtype: str
    """int8, bfloat16 or float32: that of most parameters."""
    bytes: int
    """Size of the file."""


def read_header(folder: Path, stem: str = "ema") -> StoredWeights:
    """Read how weights are stored, without loading them."""
    path, counts = folder / f"{stem}.safetensors", Counter[str]()
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            for name, found in slices.items():
                is_scale = name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in slices
                if name.rpartition(".")[2] not in BUFFERS and not is_scale:
                    counts[found.get_dtype()] += math.prod(found.get_shape())
        size = path.stat().st_size
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    most = max(counts, key=counts.__getitem__, default="F32")
    return StoredWeights(counts.total(), DTYPE_NAMES.get(most, most), size)
