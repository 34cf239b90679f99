"""The twins of what stands between matrix products: values and gradients, odd sizes, dropout, the same bits twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sedd.nn import transformer
from sedd.nn.layers import Rotary
from sedd.nn.transformer import Modern, Reference, Transformer
from sedd.ops import block_ops, block_ops_triton, fp8, fp8_triton, residual_norm_triton
from sedd.ops.block_ops import RMS_NORM, Modulation, NormSpec, ResidualBranch
from sedd.ops.packed_tokens import PackedTokens, unknown_rows


def draw(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()


def both(work: Callable[[Any], tuple[Tensor, ...]], leaves: list[Tensor]) -> list[list[Tensor]]:
    """What the twins say, and the gradients of a random combination of it."""
    said = []
    for twin in (block_ops, block_ops_triton):
        outputs = work(twin)
        total = sum((draw(*a.shape, seed=9 + i).to(a) * a).sum() for i, a in enumerate(outputs))
        said.append([*outputs, *torch.autograd.grad(total, leaves)])
    return said


def close(ours: list[Tensor], theirs: list[Tensor], rtol: float = 1e-4) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= rtol * b.norm() + 1e-6


def joining(
    kind: str, rate: float, size: tuple[int, ...], b: int, device: str
) -> tuple[Callable[..., tuple[Tensor, Tensor]], list[Tensor]]:
    """A join of a twin, of sequences or of some rows of theirs, and all that has a gradient."""
    h = size[-1]
    x, y, weight, bias = (draw(*shape, seed=i, device=device) for i, shape in enumerate((size, size, (h,), (h,))))
    table = draw(b, 3 * h, seed=5, device=device)  # gates and changes are columns of a wider table
    gate, shift, scale = table.chunk(3, -1)
    norm = {"timed": NormSpec(1e-5, True, weight), "untimed": NormSpec(1e-5, True, weight, bias)}.get(kind, RMS_NORM)
    told, centred = kind in ("timed", "modern"), kind in ("timed", "untimed")
    lift = draw(h, seed=6, device=device) if centred else None
    leaves = [x, y, *([table] if told else []), *(a for a in (norm.weight, norm.bias, lift) if a is not None)]
    seed = torch.tensor([2**32 - 5, 12345], device=device) if rate else None

    def work(twin: Any, rows: PackedTokens | None = None) -> tuple[Tensor, Tensor]:
        branch = ResidualBranch(y, gate if told else None, rate, seed, lift)
        total, n, _ = twin.join(x, branch, norm, Modulation(shift, scale) if told else None, torch.float32, rows)
        return total, n

    return work, leaves


@pytest.mark.parametrize("size", [(1, 1, 2), (2, 37, 24), (3, 8, 65)])
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["timed", "untimed", "modern", "modern untimed"])
def test_join(kind: str, rate: float, size: tuple[int, int, int], device: str) -> None:
    work, leaves = joining(kind, rate, size, size[0], device)
    close(*both(work, leaves))


RAGGED = {
    "none": (3, 5, []),
    "one": (1, 1, [0]),
    "all": (2, 5, range(10)),
    "some": (4, 37, [*range(37, 74), 74, *range(111, 148, 2)]),  # nothing of the first, all of the second, one row
}


def ragged(of: str, device: str) -> PackedTokens:
    b, length, kept = RAGGED[of]
    unknown = torch.zeros(b * length, dtype=torch.bool)
    unknown[list(kept)] = True
    return unknown_rows(unknown.view(b, length).to(device))


@pytest.mark.parametrize(("rate", "width"), [(0.0, 12), (0.3, 65)])
@pytest.mark.parametrize("kind", ["timed", "untimed", "modern", "modern untimed"])
@pytest.mark.parametrize("of", RAGGED)
def test_join_of_rows(of: str, kind: str, rate: float, width: int, device: str) -> None:
    """What each sequence is told goes to its rows, however many it has; sums over rows are of its own."""
    rows = ragged(of, device)
    size, b = (len(rows.kept), width), len(rows.starts) - 1
    work, leaves = joining(kind, rate, size, b, device)
    close(*both(lambda twin: work(twin, rows), leaves))
    close(*both(lambda twin: work(twin, rows)[1:], leaves))  # at the end nobody asks for the stream


def test_a_mutant_of_rows_is_seen(device: str) -> None:
    """One that takes the rows of the sequence before."""
    rows = ragged("some", device)
    work, leaves = joining("timed", 0.0, (len(rows.kept), 24), 4, device)
    other = {block_ops: rows, block_ops_triton: rows._replace(starts=rows.starts.roll(1))}
    with pytest.raises(AssertionError):
        close(*both(lambda twin: work(twin, other[twin]), leaves))


def test_join_of_nothing_and_at_the_end(device: str) -> None:
    """Without a branch the stream is the same tensor; at the end nobody asks for the stream."""
    x, y, weight = draw(2, 5, 24, device=device), draw(2, 5, 24, seed=1, device=device), draw(24, seed=2, device=device)
    norm = NormSpec(1e-5, True, weight)
    assert block_ops_triton.join(x, None, norm, None, torch.float32)[0] is x
    close(*both(lambda twin: twin.join(x, None, norm, None, torch.float32)[:2], [x, weight]))
    close(*both(lambda twin: twin.join(x, ResidualBranch(y, None), norm, None, torch.float32)[1:2], [x, y, weight]))
    close(*both(lambda twin: twin.join(x, ResidualBranch(y, None), norm, None, torch.float32)[:1], [x, y]))


@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize("style", [Reference, Modern])
def test_a_network_of_rows(style: type[Transformer], count: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes through a whole network with either twin finds the same, though no row may count."""
    network = style(states=7, width=12, depth=2, heads=2, cond=4).to(device)
    weights = list(network.parameters())
    with torch.no_grad():
        for i, weight in enumerate(weights):
            weight.copy_(0.5 * draw(*weight.shape, seed=i))
    x, sigma = torch.arange(15, device=device).view(3, 5) % 7, torch.tensor([0.2, 1.0, 2.0], device=device)
    rows = unknown_rows(torch.arange(15, device=device).view(3, 5) >= 15 - count)

    def work(twin: Any) -> tuple[Tensor]:
        monkeypatch.setattr(transformer.kernels, "between", lambda device, dtype: twin)
        return (network(x, sigma, rows=rows),)

    close(*both(work, weights), rtol=1e-3)


