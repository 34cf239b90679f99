"""Sums of rows by their key, however often a key comes and wherever its run is cut."""

import pytest
import torch
from torch import Tensor

from sedd.ops import block_ops, block_ops_triton, embedding_triton

COUNT = 23


def keys(kind: str, n: int, generator: torch.Generator) -> Tensor:
    """One key alone, each key once or so, few, or one that is half of all."""
    drawn = torch.randint(COUNT - 1, (n,), generator=generator)
    half = torch.where(torch.rand(n, generator=generator) < 0.5, COUNT - 1, drawn)
    return {"one": torch.full((n,), 5), "each": torch.arange(n) % COUNT, "few": drawn % 2, "half": half}[kind]


@pytest.mark.parametrize("piece", [4, 8, 64])
@pytest.mark.parametrize("kind", ["one", "each", "few", "half"])
@pytest.mark.parametrize(("n", "width"), [(1, 3), (7, 16), (64, 5), (65, 300), (150, 1)])
def test_sums(n: int, width: int, kind: str, piece: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of float64, in as many rounds as it takes; twice the same bits."""
    monkeypatch.setattr(embedding_triton, "PIECE", piece)
    generator = torch.Generator().manual_seed(n)
    of, rows = keys(kind, n, generator).to(device), torch.randn(n, width, generator=generator).to(device)
    exact = torch.zeros(COUNT, width, dtype=torch.float64, device=device).index_add(0, of, rows.double())
    first, second = (embedding_triton.summed(rows, of, COUNT) for _ in range(2))
    torch.testing.assert_close(first.double(), exact, rtol=1e-6, atol=1e-5)
    assert torch.equal(first, second)


def test_nothing_to_sum(device: str) -> None:
    none = torch.zeros(0, dtype=torch.long, device=device)
    assert torch.equal(
        embedding_triton.summed(torch.zeros(0, 4, device=device), none, 3), torch.zeros(3, 4, device=device)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_an_embedding(dtype: torch.dtype, device: str) -> None:
    """That of the definition: to the bit where no token comes twice; else that of float64, rounded once."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(COUNT, 12, generator=generator).to(device, dtype).requires_grad_()
    for x in (torch.randint(COUNT, (3, 20), generator=generator), torch.randperm(COUNT, generator=generator)[None, :9]):
        sent = torch.randn(*x.shape, 12, generator=generator).to(device, dtype)
        ours, theirs = (via.looked(x.to(device), table) for via in (block_ops_triton, block_ops))
        assert torch.equal(ours, theirs)
        (a,), (b,) = (torch.autograd.grad(said, [table], sent) for said in (ours, theirs))
        assert a.dtype == dtype
        if x.unique().numel() == x.numel():
            assert torch.equal(a, b)
        exact = torch.zeros(COUNT, 12, dtype=torch.float64).index_add(0, x.flatten(), sent.cpu().double().flatten(0, 1))
        torch.testing.assert_close(a.cpu().double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
