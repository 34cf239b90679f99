"""A moving average of the weights: what is evaluated and released."""

import torch
from torch import nn


def decay_at(step: int, decay: float) -> float:
    """min(decay, (1 + n)/(10 + n)): the average forgets quickly while there is little to remember."""
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update(average: nn.Module, model: nn.Module, decay: float) -> None:
    """average ← decay·average + (1 − decay)·model, for every parameter; buffers are copied."""
    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(value.detach().to(mean.dtype), 1 - decay)
    for kept, buffer in zip(average.buffers(), model.buffers(), strict=True):
        kept.copy_(buffer)
