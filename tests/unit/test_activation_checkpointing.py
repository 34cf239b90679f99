"""Activation checkpointing changes memory and never a gradient; a non-finite optimizer step is skipped."""

import pytest
import torch
from torch import Tensor

from sedd.nn.transformer import Modern, Reference, Transformer
from sedd.runtime import activation_checkpointing

styles = pytest.mark.parametrize("style", [Reference, Modern])


def network(style: type[Transformer], timed: bool = True) -> Transformer:
    made = style(states=11, width=24, depth=2, heads=3, cond_dim=8, dropout=0.2, time_conditioning=timed)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return made.train()


def gradients_and_memory(made: Transformer, name: str) -> tuple[list[Tensor], int]:
    """Return the gradients and how many bytes the forward pass saved for the backward pass."""
    saved: dict[int, int] = {}

    def save(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    x, sigma = torch.arange(44).view(4, 11) % 11, torch.tensor([0.1, 0.5, 1.0, 2.0])
    made.activation_checkpointing = getattr(activation_checkpointing, name)
    torch.manual_seed(7)  # dropout
    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        loss = made(x, sigma).square().sum()
    return list(torch.autograd.grad(loss, [p for p in made.parameters() if p.requires_grad])), sum(saved.values())


@pytest.mark.parametrize("timed", [True, False])
@styles
def test_gradients_are_equal_and_memory_falls(style: type[Transformer], timed: bool) -> None:
    """Dropout included: the recomputed forward pass drops the same entries."""
    made = network(style, timed)
    expected, memory = gradients_and_memory(made, "none")
    for name in ("selective", "full"):
        gradients, less = gradients_and_memory(made, name)
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert less < memory
