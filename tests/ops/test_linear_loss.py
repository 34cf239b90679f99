"""The Triton kernels of the linear loss agree with the reference: odd sizes, padding, every loss, equal bits twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sedd import reverse
from sedd.ops import fused_loss_triton
from sedd.ops.fused_loss import (
    TORCH,
    CrossEntropyLoss,
    EntropyTerms,
    HeadLoss,
    ScoreEntropyLoss,
    linear_loss,
    linear_loss_backend,
)
from sedd.ops.fused_loss_triton import TRITON
from sedd.process import Absorbing, Process, Uniform

# Triton's interpreter computes with numpy
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
SIZES = [(1, 2, 2), (3, 127, 128), (65, 130, 256), (64, 128, 128), (70, 300, 304)]
"""Rows, states, padded width of the logits."""


def entropy_terms(rows: int, states: int, kind: str, device: str, seed: int = 0) -> EntropyTerms:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def tokens() -> Tensor:
        return torch.randint(states, (rows,), generator=generator).to(device)

    uniform = kind == "uniform"
    return EntropyTerms(
        states=states,
        bias=draw(states) if kind != "mean" else None,
        scale=draw(rows) - 1,
        weight=draw(rows).exp(),
        data=tokens(),
        grad_at_data=draw(rows),
        skip=tokens() if uniform else None,
        log_rest=(3 * draw(rows)).clamp_max(0) if uniform else None,
    )


def logits(rows: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """Random, in the padding too, so that entries that are not overwritten are noticed."""
    return 2 * torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)


@pytest.mark.parametrize("kind", ["absorbing", "uniform", "mean"])
@pytest.mark.parametrize(("rows", "states", "width"), SIZES)
def test_entropy_and_grad_agree_with_the_reference(rows: int, states: int, width: int, kind: str, device: str) -> None:
    terms = entropy_terms(rows, states, kind, device)
    ours, theirs = (logits(rows, width, torch.float32, device) for _ in range(2))
    got, want = TRITON.entropy_and_grad_(ours, terms), TORCH.entropy_and_grad_(theirs, terms)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(got.values, want.values, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(got.columns, want.columns, rtol=2e-5, atol=1e-5)
    assert torch.equal(got.overflow_count.long(), want.overflow_count)
    assert not ours[:, states:].any()


def test_programs_take_more_rows_where_the_grid_is_full(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_loss_triton, "MAX_GRID_Y", 2)
    terms = entropy_terms(300, 130, "uniform", device)  # five programs of 64 rows
    ours, theirs = (logits(300, 256, torch.float32, device) for _ in range(2))
    got, want = TRITON.entropy_and_grad_(ours, terms), TORCH.entropy_and_grad_(theirs, terms)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(got.columns, want.columns, rtol=2e-5, atol=1e-4)


def test_logsumexp_of_subnormal_exponentials(device: str) -> None:
    """All entries are near e^−88, which the GPU's exp2 flushes to 0."""
    z = torch.full((1, 2048), -88.0, device=device)
    z[0, 7] = -78
    torch.testing.assert_close(TRITON.logsumexp(z, 2000, None), TORCH.logsumexp(z, 2000, None))


def test_half_precision_is_rounded_once(device: str) -> None:
    """Read as bfloat16, computed in float32, and rounded when written; the interpreter truncates instead."""
    terms = entropy_terms(9, 130, "uniform", device)
    ours, exact = logits(9, 256, torch.bfloat16, device), logits(9, 256, torch.bfloat16, device).float()
    got, want = TRITON.entropy_and_grad_(ours, terms), TORCH.entropy_and_grad_(exact, terms)
    torch.testing.assert_close(got.values, want.values, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(ours.float(), exact, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "states", "width"), [*SIZES, (5, 4500, 4608)])
def test_logsumexp_agrees_with_the_reference(rows: int, states: int, width: int, biased: bool, device: str) -> None:
    z = 5 * logits(rows, width, torch.float32, device)
    bias = torch.linspace(-3, 3, states, device=device) if biased else None
    torch.testing.assert_close(TRITON.logsumexp(z, states, bias), TORCH.logsumexp(z, states, bias))
    shifted = TRITON.logsumexp(z + 1000, states, bias)  # no overflow
    torch.testing.assert_close(shifted, TORCH.logsumexp(z, states, bias) + 1000)


