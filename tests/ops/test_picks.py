"""Draws from a head's output: the twins choose alike, and the laws are those of the samplers' tables."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sedd import ops
from sedd.diffusion.categorical import AffineWeights
from sedd.diffusion.process import Absorbing, Process, Uniform
from sedd.diffusion.rng import CounterRNG
from sedd.ops import block_ops, block_ops_triton, categorical, categorical_triton, philox_triton
from sedd.ops.categorical import Scores


def setting(process: Process, relative: bool, k: int, seed: int = 0) -> tuple[Scores, Tensor, AffineWeights, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = process.vocab_size
    z = 3 * torch.randn(k, process.num_states + 3, generator=generator)  # a head may have more entries than count
    x = torch.full((k,), n) if isinstance(process, Absorbing) else torch.randint(n, (k,), generator=generator)
    sigma_s, gap = torch.rand(2, k, generator=generator, dtype=torch.float64)
    law = process.analytic_law(gap / 5) if relative else process.posterior_law(sigma_s, sigma_s + gap)
    u = torch.rand(k, 2, generator=generator, dtype=torch.float64)
    return Scores(z, n, torch.rand(k, generator=generator) - 3, relative), x, law, u


def on(
    device: str, said: Scores, x: Tensor, law: AffineWeights, u: Tensor
) -> tuple[Scores, Tensor, AffineWeights, Tensor]:
    moved = AffineWeights._make(None if a is None else a.to(device) for a in law)
    return said._replace(z=said.z.to(device), scale=said.scale.to(device)), x.to(device), moved, u.to(device)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("process", [Absorbing(5), Uniform(5), Absorbing(300), Uniform(300)])
def test_the_twins_choose_alike(process: Process, relative: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw may differ where a uniform is within rounding of a boundary: one in a million, none of these."""
    monkeypatch.setattr(categorical_triton, "COLUMNS", 64)
    given = on(device, *setting(process, relative, 24))
    ours, theirs = categorical_triton.choose(*given), categorical.choose(*given)
    assert torch.equal(ours.y, theirs.y)
    assert ours.clamped == theirs.clamped
    assert (ours.y != given[1]).any()


def test_clamped_laws_are_counted(device: str) -> None:
    """A step too long for the score, which more than reveals every mask."""
    said, x, _, u = setting(Absorbing(7), True, 8)
    law = Absorbing(7).analytic_law(torch.full((8,), 9.0, dtype=torch.float64))
    given = on(device, said._replace(scale=torch.zeros(8)), x, law, u)
    assert categorical_triton.choose(*given).clamped == categorical.choose(*given).clamped == 8


@pytest.mark.parametrize("gap", [1e-3, 0.3, 3.0])
def test_what_is_below_nothing_is_never_drawn(gap: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From steps in which no weight is below 0, and the row is read once less, to those in which many are."""
    monkeypatch.setattr(categorical_triton, "COLUMNS", 64)
    said, x, _, u = setting(Uniform(150), True, 64)
    said, law = said._replace(z=said.z / 3), Uniform(150).analytic_law(torch.full((64,), gap, dtype=torch.float64))
    given = on(device, said, x, law, u)
    ours, theirs = categorical_triton.choose(*given), categorical.choose(*given)
    assert torch.equal(ours.y, theirs.y)
    assert ours.clamped == theirs.clamped
    assert (ours.clamped == 0) == (gap == 1e-3)


def test_what_is_impossible_is_never_drawn_and_ends_hold(device: str) -> None:
    said, x, law, u = setting(Absorbing(6), False, 8)
    said.z[:, [0, 2, 5]] = -torch.inf
    u[:4, 1], u[4:, 1] = 1 - 2.0**-53, 2.0**-54
    given = on(device, said, x, AffineWeights(torch.ones_like(law.go)), u)
    drawn = categorical_triton.choose(*given).y.cpu()
    assert (drawn[:4] == 4).all()
    assert (drawn[4:] == 1).all()


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1])
def test_uniforms_are_the_same_numbers(seed: int, device: str) -> None:
    chance = CounterRNG(seed, torch.tensor([0, 7, 123456], device=device))
    for step, event in ((0, 0), (3, 1), (70_000, 2)):
        assert torch.equal(philox_triton.uniforms(chance, 5, step, event), chance(5, step, event))


def test_who_chooses(a_card: Callable[[tuple[int, int]], None]) -> None:
    a_card((8, 0))
    assert ops.chosen("cpu") is categorical.choose
    assert ops.chosen("cuda") is categorical_triton.choose
    assert ops.between("cuda", torch.bfloat16) is block_ops_triton
    assert ops.between("cuda", torch.float64) is ops.between("cpu", torch.bfloat16) is block_ops
    a_card((7, 5))  # too old for Triton
    assert ops.chosen("cuda") is categorical.choose
    assert ops.between("cuda", torch.bfloat16) is block_ops
