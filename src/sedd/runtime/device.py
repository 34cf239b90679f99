"""Device capability, and the sizes of kernel launches."""

import functools
import importlib.util
import os

import torch

TRITON_CAPABILITY = (8, 0)  # least CUDA compute capability that the Triton kernels support


def resolve_device(name: str | None) -> torch.device:
    """Return the device cpu, cuda (a GPU for each process), cuda:N or mps; by default a GPU if there is one."""
    has_cuda = torch.cuda.is_available()
    counts = {"cpu": 1, "cuda": has_cuda * torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    try:
        device = torch.device(name or ("cuda" if has_cuda else "cpu"))
        count = counts[device.type]
    except (RuntimeError, KeyError):
        raise ValueError(f"device is {name!r}; choose one of cpu, cuda, cuda:N, mps") from None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
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


# Triton has both of these, but there each call takes as long as a kernel launch.
def cdiv(a: int, b: int) -> int:
    """Divide and round up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of 2 that is at least ``n``."""
    return 1 << (n - 1).bit_length()
