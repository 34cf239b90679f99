"""A moving average of the weights: what is evaluated and released."""

import torch
from torch import Tensor, nn


def decay_at(step: int, decay: float) -> float:
    """min(decay, (1 + n)/(10 + n)): the average forgets quickly while there is little to remember."""
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update(average: nn.Module, model: nn.Module, decay: float) -> None:
    """average ← decay·average + (1 − decay)·model, for every parameter; buffers are copied."""
    means: list[Tensor] = list(average.parameters())
    values = [value.to(mean.dtype) for mean, value in zip(means, model.parameters(), strict=True)]
    torch._foreach_lerp_(means, values, 1 - decay)  # one launch where a loop has hundreds
    for kept, buffer in zip(average.buffers(), model.buffers(), strict=True):
        kept.copy_(buffer)
