"""What is computed twice changes memory and time, never a number; and a step that must not be taken is not."""

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


def gone_through(made: Transformer, name: str) -> tuple[list[Tensor], int]:
    """Gradients, and how many bytes the way forwards has kept."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    x, sigma = torch.arange(44).view(4, 11) % 11, torch.tensor([0.1, 0.5, 1.0, 2.0])
    made.activation_checkpointing = registry.ACTIVATION_CHECKPOINTING.load(name)
    torch.manual_seed(7)  # dropout
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = made(x, sigma).square().sum()
    return list(torch.autograd.grad(loss, [p for p in made.parameters() if p.requires_grad])), sum(kept.values())


@pytest.mark.parametrize("timed", [True, False])
@styles
def test_gradients_stay_and_memory_falls(style: type[Transformer], timed: bool) -> None:
    """Dropout included: what was dropped on the way forwards is dropped again."""
    made = network(style, timed)
    plain, most = gone_through(made, "none")
    for name in ("selective", "full"):
        again, less = gone_through(made, name)
        for a, b in zip(again, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert less < most


def test_names_of_recompute(refuses: object) -> None:
    with pytest.raises(ValueError, match="none, selective, full"):
        registry.ACTIVATION_CHECKPOINTING.load("some")


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_is_no_number_is_not_taken(fused: bool) -> None:
    """Weights, moments and counts stay to the bit; the next step is as if there had been none."""
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


def test_a_fused_step_asks_the_device() -> None:
    """The host does not look at ``finite``: on the meta device there is nothing to look at."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    asked = []

    class Watched(torch.Tensor):
        def __bool__(self) -> bool:
            asked.append(1)
            return True

    weight.grad = torch.ones(3)
    optim.step_if_finite([optimizer], torch.tensor(True).as_subclass(Watched))
    assert not asked
    assert (
        optim.build_optimizers(Modern(states=3, width=4, depth=1, heads=1), OptimConfig())[0].defaults["fused"] is False
    )


def test_the_average_in_one_launch_is_the_average() -> None:
    model, average = network(Modern), network(Modern)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    expected = [0.9 * a + 0.1 * b for a, b in zip(average.parameters(), model.parameters(), strict=True)]
    EMA(model, average, 0.9).update(step=1000)
    for got, want in zip(average.parameters(), expected, strict=True):
        torch.testing.assert_close(got, want)
