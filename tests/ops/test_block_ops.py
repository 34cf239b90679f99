"""Block operations: the Triton kernels and the PyTorch reference agree in values and gradients, at odd sizes too."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from sedd.nn.layers import angles
from sedd.nn.transformer import Modern, Reference, Transformer
from sedd.ops import activation_triton, block_ops, fp8, fp8_triton, residual_norm_triton, rotary_triton
from sedd.ops.block_ops import (
    RMS_NORM,
    TORCH,
    BlockOps,
    NormSpec,
    PackedTokens,
    ResidualBranch,
    Rotation,
    pack_tokens,
)
from sedd.ops.block_ops_triton import TRITON


def draw(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()


def rotation(length: int, d: int, device: str) -> Rotation:
    angle = angles(torch.arange(length, device=device).float(), d)
    return Rotation(angle.cos(), angle.sin())


def run_both(operation: Callable[[BlockOps], tuple[Tensor, ...]], leaves: list[Tensor]) -> list[list[Tensor]]:
    """Return the outputs of both backends, and the gradients of a random combination of them."""
    results = []
    for backend in (TORCH, TRITON):
        outputs = operation(backend)
        total = sum((draw(*a.shape, seed=9 + i).to(a) * a).sum() for i, a in enumerate(outputs))
        results.append([*outputs, *torch.autograd.grad(total, leaves)])
    return results


def assert_close(ours: list[Tensor], theirs: list[Tensor], rtol: float = 1e-4) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= rtol * b.norm() + 1e-6


def residual_norm_case(
    kind: str, dropout: float, size: tuple[int, ...], b: int, device: str
) -> tuple[Callable[..., tuple[Tensor, Tensor]], list[Tensor]]:
    """Return residual + norm + modulation as a function of backend and packed tokens, and its differentiable inputs."""
    h = size[-1]
    x, y, weight, bias = (draw(*shape, seed=i, device=device) for i, shape in enumerate((size, size, (h,), (h,))))
    table = draw(b, 3 * h, seed=5, device=device)  # gate and modulation are views of a wider table
    gate, shift, scale = table.chunk(3, -1)
    norm = {"timed": NormSpec(1e-5, True, weight), "untimed": NormSpec(1e-5, True, weight, bias)}.get(kind, RMS_NORM)
    modulated, centred = kind in ("timed", "modern"), kind in ("timed", "untimed")
    y_bias = draw(h, seed=6, device=device) if centred else None
    leaves = [x, y, *([table] if modulated else []), *(a for a in (norm.weight, norm.bias, y_bias) if a is not None)]
    seed = torch.tensor([2**32 - 5, 12345], device=device) if dropout else None

    def operation(backend: BlockOps, packed: PackedTokens | None = None) -> tuple[Tensor, Tensor]:
        branch = ResidualBranch(y, gate if modulated else None, dropout, seed, y_bias)
        modulation = (shift, scale) if modulated else None
        total, n, _ = backend.residual_norm_modulate(x, branch, norm, modulation, torch.float32, packed)
        return total, n

    return operation, leaves


@pytest.mark.parametrize("size", [(1, 1, 2), (2, 37, 24), (3, 8, 65)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["timed", "untimed", "modern", "modern untimed"])
def test_residual_norm_modulate(kind: str, dropout: float, size: tuple[int, int, int], device: str) -> None:
    operation, leaves = residual_norm_case(kind, dropout, size, size[0], device)
    assert_close(*run_both(operation, leaves))


SELECTED = {
    "none": (3, 5, []),
    "one": (1, 1, [0]),
    "all": (2, 5, range(10)),
    "some": (
        4,
        37,
        [*range(37, 74), 74, *range(111, 148, 2)],
    ),  # none of the first sequence, all of the second, one of the third
}


def pack(which: str, device: str) -> PackedTokens:
    b, length, positions = SELECTED[which]
    selected = torch.zeros(b * length, dtype=torch.bool)
    selected[list(positions)] = True
    return pack_tokens(selected.view(b, length).to(device))


@pytest.mark.parametrize(("dropout", "width"), [(0.0, 12), (0.3, 65)])
@pytest.mark.parametrize("kind", ["timed", "untimed", "modern", "modern untimed"])
@pytest.mark.parametrize("which", SELECTED)
def test_residual_norm_modulate_of_packed_tokens(
    which: str, kind: str, dropout: float, width: int, device: str
) -> None:
    """Every row gets the gate and modulation of its own sequence, and gradients are summed over its rows."""
    packed = pack(which, device)
    size, b = (len(packed.positions), width), len(packed.cu_seqlens) - 1
    operation, leaves = residual_norm_case(kind, dropout, size, b, device)
    assert_close(*run_both(lambda backend: operation(backend, packed), leaves))
    assert_close(*run_both(lambda backend: operation(backend, packed)[1:], leaves))  # as in the final layer


def test_a_mutant_with_wrong_sequences_is_caught(device: str) -> None:
    """The mutant takes the rows of the previous sequence."""
    packed = pack("some", device)
    operation, leaves = residual_norm_case("timed", 0.0, (len(packed.positions), 24), 4, device)
    other = {TORCH: packed, TRITON: packed._replace(cu_seqlens=packed.cu_seqlens.roll(1))}
    with pytest.raises(AssertionError):
        assert_close(*run_both(lambda backend: operation(backend, other[backend]), leaves))


def test_residual_norm_without_a_branch_and_with_one_output_used(device: str) -> None:
    """Without a branch the residual stream is returned as it is; either output may be unused."""
    x, y, weight = draw(2, 5, 24, device=device), draw(2, 5, 24, seed=1, device=device), draw(24, seed=2, device=device)
    norm, branch = NormSpec(1e-5, True, weight), ResidualBranch(y, None)

    def added(backend: BlockOps) -> tuple[Tensor, Tensor]:
        return backend.residual_norm_modulate(x, branch, norm, None, torch.float32)[:2]

    assert TRITON.residual_norm_modulate(x, None, norm, None, torch.float32)[0] is x
    assert_close(
        *run_both(lambda backend: backend.residual_norm_modulate(x, None, norm, None, torch.float32)[:2], [x, weight])
    )
    assert_close(*run_both(lambda backend: added(backend)[1:], [x, y, weight]))
    assert_close(*run_both(lambda backend: added(backend)[:1], [x, y]))


TIME_FREE = {"time_conditioning": False, "embedding_norm": True, "ngrams": 1, "labels": 2}
"""Without gates and modulation the gradient of a branch is that of the stream; a label is one key per sequence."""


@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize(
    "build",
    [partial(Reference, cond_dim=4), partial(Modern, cond_dim=4), partial(Modern, **TIME_FREE)],
    ids=["reference", "modern", "time-free"],
)
def test_a_whole_network_of_packed_tokens(
    build: Callable[..., Transformer], count: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no token is selected."""
    network = build(states=7, width=12, depth=2, heads=2).to(device)
    weights = list(network.parameters())
    with torch.no_grad():
        for i, weight in enumerate(weights):
            weight.copy_(0.5 * draw(*weight.shape, seed=i))
    x, sigma = torch.arange(15, device=device).view(3, 5) % 7, torch.tensor([0.2, 1.0, 2.0], device=device)
    packed = pack_tokens(torch.arange(15, device=device).view(3, 5) >= 15 - count)

    def operation(backend: BlockOps) -> tuple[Tensor]:
        monkeypatch.setattr(block_ops, "select_backend", lambda device, dtype: backend)
        label = torch.tensor([0, 2, 1], device=device) if network.labels else None
        return (network(x, sigma, packed=packed, label=label),)

    assert_close(*run_both(operation, weights), rtol=1e-3)


