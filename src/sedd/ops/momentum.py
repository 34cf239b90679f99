"""The elementwise halves of a Muon step: Nesterov momentum, and the update of the weights."""

import torch
from torch import Tensor

from sedd.runtime import device as devices


def uses_kernel(tensors: list[Tensor]) -> bool:
    """Return whether the kernels cover these tensors: float32, contiguous, on a GPU."""
    return all(a.is_cuda and a.dtype == torch.float32 and a.is_contiguous() for a in tensors) and devices.has_triton()


def nesterov_momentum(
    gradients: list[Tensor], averages: list[Tensor], momentum: float, found_inf: Tensor, dtype: torch.dtype
) -> Tensor:
    """Set a ← μa + (1 − μ)g for every gradient g and its average a, and return all μa + (1 − μ)g, stacked.

    The tensors have one shape. If ``found_inf`` is 1, gradients are not read and averages stay as they are.
    """
    if uses_kernel([*gradients, *averages]):
        from sedd.ops import momentum_triton

        return momentum_triton.nesterov_momentum_triton(gradients, averages, momentum, found_inf, dtype)
    average = torch.stack(averages)
    gradient = torch.where(found_inf.bool(), average, torch.stack(gradients))
    average.lerp_(gradient, 1 - momentum)
    torch._foreach_copy_(averages, list(average.unbind()))
    return gradient.lerp_(average, momentum).to(dtype)


def apply_updates(weights: list[Tensor], updates: Tensor, rate: float, decay: float, found_inf: Tensor) -> None:
    """Set w ← (1 − decay)·w − rate·u for every weight w and its update u, in place, unless ``found_inf`` is 1."""
    if uses_kernel(weights):
        from sedd.ops import momentum_triton

        momentum_triton.apply_updates_triton(weights, updates, rate, decay, found_inf)
        return
    kept = 1 - found_inf
    torch._foreach_mul_(weights, 1 - kept * decay)
    torch._foreach_add_(weights, list((-rate * kept * updates.to(weights[0].dtype)).unbind()))
