"""The twin in Triton computes what the definition says: odd sizes, padding, every kind of cost, the same bits twice."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sedd import ops
from sedd.diffusion.process import Absorbing, Process, Uniform
from sedd.ops import linear_loss, linear_loss_reference, linear_loss_triton
from sedd.ops.linear_loss_reference import Entries

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter is numpy's
SIZES = [(1, 2, 2), (3, 127, 128), (65, 130, 256), (64, 128, 128), (70, 300, 304)]
"""Rows, entries that count, entries there are."""


def entries(rows: int, states: int, kind: str, device: str, seed: int = 0) -> Entries:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def tokens() -> Tensor:
        return torch.randint(states, (rows,), generator=generator).to(device)

    uniform = kind == "uniform"
    return Entries(
        states=states,
        bias=draw(states) if kind != "mean" else None,
        scale=draw(rows) - 1,
        weight=draw(rows).exp(),
        data=tokens(),
        at_data=draw(rows),
        skip=tokens() if uniform else None,
        log_rest=(3 * draw(rows)).clamp_max(0) if uniform else None,
    )


def output(rows: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """Random, also where nothing counts: what is not written is seen."""
    return 2 * torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)


@pytest.mark.parametrize("kind", ["absorbing", "uniform", "mean"])
@pytest.mark.parametrize(("rows", "states", "width"), SIZES)
def test_slopes_are_the_definition(rows: int, states: int, width: int, kind: str, device: str) -> None:
    e = entries(rows, states, kind, device)
    ours, theirs = (output(rows, width, torch.float32, device) for _ in range(2))
    got, want = linear_loss_triton.slopes_(ours, e), linear_loss_reference.slopes_(theirs, e)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(got.values, want.values, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(got.columns, want.columns, rtol=2e-5, atol=1e-5)
    assert torch.equal(got.overflow_count.long(), want.overflow_count)
    assert not ours[:, states:].any()


def test_strips_grow_where_a_grid_ends(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss_triton, "MOST", 2)
    e = entries(300, 130, "uniform", device)  # five strips of 64
    ours, theirs = (output(300, 256, torch.float32, device) for _ in range(2))
    got, want = linear_loss_triton.slopes_(ours, e), linear_loss_reference.slopes_(theirs, e)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(got.columns, want.columns, rtol=2e-5, atol=1e-4)


def test_sums_of_little_are_not_lost(device: str) -> None:
    """All entries are near e^−88, which a card's exponential of two takes for 0."""
    z = torch.full((1, 2048), -88.0, device=device)
    z[0, 7] = -78
    torch.testing.assert_close(
        linear_loss_triton.logsumexp(z, 2000, None), linear_loss_reference.logsumexp(z, 2000, None)
    )


def test_slopes_in_half_precision_round_once(device: str) -> None:
    """Read as bfloat16, computed in float32, and rounded to bfloat16 when written; the interpreter cuts off instead."""
    e = entries(9, 130, "uniform", device)
    ours, exact = output(9, 256, torch.bfloat16, device), output(9, 256, torch.bfloat16, device).float()
    got, want = linear_loss_triton.slopes_(ours, e), linear_loss_reference.slopes_(exact, e)
    torch.testing.assert_close(got.values, want.values, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(ours.float(), exact, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "states", "width"), [*SIZES, (5, 4500, 4608)])
def test_logsumexp_is_the_definition(rows: int, states: int, width: int, biased: bool, device: str) -> None:
    z = 5 * output(rows, width, torch.float32, device)
    bias = torch.linspace(-3, 3, states, device=device) if biased else None
    torch.testing.assert_close(
        linear_loss_triton.logsumexp(z, states, bias), linear_loss_reference.logsumexp(z, states, bias)
    )
    shifted = linear_loss_triton.logsumexp(z + 1000, states, bias)  # no overflow
    torch.testing.assert_close(shifted, linear_loss_reference.logsumexp(z, states, bias) + 1000)


def test_near_a_ratio_nothing_cancels(device: str) -> None:
    """Around s = a, value and slope keep their digits: log s − log a from 1e-4 to where another form takes over."""
    d = torch.tensor([1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.49, 0.51, 1.0, 5.0])
    d = torch.cat([d, -d])[:, None].to(device)  # a row each, so that each value is a sum of its own
    none = torch.zeros(len(d), device=device)
    e = Entries(states=2, bias=None, scale=none, weight=none + 1, data=none.long(), at_data=none, log_rest=none)
    ours = torch.cat([d, d], 1)
    exact = ours.double()
    got = linear_loss_triton.slopes_(ours, e)
    want = linear_loss_reference.slopes_(exact, Entries(*(a.double() if _is_float(a) else a for a in e)))
    torch.testing.assert_close(got.values.double(), want.values, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=0)


def _is_float(a: Any) -> bool:
    return isinstance(a, Tensor) and a.is_floating_point()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes with numpy
