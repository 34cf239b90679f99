"""A training step's optimizer and EMA, against torch's own written out."""

import copy

import pytest
import torch
from torch import Tensor, nn

from sedd.training import optimizer
from sedd.training.config import OptimConfig
from sedd.training.optimizer import lr_multiplier
from sedd.training.trainer import EMA

STEPS = 5
SHAPES = [(37, 29), (1, 1), (64, 3), (7,), (1,), (130,)]
CONFIG = OptimConfig(lr=1e-2, weight_decay=0.3, beta1=0.8, beta2=0.97, grad_clip=0.5, ema_decay=0.9)


class Net(nn.Module):
    """Weights of odd sizes and a buffer; its gradients are given, each step's a tenth of the last."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES])
        self.register_buffer("table", torch.ones(3))

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(1 + step)
        for w in self.weights:
            w.grad = 10.0**-step * torch.randn(w.shape, generator=generator)


class Training:
    """A network with its optimizers and EMA, stepped as `train_step` does."""

    def __init__(self) -> None:
        self.network = Net()
        self.ema = EMA(self.network, copy.deepcopy(self.network), CONFIG.ema_decay)
        self.optimizers = optimizer.build_optimizers(self.network, CONFIG)

    def step(self, step: int, finite: bool = True) -> Tensor:
        norm = optimizer.clip_grad_norm(self.ema.source_weights, CONFIG.grad_clip)
        optimizer.set_learning_rate(self.optimizers, 1e-2 / (1 + step))
        optimizer.step_if_finite(self.optimizers, torch.tensor(finite))
        if finite:
            self.ema.update(step)
        self.network.zero_grad()
        return norm

    def state(self) -> list[Tensor]:
        moments = [t for state in self.optimizers[0].state.values() for t in state.values()]
        return [*self.network.parameters(), *self.ema.weights, *moments]


def reference(vectors_decay: bool = False) -> tuple[Net, Net]:
    """Clipping, AdamW without decay of vectors, and the EMA, in a loop over tensors."""
    network, average = Net(), Net()
    groups = [
        {"params": [w for w in network.weights if (w.ndim > 1) is m], "weight_decay": 0.3 * (m or vectors_decay)}
        for m in (True, False)
    ]
    adam = torch.optim.AdamW(groups, betas=(0.8, 0.97), fused=False)
    for step in range(STEPS):
        network.set_gradients(step)
        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.set_learning_rate([adam], 1e-2 / (1 + step))
        adam.step()
        decay = min(0.9, (1 + step) / (10 + step))
        for mean, weight in zip(average.parameters(), network.parameters(), strict=True):
            mean.data.lerp_(weight.data, 1 - decay)
    return network, average


@pytest.mark.parametrize("least", [0, 2**17])
def test_steps_are_clipping_adamw_and_ema(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fused kernel and without it."""
    monkeypatch.setattr(optimizer, "MIN_FUSED_ON_CPU", least)
    training, norms = Training(), []
    assert training.optimizers[0].defaults["fused"] is (least == 0)
    for step in range(STEPS):
        training.network.set_gradients(step)
        norms.append(training.step(step))
    assert max(norms) > CONFIG.grad_clip > min(norms)  # clipped in the first steps and not in the last
    for ours, theirs in zip((training.network, training.ema.network), reference(), strict=True):
        torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-6, atol=1e-7)


def test_the_reference_tells_a_wrong_weight_decay_apart() -> None:
    """Mutant: vectors decay too."""
    right, wrong = reference()[0], reference(vectors_decay=True)[0]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(list(right.parameters()), list(wrong.parameters()), rtol=1e-6, atol=1e-7)


def test_a_nonfinite_step_changes_nothing() -> None:
    training = Training()
    training.network.set_gradients(0)
    training.step(0)
    before = [t.detach().clone() for t in training.state()]
    training.network.set_gradients(1)
    training.network.weights[0].grad.fill_(torch.nan)
    training.step(1, finite=False)
    assert all(torch.equal(a, b) for a, b in zip(before, training.state(), strict=True))


def test_a_weight_without_a_gradient_stays_and_its_ema_approaches_it() -> None:
    training = Training()
    frozen, mean = training.network.weights[4], training.ema.weights[4]
    frozen.requires_grad_(False).fill_(3)
    before = mean.clone()
    training.network.set_gradients(0)
    frozen.grad = None
    training.step(0)
    assert (frozen == 3).all()
    torch.testing.assert_close(mean, before + 0.9 * (3 - before))


