"""Muon against its definition by singular values, and steps that are not finite."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sedd.training import muon
from sedd.training.muon import Muon, orthogonalize


def by_singular_values(matrix: Tensor) -> Tensor:
    """Apply the polynomial five times to the singular values of a matrix of norm 1."""
    u, s, v = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (1, 6)], ids=str)
def test_orthogonalize_maps_singular_values(shape: tuple[int, int], generator: torch.Generator) -> None:
    matrices = torch.randn(3, *shape, generator=generator)
    found = orthogonalize(matrices)
    torch.testing.assert_close(found, torch.stack([by_singular_values(m) for m in matrices]).float())
    singular = torch.linalg.svdvals(orthogonalize(torch.randn(4, 64, 128, generator=generator)))
    assert 0.68 <= singular.min() <= singular.max() <= 1.21


def gradients(generator: torch.Generator, steps: int) -> list[list[Tensor]]:
    """Of four matrices in two shapes."""
    shapes = [(4, 6), (6, 4), (4, 6), (6, 4)]
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(steps)]


def train(optimizer: torch.optim.Optimizer, weights: list[Tensor], steps: list[list[Tensor]]) -> None:
    for step in steps:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()


def reference_steps(weights: list[Tensor], steps: list[list[Tensor]], lr: float, decay: float) -> list[Tensor]:
    """Each matrix by itself, in float64, from the definition."""
    means = [torch.zeros_like(w).double() for w in weights]
    weights = [w.double() for w in weights]
    for step in steps:
        for i, gradient in enumerate(step):
            means[i] = 0.95 * means[i] + 0.05 * gradient.double()
            update = by_singular_values(0.05 * gradient.double() + 0.95 * means[i])
            weights[i] = (1 - lr * decay) * weights[i] - lr * 0.2 * math.sqrt(max(weights[i].shape)) * update
    return [w.float() for w in weights]


def test_steps_follow_the_definition(generator: torch.Generator) -> None:
    """With matrices of two shapes, momentum and weight decay; torch's own, in bfloat16, agrees to 2 % of an update."""
    first, *steps = gradients(generator, 6)
    weights, others = [w.clone() for w in first], [w.clone() for w in first]
    train(Muon(weights, lr=0.1, weight_decay=0.3), weights, steps)
    for found, expected in zip(weights, reference_steps(first, steps, 0.1, 0.3), strict=True):
        torch.testing.assert_close(found, expected)
    train(torch.optim.Muon(others, lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"), others, steps)
    for found, other, start in zip(weights, others, first, strict=True):
        assert (found - other).norm() < 0.02 * (found - start).norm()


def test_the_test_of_steps_catches_mutants(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *steps = gradients(generator, 2)

    def is_right(orthogonal: Callable[[Tensor], Tensor]) -> bool:
        monkeypatch.setattr(muon, "orthogonalize", orthogonal)
        weights = [w.clone() for w in first]
        train(Muon(weights, lr=0.1), weights, steps)
        return all(map(torch.allclose, weights, reference_steps(first, steps, 0.1, 0.0)))

    assert is_right(orthogonalize)
    assert not is_right(lambda x: orthogonalize(x, iterations=4))
    assert not is_right(lambda x: orthogonalize(x.flip(0)))  # updates of the wrong matrix
    assert not is_right(lambda x: orthogonalize(x.flatten(0, 1)[None]).view_as(x))  # all as one matrix


def test_a_step_that_is_not_finite_changes_nothing(generator: torch.Generator) -> None:
    """And later steps are as if it had not been."""
    first, *steps = gradients(generator, 4)
    weights, others = [w.clone() for w in first], [w.clone() for w in first]
    optimizer, other = Muon(weights, lr=0.1, weight_decay=0.3), Muon(others, lr=0.1, weight_decay=0.3)
    for i, step in enumerate(steps):
        if i == 2:
            optimizer.found_inf = torch.ones(())
            train(optimizer, weights, [[torch.full_like(gradient, math.nan) for gradient in step]])
        optimizer.found_inf = torch.zeros(())
        train(optimizer, weights, [step])
        train(other, others, [step])
    assert all(map(torch.equal, weights, others))
