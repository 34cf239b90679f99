"""Packed tokens: after attention the last block computes only the selected rows, and no result changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sedd.nn.transformer import Modern, Reference, Transformer
from sedd.objectives import DenoisingScoreEntropy
from sedd.ops.block_ops import PackedTokens, gather, pack_tokens
from sedd.ops.fused_loss import fused_loss
from sedd.parameterization import ScoreModel
from sedd.process import Absorbing
from sedd.runtime import activation_checkpointing

N, B, L, H = 11, 5, 7, 12
PROCESS = Absorbing(N)
OBJECTIVE = DenoisingScoreEntropy()
MASKED = {
    "none": torch.zeros(B, L, dtype=torch.bool),
    "some": torch.arange(B * L).view(B, L) % 7 % torch.tensor([[2], [3], [1], [4], [5]]) > 0,  # none of the third
    "one": torch.arange(B * L).view(B, L) == 22,
    "all": torch.ones(B, L, dtype=torch.bool),
}
architectures = pytest.mark.parametrize("architecture", [Reference, Modern])


def build_network(architecture: type[Transformer], timed: bool = True, labels: int = 0) -> Transformer:
    network = architecture(
        states=N + 1, width=H, depth=2, heads=2, cond_dim=4, time_conditioning=timed, labels=labels
    ).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return network


@contextmanager
def packed_after_the_last_block(network: Transformer) -> Iterator[None]:
    """Select the tokens after the last block, as where it is compiled."""
    network.compiled = True
    yield
    network.compiled = False


def losses_and_gradients(
    network: Transformer, masked: Tensor, valid: Tensor | None = None, label: Tensor | None = None
) -> list[Tensor]:
    """Return the losses of all positions and all gradients."""
    generator = torch.Generator().manual_seed(1)
    x_0 = torch.randint(N, (B, L), generator=generator)
    t, weight = torch.rand(2, B, generator=generator, dtype=torch.float64)
    model = ScoreModel(network, PROCESS).bind(label=label)
    loss = fused_loss(OBJECTIVE, model, torch.where(masked, N, x_0), x_0, t, weight, valid)
    network.zero_grad()
    loss.total.backward()
    return [loss.positions, *(parameter.grad for parameter in network.parameters())]


def relative_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest relative difference."""
    return max(((a - b).norm() / (b.norm() + 1e-300)).item() for a, b in zip(ours, theirs, strict=True))


class AccumulatingWrites(TorchDispatchMode):
    """Records writes that add to the same entry from several threads, in any order, on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_put" in str(function) and len(args) > 3 and args[3]:
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@architectures
def test_nothing_is_added_in_any_order(architecture: type[Transformer]) -> None:
    """So that two threads compute the same bits every time."""
    network = build_network(architecture)
    with AccumulatingWrites() as writes:
        losses_and_gradients(network, MASKED["some"])
    assert writes.found == []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, *others = (losses_and_gradients(network, MASKED["some"]) for _ in range(3))
    finally:
        torch.set_num_threads(threads)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("timed", [True, False])
@architectures
def test_losses_and_gradients_are_equal(
    architecture: type[Transformer], timed: bool, masked: str, padded: bool, checkpointing: str
) -> None:
    network, valid = build_network(architecture, timed), torch.arange(L) < torch.tensor([[L], [3], [1], [L - 1], [2]])
    network.activation_checkpointing = getattr(activation_checkpointing, checkpointing)
    inputs = MASKED[masked], valid if padded else None
    with packed_after_the_last_block(network):
        expected = losses_and_gradients(network, *inputs)
    assert relative_difference(losses_and_gradients(network, *inputs), expected) < 1e-10
    assert masked == "none" or all(a.any() for a in expected)


@architectures
def test_labels(architecture: type[Transformer]) -> None:
    network, label = build_network(architecture, labels=3), torch.tensor([0, 3, 1, 2, 0])
    with packed_after_the_last_block(network):
        expected = losses_and_gradients(network, MASKED["some"], label=label)
        other = losses_and_gradients(network, MASKED["some"], label=label.flip(0))
    assert (
        relative_difference(losses_and_gradients(network, MASKED["some"], label=label), expected)
        < 1e-10
        < relative_difference(other, expected)
    )


@architectures
def test_hidden_states_of_packed_tokens(architecture: type[Transformer]) -> None:
    """For batches of any number of dimensions: positions are counted along them in order."""
    network, packed = build_network(architecture), pack_tokens(MASKED["some"].view(1, B, L))
    x, sigma = torch.arange(B * L).view(1, B, L) % N, torch.linspace(0.1, 2, B, dtype=torch.float64)[None]
    torch.testing.assert_close(
        network.hidden(x, sigma, packed=packed), gather(network.hidden(x, sigma), packed), rtol=1e-10, atol=0
    )


@architectures
def test_flops_of_the_other_rows_are_saved(architecture: type[Transformer]) -> None:
    """Three matrices of the last block, of 1, 4 and 4 times H² entries, multiply the selected rows only."""
    network, masked = build_network(architecture), MASKED["some"]
    with FlopCounterMode(display=False) as less:
        losses_and_gradients(network, masked)
    with packed_after_the_last_block(network), FlopCounterMode(display=False) as more:
        losses_and_gradients(network, masked)
    saved = int((~masked).sum()) * 9 * H * H * 2 * 3  # 2 FLOPs per product, 2 products in the backward pass
    assert more.get_total_flops() - less.get_total_flops() == saved


@architectures
def test_a_mutant_is_caught(architecture: type[Transformer], monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant gives rows the σ of the next sequence, which changes nothing without time conditioning."""
    for timed in (True, False):
        network = build_network(architecture, timed)
        right = losses_and_gradients(network, MASKED["some"])
        with monkeypatch.context() as patch:
            patch.setattr(PackedTokens, "sequence", property(lambda packed: (packed.positions // L + 1) % B))
            assert (relative_difference(losses_and_gradients(network, MASKED["some"]), right) > 1e-3) == timed


def test_sequences_of_packed_tokens() -> None:
    for masked in MASKED.values():
        packed = pack_tokens(masked)
        assert packed.seq_len == L
        assert torch.equal(packed.sequence, masked.nonzero()[:, 0])
        assert torch.equal(packed.cu_seqlens.diff(), masked.sum(-1))
        assert packed.cu_seqlens[0] == 0
