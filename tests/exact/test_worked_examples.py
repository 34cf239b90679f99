"""Numbers a reader can check by hand."""

import math

import torch

from sedd import exact
from sedd.divergence import K, score_entropy
from sedd.process import Absorbing, Uniform, log_odds


def test_K_of_a_half() -> None:
    p_y, p_x = torch.tensor([0.2, 0.4], dtype=torch.float64)
    assert round(K(p_y / p_x).item(), 4) == -0.8466
    assert K(torch.tensor(0.0)) == 0
    assert score_entropy((p_y / p_x).log(), (p_y / p_x).log()) == 0  # s − a log s + K(a) at s = a


def test_three_states_with_all_rates_one() -> None:
    """Rates of 1 are the uniform process run three times as fast: stay with (1 + 2e^−3τ)/3."""
    Q = torch.ones(3, 3).double() - 3 * torch.eye(3).double()
    tau = torch.tensor(0.4, dtype=torch.float64)
    stay, go = (1 + 2 * math.exp(-1.2)) / 3, (1 - math.exp(-1.2)) / 3
    by_hand = torch.full((3, 3), go, dtype=torch.float64).fill_diagonal_(stay)
    torch.testing.assert_close(exact.expm(tau * Q), by_hand, rtol=0, atol=1e-15)
    torch.testing.assert_close(Uniform(3).transition_matrix(3 * tau), by_hand, rtol=0, atol=1e-15)


def test_the_transition_of_a_sequence_factorises() -> None:
    """Three positions of four tokens: the 64 × 64 chain is the product of three 4 × 4 ones."""
    process, sigma = Uniform(4), torch.tensor(0.7, dtype=torch.float64)
    Q, eye = process.rate_matrix(), torch.eye(4).double()
    joint = (
        torch.kron(torch.kron(Q, eye), eye) + torch.kron(torch.kron(eye, Q), eye) + torch.kron(torch.kron(eye, eye), Q)
    )
    x = exact.all_sequences(4, 3)
    product = process.transition(x[:, None], x[None], sigma).prod(-1)
    torch.testing.assert_close(exact.expm(sigma * joint), product, rtol=0, atol=1e-14)


def test_odds_of_being_replaced() -> None:
    """e^σ − 1 = P(replaced)/P(kept untouched)."""
    sigma = torch.tensor([0.1, 1.0, 3.0]).double()
    P = Absorbing(5).transition_matrix(sigma)
    torch.testing.assert_close(log_odds(sigma).exp(), P[:, 5, 0] / P[:, 0, 0])


def test_survival_ratio() -> None:
    """r = e/(e + N): how much likelier any other token is than the one that is still there."""
    n, sigma = 50_257, torch.tensor(1e-4, dtype=torch.float64)
    P_stay, P_go = (Uniform(n).transition(torch.tensor(y), torch.tensor(0), sigma) for y in (0, 1))
    e = math.expm1(1e-4)
    assert math.isclose(P_go / P_stay, e / (e + n), rel_tol=1e-9)
    ratio = Uniform(n).ratios(torch.tensor([0]), torch.tensor([0]), sigma)
    assert math.isclose(ratio.log_rest.exp(), e / (e + n), rel_tol=1e-12)
    single = Uniform(n).ratios(torch.tensor([0]), torch.tensor([0]), sigma.float())
    assert math.isclose(single.log_rest.exp(), e / (e + n), rel_tol=1e-5)  # 1 − N/(e + N) is 0 in float32
    assert 1 - torch.tensor(n) / (torch.expm1(sigma.float()) + n) == 0
