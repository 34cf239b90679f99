"""Categorical draws from a head's output: the kernel draws the same tokens as the reference."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sedd import reverse
from sedd.draws import AffineWeights, CounterRNG
from sedd.ops import block_ops, block_ops_triton, categorical_triton
from sedd.ops.block_ops import select_backend
from sedd.ops.categorical import HeadLogits, sample_categorical_reference
from sedd.ops.categorical_triton import sample_categorical_triton
from sedd.process import Absorbing, Process, Uniform

Inputs = tuple[HeadLogits, Tensor, AffineWeights, Tensor]


def build_inputs(process: Process, is_score: bool, k: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    n = process.vocab_size
    z = 3 * torch.randn(k, process.num_states + 3, generator=generator)  # a head may be padded
    x = torch.full((k,), n) if process.only_masks else torch.randint(n, (k,), generator=generator)
    sigma_s, gap = torch.rand(2, k, generator=generator, dtype=torch.float64)
    if is_score:
        weights = reverse.tweedie_weights(process, gap / 5)
    else:
        weights = reverse.posterior_weights(process, sigma_s, sigma_s + gap)
    u = torch.rand(k, 2, generator=generator, dtype=torch.float64)
    return HeadLogits(z, n, torch.rand(k, generator=generator) - 3, is_score), x, weights, u


def to_device(device: str, head: HeadLogits, x: Tensor, weights: AffineWeights, u: Tensor) -> Inputs:
    weights = AffineWeights._make(None if a is None else a.to(device) for a in weights)
    head = head._replace(logits=head.logits.to(device), shift=head.shift.to(device))
    return head, x.to(device), weights, u.to(device)


@pytest.mark.parametrize("is_score", [True, False])
@pytest.mark.parametrize("process", [Absorbing(5), Uniform(5), Absorbing(300), Uniform(300)])
def test_kernel_and_reference_draw_the_same_tokens(
    process: Process, is_score: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draw may differ where a uniform is within rounding of a boundary: one in a million, none of these."""
    monkeypatch.setattr(categorical_triton, "COLUMNS", 64)
    inputs = to_device(device, *build_inputs(process, is_score, 24))
    ours, theirs = sample_categorical_triton(*inputs), sample_categorical_reference(*inputs)
    assert torch.equal(ours.tokens, theirs.tokens)
    assert ours.clamped_count == theirs.clamped_count
    assert (ours.tokens != inputs[1]).any()


def test_clamped_rows_are_counted(device: str) -> None:
    """A step too long for the score, in which a mask changes with probability above 1."""
    head, x, _, u = build_inputs(Absorbing(7), True, 8)
    weights = reverse.tweedie_weights(Absorbing(7), torch.full((8,), 9.0, dtype=torch.float64))
    inputs = to_device(device, head._replace(shift=torch.zeros(8)), x, weights, u)
    assert sample_categorical_triton(*inputs).clamped_count == sample_categorical_reference(*inputs).clamped_count == 8


@pytest.mark.parametrize("gap", [1e-3, 0.3, 3.0])
def test_negative_weights_are_never_drawn(gap: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From steps in which no weight is negative, and the kernel saves a pass, to those in which many are."""
    monkeypatch.setattr(categorical_triton, "COLUMNS", 64)
    head, x, _, u = build_inputs(Uniform(150), True, 64)
    weights = reverse.tweedie_weights(Uniform(150), torch.full((64,), gap, dtype=torch.float64))
    inputs = to_device(device, head._replace(logits=head.logits / 3), x, weights, u)
    ours, theirs = sample_categorical_triton(*inputs), sample_categorical_reference(*inputs)
    assert torch.equal(ours.tokens, theirs.tokens)
    assert ours.clamped_count == theirs.clamped_count
    assert (ours.clamped_count == 0) == (gap == 1e-3)


def test_impossible_tokens_are_never_drawn_even_at_the_ends(device: str) -> None:
    head, x, weights, u = build_inputs(Absorbing(6), False, 8)
    head.logits[:, [0, 2, 5]] = -torch.inf
    u[:4, 1], u[4:, 1] = 1 - 2.0**-53, 2.0**-54
    inputs = to_device(device, head, x, AffineWeights(torch.ones_like(weights.change_score)), u)
    drawn = sample_categorical_triton(*inputs).tokens.cpu()
    assert (drawn[:4] == 4).all()
    assert (drawn[4:] == 1).all()


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1])
def test_uniforms_are_the_same_numbers(seed: int, device: str) -> None:
    rng = CounterRNG(seed, torch.tensor([0, 7, 123456], device=device))
    for step, event in ((0, 0), (3, 1), (70_000, 2)):
        assert torch.equal(categorical_triton.philox_uniforms(rng, 5, step, event), rng(5, step, event))


def test_uniforms_of_rows_with_seeds_and_steps_of_their_own(device: str) -> None:
    seeds, steps = (torch.tensor(values, device=device) for values in ([5, 2**63 - 1, 0], [3, 70_000, 1]))
    rng = CounterRNG(seeds, torch.tensor([0, 7, 123456], device=device))
    for step in (steps, 3):
        assert torch.equal(categorical_triton.philox_uniforms(rng, 5, step, 1), rng(5, step, 1))
    one = CounterRNG(5, rng.rows)
    assert torch.equal(categorical_triton.philox_uniforms(one, 5, steps, 1), one(5, steps, 1))


def test_backends_by_device(pretend_gpu: Callable[[tuple[int, int]], None]) -> None:
    pretend_gpu((8, 0))
    assert select_backend("cuda", torch.bfloat16) is block_ops_triton.TRITON
    assert select_backend("cuda", torch.float64) is select_backend("cpu", torch.bfloat16) is block_ops.TORCH
    pretend_gpu((7, 5))  # too old for Triton
    assert select_backend("cuda", torch.bfloat16) is block_ops.TORCH