def test_overflow_is_counted_and_what_is_no_number_shown(device: str) -> None:
    e = entries(4, 130, "uniform", device)
    ours, theirs = (output(4, 256, torch.float32, device) for _ in range(2))
    for z in (ours, theirs):
        z[1, 5:9] = 200.0
        z[2, 7] = torch.nan
    got, want = linear_loss_triton.slopes_(ours, e), linear_loss_reference.slopes_(theirs, e)
    assert torch.equal(got.overflow_count.long(), want.overflow_count)
    assert got.overflow_count[1] >= 3
    assert got.values[2].isnan()
    assert ours[2, 7].isnan()
    assert ours[[0, 1, 3]].isfinite().all()
    assert linear_loss_triton.logsumexp(torch.full((1, 128), torch.nan, device=device), 100, None).isnan().all()


def head(kind: str, device: str) -> tuple[list[Tensor], ops.Cost]:
    generator = torch.Generator().manual_seed(0)
    n, states, width = 45, 150, 16
    process: Process = Uniform(states) if kind == "uniform" else Absorbing(states)
    x_0 = torch.randint(states, (n, 1), generator=generator)
    x_t = torch.randint(states, (n, 1), generator=generator)
    x_t[:9] = x_0[:9]
    noise, weight = torch.full((n,), 0.7), torch.rand(n, generator=generator)
    log_data, log_rest = process.ratios(x_t, x_0, noise)
    if kind == "mean":
        cost: ops.Cost = ops.CrossEntropy(states, x_0[:, 0].to(device), weight.to(device))
    else:
        cost = ops.ScoreEntropy(
            states=states,
            x_t=x_t[:, 0].to(device) if kind == "uniform" else None,
            x_0=x_0[:, 0].to(device),
            scale=process.log_scale(noise).to(device),
            log_data=log_data[:, 0].to(device),
            log_rest=None if log_rest is None else log_rest[:, 0].to(device),
            weight=weight.to(device),
        )
    shapes = ((n, width), (process.num_states, width), (process.num_states,))
    leaves = [torch.randn(shape, generator=generator).div(2).to(device).requires_grad_() for shape in shapes]
    return leaves, cost


def answers(leaves: list[Tensor], cost: ops.Cost, **options: Any) -> list[Tensor]:
    loss = ops.linear_loss(*leaves, cost, block=20, **options)
    return [loss.total.detach(), loss.rows, *torch.autograd.grad(loss.total, leaves)]


@pytest.mark.parametrize("kind", ["absorbing", "uniform", "mean"])
def test_losses_and_gradients_are_those_of_the_definition(kind: str, device: str) -> None:
    leaves, cost = head(kind, device)
    for got, want in zip(
        answers(leaves, cost, twin=linear_loss_triton), answers(leaves, cost, twin=linear_loss_reference), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    first, second = (answers(leaves, cost, twin=linear_loss_triton) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "mutant",
    [
        lambda e: e._replace(states=e.states - 1),
        lambda e: e._replace(skip=None),
        lambda e: e._replace(log_rest=None),
        lambda e: e._replace(scale=e.scale + 1e-3),
        lambda e: e._replace(data=(e.data + 1) % e.states),
    ],
)
def test_mutants_are_caught(mutant: Callable[[Entries], Entries], device: str) -> None:
    """What is compared above sees a wrong edge, a token not left out, a wrong ratio, a scale off by a thousandth."""
    e = entries(5, 130, "uniform", device)
    ours, theirs = (output(5, 256, torch.float32, device) for _ in range(2))
    got, want = linear_loss_triton.slopes_(ours, mutant(e)), linear_loss_reference.slopes_(theirs, e)
    with pytest.raises(AssertionError):
        torch.testing.assert_close((ours, got.values), (theirs, want.values), rtol=2e-5, atol=1e-6)


def test_the_device_chooses_the_twin(a_card: Callable[[tuple[int, int]], None]) -> None:
    """CUDA has Triton's, unless float32 would not do; a CPU has the definition, interpreter or not."""
    a_card((9, 0))
    assert linear_loss.chosen("cuda", torch.bfloat16) is linear_loss_triton
    assert linear_loss.chosen("cuda", torch.float64) is linear_loss_reference
    a_card((7, 5))  # too old for Triton
    assert linear_loss.chosen("cuda", torch.bfloat16) is linear_loss_reference
    assert linear_loss.chosen("cpu", torch.bfloat16) is linear_loss_reference


def test_parts_are_slices() -> None:
    """A block's cost is the same as those rows of the whole."""
    for kind in ("uniform", "mean"):
        _, cost = head(kind, "cpu")
        part = cost.part(slice(3, 7))
        assert dataclasses.asdict(part)["x_0"].equal(dataclasses.asdict(cost)["x_0"][3:7])