@pytest.mark.parametrize(("length", "heads", "d"), [(1, 1, 2), (19, 3, 12), (8, 2, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_turned(normed: bool, length: int, heads: int, d: int, device: str) -> None:
    h = heads * d
    n, weight = draw(2, length, h, device=device), draw(3 * h, h, seed=1, device=device)
    gains = (draw(d, seed=2, device=device), draw(d, seed=3, device=device)) if normed else None
    rotary = Rotary(d).to(device)
    leaves = [n, weight, *(gains or ())]
    close(*both(lambda twin: twin.turned(n, weight, heads, rotary(length), gains), leaves))


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("bend", ["gelu", "relu2"])
def test_thought(bend: str, biased: bool, rows: int, device: str) -> None:
    n, w1, b1, w2 = (
        draw(*shape, seed=i, device=device) for i, shape in enumerate(((2, rows, 12), (70, 12), (70,), (12, 70)))
    )
    up, leaves = (w1, b1 if biased else None), [n, w1, w2, *([b1] if biased else [])]
    close(*both(lambda twin: (twin.thought(n, up, w2, bend),), leaves))
    with torch.no_grad():
        close([block_ops_triton.thought(n, up, w2, bend)], [block_ops.thought(n, up, w2, bend)])


def test_dropout_leaves_the_share_it_says_and_no_pattern() -> None:
    """Share within 5 standard errors; neighbours, rows and other seeds know nothing of each other (5 as well)."""
    n, rate = 1_000_000, 0.3
    seeds = [torch.tensor(s) for s in ([0, 0], [1, 0], [0, 1], [2**32 - 1, 77], [123456789, 987654321])]
    kept = [block_ops.survivors(n, rate, seed).double() - (1 - rate) for seed in seeds]
    spread = (rate * (1 - rate) / n) ** 0.5
    for mask in kept:
        assert abs(mask.mean()) < 5 * spread
        for lag in (1, 2, 64, 768, 65_536):
            assert abs((mask[lag:] * mask[:-lag]).mean()) < 5 * rate * (1 - rate) / (n - lag) ** 0.5
    for i, a in enumerate(kept):
        for b in kept[:i]:
            assert abs((a * b).mean()) < 5 * rate * (1 - rate) / n**0.5


def test_a_mutant_is_seen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that forgets what comes down the stream."""
    x, y = draw(2, 5, 24, device=device), draw(2, 5, 24, seed=1, device=device)
    right = residual_norm_triton.join_back
    monkeypatch.setattr(residual_norm_triton, "join_back", lambda *given: right(*given[:-1], None))
    ours, theirs = both(lambda twin: twin.join(x, ResidualBranch(y, None), RMS_NORM, None, torch.float32)[:2], [x, y])
    with pytest.raises(AssertionError):
        close(ours, theirs)


# Products of eighths ----------------------------------------------------------------------------------------


def halves(shapes: tuple[tuple[int, ...], ...], device: str) -> list[Tensor]:
    """Leaves of the dtype that a card gives products of eighths in; on a CPU any will do."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [draw(*s, seed=i, device=device).detach().to(dtype).requires_grad_() for i, s in enumerate(shapes)]


@pytest.mark.parametrize("size", [(1, 16), (37, 48), (5, 1040)])
def test_pressed(size: tuple[int, int], device: str) -> None:
    """The nearest of float8, row by row, and no number stays none.

    The interpreter loses a carry: what rounds up to a power of 2, it halves. Nor does it know what is no number.
    """
    x = draw(*size, device=device).detach() * torch.logspace(-9, 9, size[0], device=device)[:, None]
    x[0, 3] = 0
    for given in (x, x.t().contiguous().t()):
        ours, theirs = fp8_triton.press(given), fp8.eighths(given)
        torch.testing.assert_close(ours.scale, theirs.scale)
        apart = ours.values.float() - theirs.values.float()
        halved = ours.values.float() == theirs.values.float() / 2
        assert ((apart == 0) | (halved if device == "cpu" else False)).float().mean() > 0.99
        assert (apart == 0).float().mean() > 0.85
        assert ours.values.float()[0, 3] == 0
    assert fp8_triton.press(0 * x).values.float().abs().max() == 0
    assert device == "cpu" or fp8_triton.press(x * torch.nan).values.float().isnan().all()


@pytest.mark.parametrize("size", [(2, 9, 48), (1, 3, 272)])
def test_a_join_presses_what_it_gives(size: tuple[int, int, int], device: str) -> None:
    x, y = halves((size, size), device)
    _, n, few = block_ops_triton.join(x, ResidualBranch(y, None), RMS_NORM, None, x.dtype, None, True)
    theirs = block_ops.join(x, ResidualBranch(y, None), RMS_NORM, None, x.dtype, None, True)[2]
    assert few is not None
    assert theirs is not None
    torch.testing.assert_close(few.scale, theirs.scale, rtol=2**-8, atol=0)
    assert (
        (few.values.float() - theirs.values.float()).abs() < 2**-3 * theirs.values.float().abs() + 1
    ).float().mean() > 0.85
    assert not few.values.requires_grad
    assert n.requires_grad


NEAR = {"cpu": 0.2, "cuda": 0.02}
"""How near the twins are; see `test_pressed` for why it is not nearer on a CPU."""


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("bend", ["gelu", "relu2"])
def test_narrow_thought(bend: str, biased: bool, device: str) -> None:
    """What the definition of float8 says, but for single roundings; and near what is meant, at a distance."""
    n, w1, b1, w2 = halves(((2, 19, 32), (64, 32), (64,), (32, 64)), device)
    up, leaves = (w1, b1 if biased else None), [n, w1, w2, *([b1] if biased else [])]
    few = fp8.eighths(n.detach().flatten(0, -2))
    theirs, ours = both(lambda twin: (twin.thought(n, up, w2, bend, few),), leaves)
    close(ours, theirs, rtol=NEAR[device])
    meant, _ = both(lambda twin: (twin.thought(n, up, w2, bend),), leaves)
    close(theirs, meant, rtol=0.1)
    with pytest.raises(AssertionError):
        close(theirs, meant, rtol=0.005)


def test_narrow_turned(device: str) -> None:
    n, weight = halves(((2, 9, 32), (96, 32)), device)
    rotation = Rotary(16).to(device)(9)
    few = fp8.eighths(n.detach().flatten(0, -2))
    theirs, ours = both(lambda twin: twin.turned(n, weight, 2, rotation, None, few), [n, weight])
    close(ours, theirs, rtol=NEAR[device])
    exact, _ = both(lambda twin: twin.turned(n, weight, 2, rotation, None), [n, weight])
    close(theirs, exact, rtol=0.1)
