"""Segment sums and the gradient of an embedding, however often a key occurs and wherever its segment is split."""

import pytest
import torch
from torch import Tensor

from sedd.nn.layers import NgramEmbedding
from sedd.ops import embedding_triton
from sedd.ops.block_ops import TORCH, Lookup
from sedd.ops.block_ops_triton import TRITON

COUNT = 23


def keys(kind: str, n: int, generator: torch.Generator) -> Tensor:
    """One key only, every key about once, two keys, or one that is half of all."""
    drawn = torch.randint(COUNT - 1, (n,), generator=generator)
    half = torch.where(torch.rand(n, generator=generator) < 0.5, COUNT - 1, drawn)
    return {"one": torch.full((n,), 5), "each": torch.arange(n) % COUNT, "two": drawn % 2, "half": half}[kind]


@pytest.mark.parametrize("chunk", [4, 8, 64])
@pytest.mark.parametrize("kind", ["one", "each", "two", "half"])
@pytest.mark.parametrize(("n", "width"), [(1, 3), (7, 16), (64, 5), (65, 300), (150, 1)])
def test_segment_sum(n: int, width: int, kind: str, chunk: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums in float64, in as many rounds as needed; twice the same bits."""
    monkeypatch.setattr(embedding_triton, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(n)
    ids, rows = keys(kind, n, generator).to(device), torch.randn(n, width, generator=generator).to(device)
    exact = torch.zeros(COUNT, width, dtype=torch.float64, device=device).index_add(0, ids, rows.double())
    first, second = (embedding_triton.segment_sum(rows, ids, COUNT) for _ in range(2))
    torch.testing.assert_close(first.double(), exact, rtol=1e-6, atol=1e-5)
    assert torch.equal(first, second)


def test_segment_sum_of_no_rows(device: str) -> None:
    none = torch.zeros(0, dtype=torch.long, device=device)
    assert torch.equal(
        embedding_triton.segment_sum(torch.zeros(0, 4, device=device), none, 3), torch.zeros(3, 4, device=device)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_an_embedding(dtype: torch.dtype, device: str) -> None:
    """The reference's, to the bit where no token occurs twice; else that of float64, rounded once."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(COUNT, 12, generator=generator).to(device, dtype).requires_grad_()
    for x in (torch.randint(COUNT, (3, 20), generator=generator), torch.randperm(COUNT, generator=generator)[None, :9]):
        upstream = torch.randn(*x.shape, 12, generator=generator).to(device, dtype)
        lookups = [Lookup(x.to(device), table)]
        ours, theirs = (backend.embed(lookups, None, False, dtype) for backend in (TRITON, TORCH))
        assert torch.equal(ours, theirs)
        (a,), (b,) = (torch.autograd.grad(rows, [table], upstream) for rows in (ours, theirs))
        assert a.dtype == dtype
        if x.unique().numel() == x.numel():
            assert torch.equal(a, b)
        exact = torch.zeros(COUNT, 12, dtype=torch.float64).index_add(
            0, x.flatten(), upstream.cpu().double().flatten(0, 1)
        )
        torch.testing.assert_close(a.cpu().double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("with_position", [True, False])
@pytest.mark.parametrize("tables", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("width", [3, 48, 1040])
def test_embed_and_norm(width: int, tables: int, with_position: bool, device: str) -> None:
    """Values and all gradients are those of the reference; with more tables than the kernel has they are its steps."""
    b, length, generator = 3, 7, torch.Generator().manual_seed(tables)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    rows = [COUNT, 5, 40, 1, 9][:tables]
    lookups = [Lookup(torch.randint(r, (b, length), generator=generator).to(device), draw(r, width)) for r in rows]
    position = draw(length, width) if with_position else None
    leaves = [*(lookup.table for lookup in lookups), *([] if position is None else [position])]
    upstream = draw(b, length, width).detach()
    results = []
    for backend in (TRITON, TORCH):
        n = backend.embed(lookups, position, True, torch.float32)
        results.append([n.detach(), *torch.autograd.grad(n, leaves, upstream)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if tables > 1:  # a mutant: the keys of two tables are exchanged
        mutant = [
            Lookup(lookups[1].keys, lookups[0].table),
            Lookup(lookups[0].keys % 5, lookups[1].table),
            *lookups[2:],
        ]
        assert not torch.allclose(TRITON.embed(mutant, position, True, torch.float32), results[0][0], atol=1e-3)
    rounded = TRITON.embed(lookups, position, True, torch.bfloat16)
    torch.testing.assert_close(rounded.float(), results[1][0], rtol=2**-7, atol=1e-5)
    grads = torch.autograd.grad(rounded, leaves, upstream.bfloat16())
    for ours, theirs in zip(grads, results[1][1:], strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_ngram_tables_are_joined_on_a_gpu(device: str) -> None:
    """Where there are more positions than rows; elsewhere they are read one by one."""
    made = NgramEmbedding(states=3, width=4, longest=3, causal=False).to(device)
    for count, joined in ((63, False), (64, device == "cuda")):
        x = torch.zeros(1, count, dtype=torch.long, device=device)
        assert len(made.lookups(x, None)) == (2 if joined else 6)
