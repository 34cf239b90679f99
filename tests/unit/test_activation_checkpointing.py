"""Activation checkpointing changes memory and never a gradient; a non-finite optimizer step is skipped."""

import copy

import pytest
import torch
from torch import Tensor

from sedd import registry
from sedd.config import OptimConfig
from sedd.nn.transformer import Modern, Reference, Transformer
from sedd.training import optimizer as optim
from sedd.training.ema import EMA

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
    made.activation_checkpointing = registry.ACTIVATION_CHECKPOINTING.load(name)
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


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="none, selective, full"):
        registry.ACTIVATION_CHECKPOINTING.load("some")


@pytest.mark.parametrize("fused", [True, False])
def test_a_nonfinite_step_is_skipped(fused: bool) -> None:
    """Weights, moments and step counts stay to the bit; the next step is done."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 9))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)

    def step(gradient: Tensor) -> None:
        weight.grad = gradient.clone()
        optim.step_if_finite([optimizer], gradient.isfinite().all())

    step(torch.ones(9))
    before = copy.deepcopy((weight.detach(), optimizer.state_dict()["state"]))
    step(torch.full((9,), torch.nan))
    after = weight.detach(), optimizer.state_dict()["state"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    step(torch.ones(9))
    assert not torch.equal(weight, before[0])


def test_a_fused_step_does_not_read_the_flag_on_the_host() -> None:
    """Reading ``finite`` on the host would wait for the device."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    reads = []

    class Watched(torch.Tensor):
        def __bool__(self) -> bool:
            reads.append(1)
            return True

    weight.grad = torch.ones(3)
    optim.step_if_finite([optimizer], torch.tensor(True).as_subclass(Watched))
    assert not reads
    for width, is_fused in ((4, False), (1024, True)):  # on a CPU for many weights alone
        network = Modern(states=128, width=width, depth=1, heads=1, time_conditioning=False)
        (on_cpu,) = optim.build_optimizers(network, OptimConfig())
        assert on_cpu.defaults["fused"] is is_fused


def test_ema_update() -> None:
    model, average = network(Modern), network(Modern)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    expected = [0.9 * a + 0.1 * b for a, b in zip(average.parameters(), model.parameters(), strict=True)]
    EMA(model, average, 0.9).update(step=1000)
    for got, want in zip(average.parameters(), expected, strict=True):
        torch.testing.assert_close(got, want)