def test_buffers_are_copied_to_the_ema() -> None:
    training = Training()
    training.network.table.fill_(2)
    training.network.set_gradients(0)
    training.step(0)
    assert (training.ema.network.table == 2).all()


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_rises_stays_and_decays(schedule: str) -> None:
    config = OptimConfig(lr_schedule=schedule, warmup_steps=10, decay_fraction=0.25, final_lr_fraction=0.2)
    factors = [lr_multiplier(config, step, step / 1000) for step in range(1001)]
    assert factors[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert set(factors[10:751]) == {1.0}
    assert factors[-1] == pytest.approx(1.0 if schedule == "constant" else 0.2)
    assert factors[875] == pytest.approx(1.0 if schedule == "constant" else 0.6)  # half way
    assert factors[750:] == sorted(factors[750:], reverse=True)


def test_decay_over_all_of_the_budget() -> None:
    linear = OptimConfig(lr_schedule="linear", warmup_steps=0, final_lr_fraction=0.0)
    assert [lr_multiplier(linear, 5, used) for used in (0.0, 0.25, 1.0, 1.5)] == [1.0, 0.75, 0.0, 0.0]
    for fraction in (0.0, 1.1):
        with pytest.raises(ValueError, match="decay_fraction"):
            OptimConfig(decay_fraction=fraction)


SCHEDULES = [  # schedule, warmup steps, decay fraction, final fraction; then step, budget used, factor
    ("constant", 0, 1.0, 0.1, [(0, 0.0, 1.0), (7, 0.5, 1.0), (9, 1.0, 1.0)]),
    ("constant", 4, 1.0, 0.1, [(0, 0.0, 0.25), (1, 0.1, 0.5), (2, 0.2, 0.75), (3, 0.3, 1.0), (4, 0.4, 1.0)]),
    ("linear", 0, 1.0, 0.1, [(0, 0.0, 1.0), (1, 0.25, 0.775), (5, 0.5, 0.55), (9, 0.9, 0.19), (10, 1.0, 0.1)]),
    ("linear", 0, 0.5, 0.2, [(0, 0.0, 1.0), (5, 0.5, 1.0), (6, 0.625, 0.8), (7, 0.75, 0.6), (10, 1.0, 0.2)]),
    ("linear", 10, 1.0, 0.0, [(0, 0.0, 0.1), (4, 0.5, 0.25), (9, 0.75, 0.25), (20, 1.0, 0.0)]),
    ("cosine", 0, 1.0, 0.1, [(0, 0.0, 1.0), (1, 1 / 3, 0.775), (2, 0.5, 0.55), (3, 2 / 3, 0.325), (4, 1.0, 0.1)]),
    ("cosine", 0, 1.0, 0.0, [(1, 0.25, 0.8535533905932737), (3, 0.75, 0.1464466094067262), (4, 1.0, 0.0)]),
    ("cosine", 0, 0.25, 0.2, [(0, 0.75, 1.0), (1, 0.75 + 1 / 12, 0.8), (2, 0.875, 0.6), (3, 1.0, 0.2)]),
    ("cosine", 5, 1.0, 0.0, [(0, 0.0, 0.2), (1, 0.5, 0.2), (4, 0.5, 0.5), (5, 1.0, 0.0)]),
]


@pytest.mark.parametrize(("schedule", "warmup", "decay", "final", "rows"), SCHEDULES)
def test_learning_rates_by_hand(
    schedule: str, warmup: int, decay: float, final: float, rows: list[tuple[int, float, float]]
) -> None:
    config = OptimConfig(lr_schedule=schedule, warmup_steps=warmup, decay_fraction=decay, final_lr_fraction=final)
    found = [lr_multiplier(config, step, used) for step, used, _ in rows]
    assert found == pytest.approx([factor for *_, factor in rows], abs=1e-12)


def test_the_ema_by_hand() -> None:
    """Its decay rises as (1 + n)/(10 + n) up to the given one; from 0 the average of 1, 2, 3 is then 2.82525."""
    network = nn.Linear(1, 1, bias=False)
    ema = EMA(network, copy.deepcopy(network), 0.999)
    expected = {0: 0.1, 1: 2 / 11, 2: 0.25, 8: 0.5, 90: 0.91, 8989: 8990 / 8999, 8990: 0.999, 10**6: 0.999}
    assert {step: ema.decay_at(step) for step in expected} == pytest.approx(expected, abs=1e-15)
    short = EMA(network, copy.deepcopy(network), 0.15)
    averages = []
    with torch.no_grad():
        short.weights[0].zero_()
        for step, value in enumerate((1.0, 2.0, 3.0)):
            network.weight.fill_(value)
            short.update(step)
            averages.append(short.weights[0].item())
    assert averages == pytest.approx([0.9, 0.15 * 0.9 + 0.85 * 2, 2.82525], rel=1e-6)
    assert network.weight.item() == 3