def test_no_cancellation_near_the_ratio(device: str) -> None:
    """Around s = a, value and derivative are accurate: log s − log a from 1e-4 to where the closed form takes over."""
    d = torch.tensor([1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.49, 0.51, 1.0, 5.0])
    d = torch.cat([d, -d])[:, None].to(device)  # one per row, so that each value is its own sum
    none = torch.zeros(len(d), device=device)
    terms = EntropyTerms(2, None, scale=none, weight=none + 1, data=none.long(), grad_at_data=none, log_rest=none)
    ours = torch.cat([d, d], 1)
    exact = ours.double()
    got = TRITON.entropy_and_grad_(ours, terms)
    want = TORCH.entropy_and_grad_(exact, EntropyTerms(*(a.double() if _is_float(a) else a for a in terms)))
    torch.testing.assert_close(got.values.double(), want.values, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=0)


def _is_float(a: Any) -> bool:
    return isinstance(a, Tensor) and a.is_floating_point()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes with numpy
def test_overflow_is_counted_and_nan_is_shown(device: str) -> None:
    terms = entropy_terms(4, 130, "uniform", device)
    ours, theirs = (logits(4, 256, torch.float32, device) for _ in range(2))
    for z in (ours, theirs):
        z[1, 5:9] = 200.0
        z[2, 7] = torch.nan
    got, want = TRITON.entropy_and_grad_(ours, terms), TORCH.entropy_and_grad_(theirs, terms)
    assert torch.equal(got.overflow_count.long(), want.overflow_count)
    assert got.overflow_count[1] >= 3
    assert got.values[2].isnan()
    assert ours[2, 7].isnan()
    assert ours[[0, 1, 3]].isfinite().all()
    assert TRITON.logsumexp(torch.full((1, 128), torch.nan, device=device), 100, None).isnan().all()


def head(kind: str, device: str) -> tuple[list[Tensor], HeadLoss]:
    generator = torch.Generator().manual_seed(0)
    n, states, width = 45, 150, 16
    process: Process = Uniform(states) if kind == "uniform" else Absorbing(states)
    x_0 = torch.randint(states, (n, 1), generator=generator)
    x_t = torch.randint(states, (n, 1), generator=generator)
    x_t[:9] = x_0[:9]
    noise, weight = torch.full((n,), 0.7), torch.rand(n, generator=generator)
    log_data, log_rest = process.ratios(x_t, x_0, noise)
    if kind == "mean":
        loss: HeadLoss = CrossEntropyLoss(states, x_0[:, 0].to(device), weight.to(device))
    else:
        loss = ScoreEntropyLoss(
            states=states,
            x_t=x_t[:, 0].to(device) if kind == "uniform" else None,
            x_0=x_0[:, 0].to(device),
            scale=reverse.log_score_shift(process, noise).to(device),
            log_data=log_data[:, 0].to(device),
            log_rest=None if log_rest is None else log_rest[:, 0, 0].to(device),
            weight=weight.to(device),
        )
    shapes = ((n, width), (process.num_states, width), (process.num_states,))
    leaves = [torch.randn(shape, generator=generator).div(2).to(device).requires_grad_() for shape in shapes]
    return leaves, loss


def losses_and_grads(leaves: list[Tensor], loss: HeadLoss, **options: Any) -> list[Tensor]:
    output = linear_loss(*leaves, loss, block_rows=20, **options)
    return [output.total.detach(), output.positions, *torch.autograd.grad(output.total, leaves)]


@pytest.mark.parametrize("kind", ["absorbing", "uniform", "mean"])
def test_losses_and_gradients_agree_with_the_reference(kind: str, device: str) -> None:
    leaves, loss = head(kind, device)
    pairs = (losses_and_grads(leaves, loss, backend=backend) for backend in (TRITON, TORCH))
    for got, want in zip(*pairs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    first, second = (losses_and_grads(leaves, loss, backend=TRITON) for _ in range(2))
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
def test_mutants_are_caught(mutant: Callable[[EntropyTerms], EntropyTerms], device: str) -> None:
    """The comparison above notices a wrong edge, a token not skipped, a wrong ratio, a scale off by a thousandth."""
    terms = entropy_terms(5, 130, "uniform", device)
    ours, theirs = (logits(5, 256, torch.float32, device) for _ in range(2))
    got, want = TRITON.entropy_and_grad_(ours, mutant(terms)), TORCH.entropy_and_grad_(theirs, terms)
    with pytest.raises(AssertionError):
        torch.testing.assert_close((ours, got.values), (theirs, want.values), rtol=2e-5, atol=1e-6)


def test_backend_by_device(pretend_gpu: Callable[[tuple[int, int]], None]) -> None:
    """CUDA uses Triton, except for float64; a CPU uses the reference, with the interpreter or without."""
    pretend_gpu((9, 0))
    assert linear_loss_backend("cuda", torch.bfloat16) is TRITON
    assert linear_loss_backend("cuda", torch.float64) is TORCH
    pretend_gpu((7, 5))  # too old for Triton
    assert linear_loss_backend("cuda", torch.bfloat16) is TORCH
    assert linear_loss_backend("cpu", torch.bfloat16) is TORCH
