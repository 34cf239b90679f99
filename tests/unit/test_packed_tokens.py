"""What nobody reads is not computed: after attention the last block does the rows that count, and nothing changes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sedd import registry
from sedd.diffusion.objective import DenoisingScoreEntropy
from sedd.diffusion.parameterization import ScoreModel
from sedd.diffusion.process import Absorbing
from sedd.diffusion.schedule import LogLinear
from sedd.nn.transformer import Modern, Reference, Transformer
from sedd.ops.packed_tokens import PackedTokens, gather, pack_tokens
from sedd.training.loss import FusedLoss

N, B, L, H = 11, 5, 7, 12
PROCESS = Absorbing(N)
OBJECTIVE = DenoisingScoreEntropy(PROCESS, LogLinear())
MASKED = {
    "none": torch.zeros(B, L, dtype=torch.bool),
    "some": torch.arange(B * L).view(B, L) % 7 % torch.tensor([[2], [3], [1], [4], [5]]) > 0,  # none of the third
    "one": torch.arange(B * L).view(B, L) == 22,
    "all": torch.ones(B, L, dtype=torch.bool),
}
styles = pytest.mark.parametrize("style", [Reference, Modern])


def network(style: type[Transformer], timed: bool = True, labels: int = 0) -> Transformer:
    made = style(states=N + 1, width=H, depth=2, heads=2, cond_dim=4, time_conditioning=timed, labels=labels).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return made


@contextmanager
def at_the_end(made: Transformer) -> Iterator[None]:
    """Rows are left out after the last block, as they are where it is compiled."""
    made.compiled = True
    yield
    made.compiled = False


def stepped(
    made: Transformer, masked: Tensor, valid: Tensor | None = None, label: Tensor | None = None
) -> list[Tensor]:
    """Losses of all positions, and all gradients."""
    generator = torch.Generator().manual_seed(1)
    x_0 = torch.randint(N, (B, L), generator=generator)
    t, weight = torch.rand(2, B, generator=generator, dtype=torch.float64)
    model = ScoreModel(made, PROCESS).bind(label=label)
    loss = FusedLoss(OBJECTIVE, model)(torch.where(masked, N, x_0), x_0, t, weight, valid)
    made.zero_grad()
    loss.total.backward()
    return [loss.positions, *(parameter.grad for parameter in made.parameters())]


def far(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative difference."""
    return max(((a - b).norm() / (b.norm() + 1e-300)).item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("timed", [True, False])
@styles
def test_losses_and_gradients_stay(
    style: type[Transformer], timed: bool, masked: str, padded: bool, recompute: str
) -> None:
    made, valid = network(style, timed), torch.arange(L) < torch.tensor([[L], [3], [1], [L - 1], [2]])
    made.activation_checkpointing = registry.ACTIVATION_CHECKPOINTING.load(recompute)
    given = MASKED[masked], valid if padded else None
    with at_the_end(made):
        expected = stepped(made, *given)
    assert far(stepped(made, *given), expected) < 1e-10
    assert masked == "none" or all(a.any() for a in expected)


@styles
def test_labels_are_told(style: type[Transformer]) -> None:
    made, label = network(style, labels=3), torch.tensor([0, 3, 1, 2, 0])
    with at_the_end(made):
        expected = stepped(made, MASKED["some"], label=label)
        other = stepped(made, MASKED["some"], label=label.flip(0))
    assert far(stepped(made, MASKED["some"], label=label), expected) < 1e-10 < far(other, expected)


@styles
def test_the_last_states_are_those_of_the_rows(style: type[Transformer]) -> None:
    """Whatever the batch looks like: rows count along its axes, one after another."""
    made, rows = network(style), pack_tokens(MASKED["some"].view(1, B, L))
    x, sigma = torch.arange(B * L).view(1, B, L) % N, torch.linspace(0.1, 2, B, dtype=torch.float64)[None]
    torch.testing.assert_close(
        made.hidden(x, sigma, rows=rows), gather(made.hidden(x, sigma), rows), rtol=1e-10, atol=0
    )


@styles
def test_nothing_is_computed_for_the_others(style: type[Transformer]) -> None:
    """Three matrices of the last block, of 1, 4 and 4 times H² entries, leave out the rows that do not count."""
    made, masked = network(style), MASKED["some"]
    with FlopCounterMode(display=False) as less:
        stepped(made, masked)
    with at_the_end(made), FlopCounterMode(display=False) as more:
        stepped(made, masked)
    spared = int((~masked).sum()) * 9 * H * H * 2 * 3  # a product is two operations; and two products on the way back
    assert more.get_total_flops() - less.get_total_flops() == spared


@styles
def test_a_mutant_is_seen(style: type[Transformer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that take the σ of the next sequence; who is not told σ does not mind."""
    for timed in (True, False):
        made = network(style, timed)
        right = stepped(made, MASKED["some"])
        with monkeypatch.context() as patch:
            patch.setattr(PackedTokens, "sequence", property(lambda packed: (packed.positions // L + 1) % B))
            assert (far(stepped(made, MASKED["some"]), right) > 1e-3) == timed


def test_rows_know_their_sequences() -> None:
    for masked in MASKED.values():
        rows = pack_tokens(masked)
        assert rows.seq_len == L
        assert torch.equal(rows.sequence, masked.nonzero()[:, 0])
        assert torch.equal(rows.cu_seqlens.diff(), masked.sum(-1))
        assert rows.cu_seqlens[0] == 0
