"""Floating-point precision: what is computed in float32 or better, and the compute dtype of mixed precision."""

import torch
from jaxtyping import Float
from torch import Tensor


def upcast_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half precision, and any wider dtype unchanged."""
    return torch.promote_types(dtype, torch.float32)


def upcast(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Convert half precision to float32, the least precision of norms, losses and scores."""
    return x.to(upcast_dtype(x.dtype))


def compute_dtype(weight: Float[Tensor, "*s"]) -> torch.dtype:
    """Return the dtype of matrix products with ``weight``: autocast's where it is enabled, else the weight's own."""
    device = weight.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype
