"""Ladder step 0: closed forms against the matrix exponential, in float64."""

import math

import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import KINDS, Kind, tensor

from sedd import exact
from sedd.process import Absorbing, Frequency, Hybrid, Process, Uniform, at_token, log_odds
from sedd.reverse import denoised_probs
from sedd.schedule import Cosine, Geometric, LogLinear, Polynomial, Schedule

SCHEDULES = [
    LogLinear(),
    LogLinear(0.3),
    Geometric(),
    Geometric(1e-3, 5.0),
    Cosine(),
    Polynomial(),
    Polynomial(3.5, 1e-4),
]
sizes = st.integers(2, 8)
noises = st.floats(1e-6, 20.0)
kinds = st.sampled_from(KINDS)


@pytest.mark.parametrize("sigma", [0.0, 1e-6, 0.3, 20.0])
@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_transition_is_the_matrix_exponential(kind: Kind, n: int, sigma: float) -> None:
    process = kind(n)
    torch.testing.assert_close(
        process.transition_matrix(tensor(sigma)), exact.expm(sigma * process.rate_matrix()), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("size", [1e-6, 0.02, 0.03, 0.3, 1.0, 20.0])
def test_our_matrix_exponential_is_scipys(size: float) -> None:
    """`torch.matrix_exp` is not: it is off by 2e-12 near size 0.02."""
    A = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * size / 5
    expected = torch.as_tensor(scipy.linalg.expm(A.numpy()))
    torch.testing.assert_close(exact.expm(A), expected, rtol=1e-13, atol=1e-15)


@given(kinds, sizes, noises, noises)
def test_noise_adds_up(kind: Kind, n: int, a: float, b: float) -> None:
    P = kind(n).transition_matrix
    torch.testing.assert_close(P(tensor(a)) @ P(tensor(b)), P(tensor(a + b)), rtol=0, atol=1e-13)


@given(kinds, sizes, noises)
def test_columns_are_distributions(kind: Kind, n: int, sigma: float) -> None:
    process = kind(n)
    P, Q = process.transition_matrix(tensor(sigma)), process.rate_matrix()
    torch.testing.assert_close(P.sum(0), torch.ones(process.num_states).double(), rtol=0, atol=1e-13)
    torch.testing.assert_close(Q.sum(0), torch.zeros(process.num_states).double(), rtol=0, atol=1e-13)
    assert (P >= 0).all()
    assert (Q - Q.diag().diag() >= 0).all()


@given(kinds, sizes)
def test_incoming_rates_are_rows(kind: Kind, n: int) -> None:
    process = kind(n)
    states, Q = torch.arange(process.num_states), process.rate_matrix()
    into = process.incoming_rates(states).expand_as(Q)
    torch.testing.assert_close(into - into.diag().diag(), Q - Q.diag().diag())
    assert ((Q - Q.diag().diag() > 0).any(1) == process.is_noisy(states)).all()


def test_rate_matrices_written_out() -> None:
    torch.testing.assert_close(
        Uniform(3).rate_matrix(), torch.tensor([[-2, 1, 1], [1, -2, 1], [1, 1, -2]]).double() / 3, rtol=0, atol=1e-15
    )
    assert Absorbing(2).rate_matrix().tolist() == [[-1, 0, 0], [0, -1, 0], [1, 1, 0]]  # a transposed Q fails here
    found = Hybrid(2, 0.5).rate_matrix()
    assert found.tolist() == [[-0.75, 0.25, 0.25], [0.25, -0.75, 0.25], [0.5, 0.5, -0.5]]
    assert Frequency(2, (3, 1)).rate_matrix().tolist() == [[-0.25, 0.75], [0.25, -0.75]]


@given(sizes, noises, st.integers(0, 2**32))
def test_absorbing_and_uniform_noise_are_the_ends_of_hybrid_noise(n: int, sigma: float, seed: int) -> None:
    for mask_share, end in ((0.0, Uniform(n)), (1.0, Absorbing(n))):
        process, s = Process(n, mask_share=mask_share), tensor(sigma)
        assert torch.equal(process.transition_matrix(s), end.transition_matrix(s))
        assert torch.equal(process.rate_matrix(), end.rate_matrix())
        near = Process(n, mask_share=abs(mask_share - 1e-12)).transition_matrix(s)[: end.num_states, : end.num_states]
        torch.testing.assert_close(near, end.transition_matrix(s), rtol=0, atol=1e-11)
    equal = Frequency(n, [7.0] * n)
    torch.testing.assert_close(equal.transition_matrix(s), Uniform(n).transition_matrix(s), rtol=0, atol=1e-15)


@given(kinds, sizes, noises, st.integers(0, 2**32))
def test_staggered_score_undoes_noise(kind: Kind, n: int, dsigma: float, seed: int) -> None:
    process, dsigma = kind(n), min(dsigma, 5.0)  # e^20 would leave no digits to compare
    score = torch.rand(2, 3, process.num_states, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    undone = score @ exact.expm(-dsigma * process.rate_matrix()).T
    torch.testing.assert_close(
        process.staggered_score(score, tensor(dsigma).expand(2)), undone, rtol=1e-11, atol=1e-11 * math.exp(dsigma)
    )


@given(kinds, sizes, noises, st.data())
def test_ratios_are_quotients_of_transitions(kind: Kind, n: int, sigma: float, data: st.DataObject) -> None:
    process = kind(n)
    x_0 = data.draw(st.integers(0, n - 1))
    P = process.transition_matrix(tensor(sigma))
    for x_t in torch.arange(process.num_states)[process.is_noisy(torch.arange(process.num_states))].tolist():
        ratio = process.ratios(torch.tensor([x_t]), torch.tensor([x_0]), tensor(sigma))
        for y in range(process.num_states):
            if y != x_t:
                if y != x_0 and ratio.log_rest is None:  # stands for 0
                    assert P[y, x_0] == 0
                    continue
                value = ratio.log_data if y == x_0 else ratio.log_rest.expand(1, process.num_states)[0, y]
                assert math.isclose(value.exp().item(), P[y, x_0] / P[x_t, x_0], rel_tol=1e-11, abs_tol=1e-300)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_rate_is_the_derivative_of_sigma(schedule: Schedule) -> None:
    t = torch.linspace(1e-4, 1 - 1e-4, 501, dtype=torch.float64, requires_grad=True)
    (derivative,) = torch.autograd.grad(schedule.sigma(t).sum(), t)
    torch.testing.assert_close(schedule.rate(t.detach()), derivative, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_t_inverts_sigma_and_sigma_grows(schedule: Schedule) -> None:
    t = torch.linspace(0, 1, 1001, dtype=torch.float64)
    sigma = schedule.sigma(t)
    assert (sigma.diff() > 0).all()
    torch.testing.assert_close(schedule.t(sigma), t, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules_keep_their_digits_at_both_ends_in_float32(schedule: Schedule) -> None:
    small = torch.logspace(-9, -1, 200, dtype=torch.float64)
    for t in (small.float(), 1 - small.float(), torch.tensor([0.0, 1.0])):
        for single, double in zip(schedule(t), schedule(t.double()), strict=True):
            assert single.isfinite().all()
            torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=0)


@given(st.floats(1e-6, 0.9), st.floats(1e-6, 1.0))
def test_log_linear_weight_is_one_over_t(eps: float, t: float) -> None:
    noise = LogLinear(eps)(tensor(t))
    assert math.isclose(noise.rate * torch.exp(-log_odds(noise.sigma)), 1 / t, rel_tol=1e-9)  # §7.2


@given(kinds, st.integers(2, 60_000), noises)
def test_prior_kl_is_the_sum_it_stands_for(kind: Kind, n: int, sigma: float) -> None:
    process, s = kind(n), tensor(sigma)
    x = torch.arange(process.num_states)
    assert math.isclose(process.log_prior(x, s).exp().sum(), 1, rel_tol=1e-9)
    for x_0 in torch.tensor([[0], [n - 1]]):
        P = process.transition(x, x_0, s)
        kl = torch.xlogy(P, P).sum() - (P * process.log_prior(x, s)).sum()
        found = process.prior_kl(x_0, s)[0]
        assert math.isclose(found, kl, rel_tol=1e-9, abs_tol=1e-12)
        assert found >= 0
        assert process.prior_kl(x_0, s.float()).dtype == torch.float32


@given(kinds, sizes, noises, st.integers(0, 2**32))
def test_mean_score_is_the_average_ratio(kind: Kind, n: int, sigma: float, seed: int) -> None:
    """§3: s_y = Σ_{x_0} p(x_0 | x_t)·a_y(x_0), at positions that can move."""
    process, s = kind(n), tensor(sigma)
    log_mean = torch.randn(n, generator=torch.Generator().manual_seed(seed)).double().log_softmax(-1)
    P = process.transition_matrix(s)
    for x_t in torch.arange(process.num_states)[process.is_noisy(torch.arange(process.num_states))].tolist():
        expected = (P[:, :n] / P[x_t, :n]) @ log_mean.exp()
        score = process.mean_score(log_mean.view(1, 1, n), torch.tensor([[x_t]]), s.view(1)).exp().flatten()
        torch.testing.assert_close(score, expected, rtol=1e-10, atol=1e-14)


@given(kinds, sizes, noises, st.integers(0, 2**32))
def test_a_denoiser_its_score_and_its_leave_one_out_distribution_are_one(
    kind: Kind, n: int, sigma: float, seed: int
) -> None:
    """§5: p(x_0 | x_t) ∝ P_σ(x_t, x_0)·p(x_0), s_y = p_σ(y)/p_σ(x_t), and back."""
    process, s = kind(n), tensor(sigma).view(1)
    log_p = torch.randn(1, 1, n, generator=torch.Generator().manual_seed(seed)).double().log_softmax(-1)
    P = process.transition_matrix(s[0])
    torch.testing.assert_close(process.log_marginal(log_p, s).exp().flatten(), P[:, :n] @ log_p.exp().flatten())
    for x_t in torch.arange(process.num_states)[process.is_noisy(torch.arange(process.num_states))].tolist():
        x = torch.tensor([[x_t]])
        log_mean = process.add_log_likelihood(log_p, x, s).log_softmax(-1)
        posterior = P[x_t, :n] * log_p.exp().flatten()
        torch.testing.assert_close(log_mean.exp().flatten(), posterior / posterior.sum(), rtol=1e-10, atol=0)
        back = process.leave_one_out(log_mean, x, s).log_softmax(-1)
        torch.testing.assert_close(back, log_p, rtol=1e-12, atol=1e-12)
        score = process.marginal_score(log_p, x, s)
        torch.testing.assert_close(process.mean_score(log_mean, x, s), score, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(denoised_probs(process, score, x, s), log_mean.exp(), rtol=1e-6, atol=1e-7)


@given(kinds, sizes, noises)
def test_an_output_of_0_is_the_score_of_the_prior(kind: Kind, n: int, sigma: float) -> None:
    process, s = kind(n), tensor(sigma)
    log_prior = process.log_prior(torch.arange(process.num_states), s)
    for x_t in torch.arange(process.num_states)[process.is_noisy(torch.arange(process.num_states))].tolist():
        found = process.base_log_score(torch.tensor([[x_t]]), s.view(1)).expand(1, 1, process.num_states).flatten()
        right = log_prior - log_prior[x_t]
        torch.testing.assert_close(found[:x_t], right[:x_t], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[x_t + 1 :], right[x_t + 1 :], rtol=1e-9, atol=1e-9)


@given(kinds, sizes, noises, noises, st.integers(0, 2**32))
def test_posterior_is_bayes_rule(kind: Kind, n: int, a: float, b: float, seed: int) -> None:
    process, s, t = kind(n), tensor(min(a, b) * 0.9), tensor(max(a, b))
    log_mean = torch.randn(n, generator=torch.Generator().manual_seed(seed)).double().log_softmax(-1)
    P_s, P_t, step = (exact.transition_matrix(process, x) for x in (s, t, t - s))
    for x_t in torch.arange(process.num_states)[process.is_noisy(torch.arange(process.num_states))].tolist():
        q = step[x_t, :, None] * P_s[:, :n] / P_t[x_t, :n]  # q(x_s | x_t, x_0)
        x = torch.tensor([[x_t]])
        log_p = process.log_posterior(log_mean.view(1, 1, n), x, s.view(1), t.view(1)).flatten()
        torch.testing.assert_close(log_p.exp(), q @ log_mean.exp(), rtol=1e-8, atol=1e-12)
        for x_0 in range(n):
            kl = torch.xlogy(q[:, x_0], q[:, x_0] / (q @ log_mean.exp())).sum()
            found = process.posterior_kl(log_mean.view(1, 1, n), x, torch.tensor([[x_0]]), s.view(1), t.view(1))
            torch.testing.assert_close(found.squeeze(), kl, rtol=1e-7, atol=1e-11)


def test_a_token_stays_in_the_posterior_of_absorbing_noise() -> None:
    log_mean = torch.full((1, 2, 3), -math.log(3))
    x_t = torch.tensor([[1, 3]])
    p = Absorbing(3).log_posterior(log_mean, x_t, torch.tensor([0.2]), torch.tensor([0.5])).exp()
    torch.testing.assert_close(p[0, 0], torch.tensor([0.0, 1, 0, 0]))
    torch.testing.assert_close(p.sum(-1), torch.ones(1, 2))
    torch.testing.assert_close(at_token(p, x_t)[0, 1], torch.tensor((1 - math.exp(-0.2)) / (1 - math.exp(-0.5))))
