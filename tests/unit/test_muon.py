"""Muon against its definition by singular values, and steps that are not finite."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sedd.nn.transformer import Modern, Reference
from sedd.training import muon
from sedd.training.config import OptimConfig
from sedd.training.muon import Muon, orthogonalize
from sedd.training.optimizer import build_optimizers


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


def reference_steps(
    weights: list[Tensor],
    steps: list[list[Tensor]],
    lr: float,
    decay: float = 0.0,
    beta2: float | None = None,
    parts: int = 1,
) -> list[Tensor]:
    """Each matrix by itself, in float64, from the definition."""
    means = [torch.zeros_like(w).double() for w in weights]
    squares = [torch.zeros(len(w)).double() for w in weights]
    weights = [w.double() for w in weights]
    for step in steps:
        for i, gradient in enumerate(step):
            means[i] = 0.95 * means[i] + 0.05 * gradient.double()
            nesterov = 0.05 * gradient.double() + 0.95 * means[i]
            update = torch.cat([by_singular_values(part) for part in nesterov.chunk(parts)])
            if beta2 is not None:
                squares[i] = beta2 * squares[i] + (1 - beta2) * update.square().mean(1)
                scaled = update / squares[i].sqrt()[:, None]
                update = scaled * update.norm() / scaled.norm()
            largest = max(len(gradient) // parts, gradient.shape[1])
            weights[i] = (1 - lr * decay) * weights[i] - lr * 0.2 * math.sqrt(largest) * update
    return [w.float() for w in weights]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("beta2", [None, 0.95, 0.5])
def test_steps_follow_the_definition(beta2: float | None, parts: int, generator: torch.Generator) -> None:
    """With matrices of two shapes, momentum and weight decay."""
    first, *steps = gradients(generator, 6)
    weights = [w.clone() for w in first]
    train(Muon(weights, lr=0.1, weight_decay=0.3, beta2=beta2, parts=parts), weights, steps)
    for found, expected in zip(weights, reference_steps(first, steps, 0.1, 0.3, beta2, parts), strict=True):
        torch.testing.assert_close(found, expected)


def test_steps_without_normalized_rows_are_those_of_torch(generator: torch.Generator) -> None:
    """Which computes in bfloat16: they agree to 2 % of an update."""
    first, *steps = gradients(generator, 6)
    weights, others = [w.clone() for w in first], [w.clone() for w in first]
    train(Muon(weights, lr=0.1, weight_decay=0.3, beta2=None), weights, steps)
    train(torch.optim.Muon(others, lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"), others, steps)
    for found, other, start in zip(weights, others, first, strict=True):
        assert (found - other).norm() < 0.02 * (found - start).norm()


def test_updates_have_the_root_mean_square_of_adamw(generator: torch.Generator) -> None:
    """0.2, up to the spread of the singular values; in stacked matrices every part has it."""
    weight = torch.zeros(96, 32)
    for parts in (1, 3):
        start = weight.clone()
        train(
            Muon([{"params": [weight], "parts": parts}], lr=1.0), [weight], [[torch.randn(96, 32, generator=generator)]]
        )
        for part in (weight - start).chunk(parts):
            assert 0.2 * 0.68 < part.square().mean().sqrt() < 0.2 * 1.21


def test_a_state_without_averages_of_rows_is_completed(generator: torch.Generator) -> None:
    """A checkpoint of a run whose rows were not normalized has none: they begin at 0, as in a first step."""
    weight, gradient = torch.ones(6, 4), torch.randn(6, 4, generator=generator)
    optimizer = Muon([weight], lr=0.1)
    optimizer.state[weight]["momentum_buffer"] = torch.zeros(6, 4)
    train(optimizer, [weight], [[gradient]])
    torch.testing.assert_close([weight], reference_steps([torch.ones(6, 4)], [[gradient]], 0.1, beta2=0.95))
    assert optimizer.state[weight]["row_squares"].min() > 0


def test_a_zero_gradient_is_a_zero_update() -> None:
    """Also where no row has ever had another."""
    weight = torch.ones(6, 4)
    train(Muon([weight], lr=0.1), [weight], [[torch.zeros(6, 4)]])
    assert torch.equal(weight, torch.ones(6, 4))


def test_the_test_of_steps_catches_mutants(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *steps = gradients(generator, 2)

    def is_right(orthogonal: Callable[[Tensor], Tensor], parts: int = 1) -> bool:
        monkeypatch.setattr(muon, "orthogonalize", orthogonal)
        weights = [w.clone() for w in first]
        train(Muon(weights, lr=0.1, parts=parts), weights, steps)
        return all(map(torch.allclose, weights, reference_steps(first, steps, 0.1, beta2=0.95)))

    assert is_right(orthogonalize)
    assert not is_right(orthogonalize, parts=2)
    assert not is_right(lambda x: orthogonalize(x, iterations=4))
    assert not is_right(lambda x: orthogonalize(x.flip(0)))  # updates of the wrong matrix
    assert not is_right(lambda x: orthogonalize(x.flatten(0, 1)[None]).view_as(x))  # all as one matrix
    monkeypatch.setattr(muon, "row_factors", lambda squares, averages: averages.rsqrt())  # the norm is not kept
    assert not is_right(orthogonalize)


def test_queries_keys_and_values_are_matrices_of_their_own() -> None:
    """In networks of both architectures, and nothing else is divided."""
    for architecture in (Modern, Reference):
        network = architecture(states=5, width=8, depth=2, heads=2, cond_dim=4)
        built = build_optimizers(network, OptimConfig(name="muon"))[-1]
        assert isinstance(built, Muon)
        parts = {id(w): group["parts"] for group in built.param_groups for w in group["params"]}
        found = {name: parts[id(w)] for name, w in network.named_parameters() if id(w) in parts}
        assert len(found) == 8
        assert all((value == 3) == ("qkv" in name) for name, value in found.items())


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
