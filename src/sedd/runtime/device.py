"""What the graphics card can do, asked once."""

import functools
import importlib.util

import torch

LEAST = (8, 0)
"""The compute capability from which Triton compiles what we write."""


EIGHTHS = (8, 9)
"""That from which it multiplies in float8."""


@functools.cache
def has_triton() -> bool:
    """Whether kernels in Triton can run: it is installed, and the card is not too old for it."""
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= LEAST


def has_eighths() -> bool:
    """Whether it also multiplies in float8."""
    return has_triton() and torch.cuda.get_device_capability() >= EIGHTHS
