"""Exponential moving average (EMA) of the weights: what is validated, sampled and released."""

from typing import final

import torch
from torch import Tensor, nn


@final
class EMA:
    """A second network with the exponential moving average of the weights of the trained one.

    Step n (from 0) sets ``ema ← d·ema + (1 − d)·weight`` with ``d = min(decay, (1 + n)/(10 + n))``: early in training
    the average is short, so that the initial weights soon have no part in it.

    Reference: averaging of iterates, Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging",
    doi:10.1137/0330046; here with exponential weights.
    """

    def __init__(self, network: nn.Module, ema_network: nn.Module, decay: float) -> None:
        self.source, self.network, self.decay = network, ema_network.requires_grad_(False).eval(), decay
        # collected once: looking parameters up takes as long as launching a kernel for each
        self.source_weights: list[Tensor] = list(network.parameters())
        self.weights: list[Tensor] = list(ema_network.parameters())
        self.buffers = list(zip(ema_network.buffers(), network.buffers(), strict=True))

    def decay_at(self, step: int) -> float:
        """Return the decay of step ``step``, which rises from 0.1 to ``decay``."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Average the weights after optimizer step ``step``, and copy the buffers."""
        values = [value.to(mean.dtype) for mean, value in zip(self.weights, self.source_weights, strict=True)]
        torch._foreach_lerp_(self.weights, values, 1 - self.decay_at(step))  # one launch where a loop has hundreds
        for target, source in self.buffers:
            target.copy_(source)
