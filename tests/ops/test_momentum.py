"""The kernels of a Muon step against the reference, also where a step is skipped."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sedd.ops import momentum, momentum_triton

Nesterov = Callable[[list[Tensor], list[Tensor], float, Tensor, torch.dtype], Tensor]
SHAPES = [(1, 1), (3, 5), (32, 64), (33, 127)]


def tensors(shape: tuple[int, int], device: str, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for _ in range(3)]


def definition(gradients: list[Tensor], averages: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """In float64: the averages after the step, and the Nesterov momentum."""
    after = [0.95 * a.double() + 0.05 * g.double() for g, a in zip(gradients, averages, strict=True)]
    return after, [0.95 * a + 0.05 * g.double() for g, a in zip(gradients, after, strict=True)]


def is_right(nesterov: Nesterov, shape: tuple[int, int], device: str, dtype: torch.dtype) -> bool:
    gradients, averages = tensors(shape, device, 0), tensors(shape, device, 1)
    after, expected = definition(gradients, averages)
    found = nesterov(gradients, averages, 0.95, torch.zeros((), device=device), dtype)
    assert found.dtype == dtype
    rtol = max(torch.finfo(dtype).eps, 1e-5)
    return all(
        torch.allclose(a.double(), b, rtol=rtol, atol=1e-6)
        for a, b in zip([*averages, *found], [*after, *expected], strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nesterov_momentum(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    assert is_right(momentum.nesterov_momentum, shape, device, dtype)
    assert is_right(momentum_triton.nesterov_momentum_triton, shape, device, dtype)


def test_the_test_catches_momentum_that_is_not_nesterovs(device: str) -> None:
    """Mutant: the average itself."""

    def heavy_ball(
        gradients: list[Tensor], averages: list[Tensor], mu: float, found_inf: Tensor, dtype: torch.dtype
    ) -> Tensor:
        momentum.nesterov_momentum(gradients, averages, mu, found_inf, dtype)
        return torch.stack(averages).to(dtype)

    assert not is_right(heavy_ball, (3, 5), device, torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_apply_updates(shape: tuple[int, int], device: str) -> None:
    first, updates = tensors(shape, device, 0), torch.stack(tensors(shape, device, 1)).bfloat16()
    expected = [0.9 * w.double() - 0.3 * u.double() for w, u in zip(first, updates, strict=True)]
    for apply in (momentum.apply_updates, momentum_triton.apply_updates_triton):
        for given in (updates, updates.mT.contiguous().mT):  # as they are for tall matrices
            weights = [w.clone() for w in first]
            apply(weights, given, 0.3, 0.1, torch.zeros((), device=device))
            torch.testing.assert_close([w.double() for w in weights], expected, rtol=1e-6, atol=1e-6)


def test_a_step_that_is_not_finite_is_skipped(device: str) -> None:
    found_inf = torch.ones((), device=device)
    for nesterov, apply in (
        (momentum.nesterov_momentum, momentum.apply_updates),
        (momentum_triton.nesterov_momentum_triton, momentum_triton.apply_updates_triton),
    ):
        weights, averages = tensors((3, 5), device, 0), tensors((3, 5), device, 1)
        before = [a.clone() for a in (*weights, *averages)]
        gradients = [torch.full_like(w, math.nan) for w in weights]
        updates = nesterov(gradients, averages, 0.95, found_inf, torch.bfloat16)
        apply(weights, updates, 0.3, 0.1, found_inf)
        assert all(map(torch.equal, before, (*weights, *averages)))
