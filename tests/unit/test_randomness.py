"""Counter-based uniforms: the published function, and draws that belong to their row."""

import pytest
import scipy.stats
import torch

from sedd.draws import CounterRNG, philox

FALSE_ALARM = 1e-6


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the answers published with the algorithm (Random123, kat_vectors)
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    words = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


def test_the_draws_of_a_row_do_not_depend_on_other_rows() -> None:
    rng = CounterRNG(5, torch.arange(10))
    alone = CounterRNG(5, torch.tensor([7]))(12, step=3, event=1)
    assert torch.equal(rng(12, step=3, event=1)[7:8], alone)
    assert torch.equal(CounterRNG(5, torch.tensor([2, 7]))(12, step=3, event=1)[1:], alone)
    assert torch.equal(rng(20, step=3, event=1)[7:8, :12], alone)  # nor on the length


def test_rows_may_have_seeds_and_steps_of_their_own() -> None:
    """Each row draws what it draws alone; with the seed or the step of its neighbour it would not."""
    seeds, steps = torch.tensor([5, 2**62 + 1, 5, 2**40]), torch.tensor([3, 0, 4, 9])
    rng = CounterRNG(seeds, torch.tensor([7, 7, 8, 2**33]))
    alone = [CounterRNG(int(seeds[i]), rng.rows[i : i + 1])(6, int(steps[i]), 2)[0] for i in range(4)]
    assert torch.equal(rng(6, steps, 2), torch.stack(alone))
    assert not (rng(6, steps.flip(0), 2) == torch.stack(alone)).any()
    assert not (CounterRNG(seeds.flip(0), rng.rows)(6, steps, 2) == torch.stack(alone)).any()


def test_everything_in_the_key_counts() -> None:
    base = CounterRNG(5, torch.tensor([0, 1]))(8)
    assert len(base.unique()) == base.numel()
    for other in (
        CounterRNG(6, torch.tensor([0, 1]))(8),
        CounterRNG(5 + 2**32, torch.tensor([0, 1]))(8),
        CounterRNG(5, torch.tensor([2, 3]))(8),
        CounterRNG(5, torch.tensor([0, 1]))(8, step=1),
        CounterRNG(5, torch.tensor([0, 1]))(8, event=1),
    ):
        assert not (other == base).any()


def test_uniform_inside_and_independent_between_neighbours() -> None:
    """200,000 draws against the uniform distribution, and neighbours along every coordinate against correlation 0."""
    u = CounterRNG(0, torch.arange(200))(500)
    assert ((u > 0) & (u < 1)).all()
    assert ((u * 2**24) % 1 != 0).float().mean() > 0.99  # more than 24 bits
    assert scipy.stats.kstest(u.flatten().numpy(), "uniform").pvalue > FALSE_ALARM
    later = CounterRNG(0, torch.arange(200))(500, step=1)
    pairs = [(u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[..., :1], u[..., 1:]), (u, later)]
    for a, b in pairs:
        r = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()
        assert abs(r) * a.numel() ** 0.5 < scipy.stats.norm.isf(FALSE_ALARM / 2)
