"""Device capability, and the sizes of kernel launches."""

import functools
import importlib.util
import os

import torch

TRITON_CAPABILITY = (8, 0)
"""Least CUDA compute capability that the Triton kernels support."""
FP8_CAPABILITY = (8, 9)
"""Least CUDA compute capability with float8 matrix products."""


def resolve_device(name: str | None) -> torch.device:
    """Return the device called ``name``, by default the GPU of this process if there is one, else the CPU.

    Args:
        name: cpu, cuda, cuda:N, or mps; of several processes, cuda is a GPU for each.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device is {name!r}; choose one of cpu, cuda, cuda:N, mps") from None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    count = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }.get(device.type)
    if count is None:
        raise ValueError(f"device is {name!r}; choose one of cpu, cuda, cuda:N, mps")
    if (device.index or 0) >= count:
        found = f"{count} such device{'s' * (count > 1)}" if count else "none"
        raise ValueError(f"device is {device}, and torch finds {found}; choose another, or leave it out")
    return device


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