@pytest.mark.parametrize(("length", "heads", "d"), [(1, 1, 2), (19, 3, 12), (8, 2, 64)])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_qkv_rotary(qk_norm: bool, length: int, heads: int, d: int, device: str) -> None:
    h = heads * d
    n, weight = draw(2, length, h, device=device), draw(3 * h, h, seed=1, device=device)
    qk_scale = (draw(d, seed=2, device=device), draw(d, seed=3, device=device)) if qk_norm else None
    leaves = [n, weight, *(qk_scale or ())]
    assert_close(
        *run_both(lambda backend: backend.qkv_rotary(n, weight, heads, rotation(length, d, device), qk_scale), leaves)
    )


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_mlp(activation: str, biased: bool, rows: int, device: str) -> None:
    n, w1, b1, w2 = (
        draw(*shape, seed=i, device=device) for i, shape in enumerate(((2, rows, 12), (70, 12), (70,), (12, 70)))
    )
    up, leaves = (w1, b1 if biased else None), [n, w1, w2, *([b1] if biased else [])]
    assert_close(*run_both(lambda backend: (backend.mlp(n, up, w2, activation),), leaves))
    with torch.no_grad():
        assert_close([TRITON.mlp(n, up, w2, activation)], [TORCH.mlp(n, up, w2, activation)])


