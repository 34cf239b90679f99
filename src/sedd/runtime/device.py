"""Device capability, and the sizes of kernel launches."""

import functools
import importlib.util

import torch

TRITON_CAPABILITY = (8, 0)
"""Least CUDA compute capability that the Triton kernels support."""
FP8_CAPABILITY = (8, 9)
"""Least CUDA compute capability with float8 matrix products."""


@functools.cache
def has_triton() -> bool:
    """Return whether Triton kernels can run: Triton is installed and the GPU supports them."""
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= TRITON_CAPABILITY


def has_fp8() -> bool:
    """Return whether the GPU also has float8 matrix products."""
    return has_triton() and torch.cuda.get_device_capability() >= FP8_CAPABILITY


# Triton has both of these, but there each call takes as long as a kernel launch.


def cdiv(a: int, b: int) -> int:
    """Divide and round up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of 2 that is at least ``n``."""
    return 1 << (n - 1).bit_length()
