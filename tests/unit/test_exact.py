"""The enumeration agrees with sums that are written out."""

import itertools
import math

import pytest
import torch

from sedd import exact
from sedd.process import Absorbing, Process, Uniform

P_DATA = exact.Distribution(torch.tensor([[0.4, 0.1], [0.2, 0.3]]))


def test_entropy_and_log_prob() -> None:
    by_hand = -sum(p * math.log(p) for p in (0.4, 0.1, 0.2, 0.3))
    assert math.isclose(P_DATA.entropy(), by_hand, rel_tol=1e-6)
    torch.testing.assert_close(
        P_DATA.log_prob(torch.tensor([[1, 0]])).exp(), torch.tensor([0.2]).double(), rtol=1e-6, atol=0
    )


def test_index_and_order_agree() -> None:
    x = exact.all_sequences(3, 4)
    assert torch.equal(exact.index_of(x, 3), torch.arange(81))
    assert x[1].tolist() == [0, 0, 0, 1]
    assert exact.all_sequences(5, 1).shape == (5, 1)


@pytest.mark.parametrize("process", [Uniform(2), Absorbing(2)], ids=str)
def test_marginals_scores_and_posteriors_by_hand(process: Process) -> None:
    sigma = torch.tensor(0.9, dtype=torch.float64)
    P, n = process.transition_matrix(sigma), process.num_states
    p = {}
    for y in itertools.product(range(n), repeat=2):
        p[y] = sum(P_DATA.probabilities[2 * a + b] * P[y[0], a] * P[y[1], b] for a in range(2) for b in range(2))
    marginal = P_DATA.at(process, sigma)
    score = exact.Score(P_DATA, process)
    for y in itertools.product(range(n), repeat=2):
        x = torch.tensor([y])
        torch.testing.assert_close(marginal[exact.index_of(x, n)][0], p[y])
        log_score, log_mean = score(x, sigma.view(1))[0], score.log_mean(x, sigma.view(1))[0]
        for v in range(n):
            torch.testing.assert_close(log_score[0, v].exp(), p[v, y[1]] / p[y])
            torch.testing.assert_close(log_score[1, v].exp(), p[y[0], v] / p[y])
        joint = torch.stack(
            [sum(P_DATA.probabilities[2 * a + b] * P[y[0], a] * P[y[1], b] for b in range(2)) for a in range(2)]
        )
        torch.testing.assert_close(log_mean[0].exp(), joint / joint.sum())


@pytest.mark.parametrize("process", [Uniform(2), Absorbing(2)], ids=str)
def test_score_takes_a_noise_for_each_row(process: Process) -> None:
    score, x = exact.Score(P_DATA, process), torch.tensor([[0, 1], [1, 1], [0, 1]])
    sigma = torch.tensor([0.3, 2.0, 1.0])
    rows = torch.cat([score(x[i : i + 1], sigma[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(score(x, sigma), rows)
    torch.testing.assert_close(score.log_conditional(x, sigma).exp().sum(-1), torch.ones(3, 2).double())


def test_a_conditional_distribution() -> None:
    given = P_DATA.given(torch.tensor([-1, 1]))
    torch.testing.assert_close(given.probabilities, torch.tensor([0, 0.25, 0, 0.75]).double(), rtol=1e-6, atol=0)


def test_the_posterior_of_masks_is_the_marginal_of_the_data() -> None:
    process, masks = Absorbing(2), torch.tensor([[2, 2]])
    mean = exact.Score(P_DATA, process).log_mean(masks, torch.tensor([1.7])).exp()
    torch.testing.assert_close(mean[0], torch.tensor([[0.5, 0.5], [0.6, 0.4]]).double(), rtol=1e-6, atol=0)


def test_draws_of_a_distribution(generator: torch.Generator) -> None:
    draws = P_DATA.draw(100_000, generator)
    share = torch.bincount(exact.index_of(draws, 2), minlength=4) / len(draws)
    assert (share - P_DATA.probabilities).abs().max() < 5 * 0.5 / math.sqrt(len(draws))  # 5 standard errors


def test_propagate_is_a_sum_over_paths() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(9, 2, 3, generator=generator, dtype=torch.float64)
    table /= table.sum(-1, keepdim=True)
    p = torch.rand(9, generator=generator, dtype=torch.float64)
    x = exact.all_sequences(3, 2)
    by_hand = [sum(p[a] * table[a, 0, y[0]] * table[a, 1, y[1]] for a in range(9)) for y in x]
    torch.testing.assert_close(exact.propagate(p, table), torch.stack(by_hand))


def test_integrate_polynomials_exactly() -> None:
    assert math.isclose(exact.integrate(lambda t: 4 * t**3, lo=1.0, hi=2.0, nodes=2), 15, rel_tol=1e-14)