def test_dropout_drops_its_share_without_a_pattern() -> None:
    """Share within 5 standard errors; neighbours, rows and other seeds are uncorrelated (5 as well)."""
    n, dropout = 1_000_000, 0.3
    seeds = [torch.tensor(s) for s in ([0, 0], [1, 0], [0, 1], [2**32 - 1, 77], [123456789, 987654321])]
    masks = [block_ops.dropout_mask(n, dropout, seed).double() - (1 - dropout) for seed in seeds]
    stderr = (dropout * (1 - dropout) / n) ** 0.5
    for mask in masks:
        assert abs(mask.mean()) < 5 * stderr
        for lag in (1, 2, 64, 768, 65_536):
            assert abs((mask[lag:] * mask[:-lag]).mean()) < 5 * dropout * (1 - dropout) / (n - lag) ** 0.5
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs((a * b).mean()) < 5 * dropout * (1 - dropout) / n**0.5


def test_a_mutant_without_the_residual_gradient_is_caught(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = draw(2, 5, 24, device=device), draw(2, 5, 24, seed=1, device=device)
    right = residual_norm_triton.residual_norm_backward
    monkeypatch.setattr(residual_norm_triton, "residual_norm_backward", lambda *args: right(*args[:-1], None))
    branch = ResidualBranch(y, None)
    ours, theirs = run_both(lambda b: b.residual_norm_modulate(x, branch, RMS_NORM, None, torch.float32)[:2], [x, y])
    with pytest.raises(AssertionError):
        assert_close(ours, theirs)


# Float8 -----------------------------------------------------------------------------------------------------


def leaves_for_fp8(shapes: tuple[tuple[int, ...], ...], device: str) -> list[Tensor]:
    """Leaves in a dtype that float8 products on a GPU can return; on a CPU any will do."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [draw(*s, seed=i, device=device).detach().to(dtype).requires_grad_() for i, s in enumerate(shapes)]


@pytest.mark.parametrize("size", [(1, 16), (37, 48), (5, 1040)])
def test_quantize(size: tuple[int, int], device: str) -> None:
    """Rows are rounded to the nearest float8, and NaN stays NaN.

    The interpreter loses a carry: it halves what rounds up to a power of 2. Nor does it have NaN.
    """
    x = draw(*size, device=device).detach() * torch.logspace(-9, 9, size[0], device=device)[:, None]
    x[0, 3] = 0
    for matrix in (x, x.t().contiguous().t()):
        ours, theirs = fp8_triton.quantize(matrix), fp8.quantize_rowwise(matrix)
        torch.testing.assert_close(ours.scale, theirs.scale)
        difference = ours.values.float() - theirs.values.float()
        halved = ours.values.float() == theirs.values.float() / 2
        assert ((difference == 0) | (halved if device == "cpu" else False)).float().mean() > 0.99
        assert (difference == 0).float().mean() > 0.85
        assert ours.values.float()[0, 3] == 0
    assert fp8_triton.quantize(0 * x).values.float().abs().max() == 0
    assert device == "cpu" or fp8_triton.quantize(x * torch.nan).values.float().isnan().all()


@pytest.mark.parametrize("size", [(2, 9, 48), (1, 3, 272)])
def test_residual_norm_quantizes_its_output(size: tuple[int, int, int], device: str) -> None:
    x, y = leaves_for_fp8((size, size), device)
    _, n, ours = TRITON.residual_norm_modulate(x, ResidualBranch(y, None), RMS_NORM, None, x.dtype, None, True)
    theirs = TORCH.residual_norm_modulate(x, ResidualBranch(y, None), RMS_NORM, None, x.dtype, None, True)[2]
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=2**-8, atol=0)
    difference = (ours.values.float() - theirs.values.float()).abs()
    assert (difference < 2**-3 * theirs.values.float().abs() + 1).float().mean() > 0.85
    assert not ours.values.requires_grad
    assert n.requires_grad


FP8_RTOL = {"cpu": 0.2, "cuda": 0.02}
"""Relative difference of the backends; see `test_quantize` for why it is larger on a CPU."""


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_fp8_mlp(activation: str, biased: bool, device: str) -> None:
    """Agrees with the float8 reference but for single roundings, which is near the exact result but not equal to it."""
    n, w1, b1, w2 = leaves_for_fp8(((2, 19, 32), (64, 32), (64,), (32, 64)), device)
    up, leaves = (w1, b1 if biased else None), [n, w1, w2, *([b1] if biased else [])]
    x_fp8 = fp8.quantize_rowwise(n.detach().flatten(0, -2))
    theirs, ours = run_both(lambda backend: (backend.mlp(n, up, w2, activation, x_fp8),), leaves)
    assert_close(ours, theirs, rtol=FP8_RTOL[device])
    exact, _ = run_both(lambda backend: (backend.mlp(n, up, w2, activation),), leaves)
    assert_close(theirs, exact, rtol=0.1)
    with pytest.raises(AssertionError):
        assert_close(theirs, exact, rtol=0.005)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_fp8_qkv_rotary(qk_norm: bool, device: str) -> None:
    n, weight, *scales = leaves_for_fp8(((2, 9, 32), (96, 32), (16,), (16,)), device)
    qk_scale = (scales[0], scales[1]) if qk_norm else None
    x_fp8 = fp8.quantize_rowwise(n.detach().flatten(0, -2))
    leaves = [n, weight, *(qk_scale or ())]
    theirs, ours = run_both(
        lambda backend: backend.qkv_rotary(n, weight, 2, rotation(9, 16, device), qk_scale, x_fp8), leaves
    )
    assert_close(ours, theirs, rtol=FP8_RTOL[device])
    exact, _ = run_both(lambda backend: backend.qkv_rotary(n, weight, 2, rotation(9, 16, device), qk_scale), leaves)
    assert_close(theirs, exact, rtol=0.1)
    for i in (0, 3):  # an output, and the gradient of the input
        assert (theirs[i] - exact[i]).norm() > 0.005 * exact[i].norm()


def assert_quantized(ours: fp8.Fp8Tensor, matrix: Tensor) -> None:
    """Check that a matrix was quantized by rows, but for roundings of its entries and those of `test_quantize`."""
    theirs = fp8.quantize_rowwise(matrix.float())
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=2**-8, atol=0)
    assert (
        (ours.values.float() - theirs.values.float()).abs() <= theirs.values.float().abs() / 8
    ).float().mean() > 0.85
    with pytest.raises(AssertionError):  # of the rows of others
        torch.testing.assert_close(ours.scale.flip(0), theirs.scale, rtol=2**-8, atol=0)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("heads", "d"), [(3, 12), (2, 64)])
def test_the_gradient_of_qkv_is_quantized(heads: int, d: int, qk_norm: bool, device: str) -> None:
    """And is the same as without; the number of rows is no multiple of those of a program."""
    dq, dk, dv = (draw(1, 13, heads, d, seed=i, device=device).detach() for i in range(3))
    qkv = draw(13, 3 * heads * d, seed=3, device=device).detach()
    qk_scale = tuple(draw(d, seed=i, device=device).detach() for i in (4, 5)) if qk_norm else None
    out = fp8_triton.empty_rowwise(qkv)
    inputs = dq, dk, dv, qkv, *rotation(13, d, device), qk_scale, RMS_NORM.eps
    with_fp8, _ = rotary_triton.qk_norm_rotary_backward(*inputs, out)
    without, _ = rotary_triton.qk_norm_rotary_backward(*inputs)
    assert torch.equal(with_fp8, without)
    assert_quantized(out, without)


@pytest.mark.parametrize("sum_columns", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 48), (70, 2500), (130, 48)])
def test_the_gradient_of_the_activation_is_quantized(rows: int, width: int, sum_columns: bool, device: str) -> None:
    """And all else is as without; rows are several loads, and sums of columns those of several programs."""
    z, d_inner = (draw(rows, width, seed=i, device=device).detach() for i in range(2))
    *ours, out = fp8_triton.activation_backward_and_quantize(z, d_inner.clone(), "relu2", sum_columns)
    theirs = activation_triton.activation_backward(z, d_inner.clone(), "relu2", sum_columns)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    if rows > 1:
        assert_quantized(out, theirs[1])
