"""The likelihood of a mixture over orders: exact, and bounded from both sides; wrong versions are caught.  [§8]"""

import itertools
import math

import pytest
import torch
from test_estimate import chain_rule, found
from toys import random_distribution, random_model

from sedd import exact, samplers
from sedd.draws import CounterRNG
from sedd.evaluation.results import sequences_and_orders
from sedd.likelihood import AllOrdersEstimator, ImportanceWeightedEstimator, orders
from sedd.likelihood.orders import own_sample_bounds
from sedd.parameterization import MeanModel
from sedd.process import Absorbing
from sedd.samplers import FirstHitting

PROCESS, LENGTH = Absorbing(3), 3
X = exact.all_sequences(3, LENGTH)
ORDERS = torch.tensor(list(itertools.permutations(range(LENGTH))))


@pytest.fixture(scope="module")
def model() -> MeanModel:
    """A denoiser whose orders disagree: they have very different likelihoods."""
    made = random_model(MeanModel, PROCESS, LENGTH).requires_grad_(False)
    made.network.weight.mul_(1.5)
    return made


@pytest.fixture(scope="module")
def log_p_of_orders(model: MeanModel) -> torch.Tensor:
    """log p(x | o) of every sequence and order, a token after the other."""
    table = [[-chain_rule(model, x, tuple(order)) for order in ORDERS.tolist()] for x in X]
    return torch.tensor(table, dtype=torch.float64)


def upper(log_p: torch.Tensor, count: int) -> torch.Tensor:
    """E[−log (1/K) Σ_k p(x | o_k)] over all K-tuples of orders."""
    tuples = list(itertools.product(range(len(ORDERS)), repeat=count))
    return torch.stack([-log_p[:, list(chosen)].exp().mean(-1).log() for chosen in tuples]).mean(0)


def lower(log_p: torch.Tensor, count: int) -> torch.Tensor:
    """The same where the first order has the distribution p(o | x)."""
    posterior, total = log_p.softmax(-1), torch.zeros(len(log_p), dtype=torch.float64)
    for chosen in itertools.product(range(len(ORDERS)), repeat=count):
        nats = -log_p[:, list(chosen)].exp().mean(-1).log()
        total += posterior[:, chosen[0]] * nats / len(ORDERS) ** (count - 1)
    return total


def test_all_orders_are_the_mean_over_permutations_and_what_is_generated(
    model: MeanModel, log_p_of_orders: torch.Tensor
) -> None:
    """Three ways to p(x): the sum over sets, over permutations, and the distribution of the first-hitting sampler."""
    p = torch.exp(-AllOrdersEstimator(PROCESS).nats(model, X).diffusion)
    torch.testing.assert_close(p, log_p_of_orders.exp().mean(-1), rtol=0, atol=1e-9)
    assert p.sum() == pytest.approx(1, abs=1e-9)
    generated = exact.sample_distribution(FirstHitting(), model, torch.full((LENGTH,), -1), None)
    clean = (exact.all_sequences(4, LENGTH) < 3).all(-1)
    torch.testing.assert_close(p, generated[clean], rtol=0, atol=1e-9)
    result = found(model, AllOrdersEstimator(PROCESS), X)
    assert (result.stderr, result.lower, result.network_calls) == (0, result.nats, 27 * 7)


def test_the_bounds_close_in_on_the_likelihood_from_both_sides(log_p_of_orders: torch.Tensor) -> None:
    """For every sequence, by enumeration of all orders: decreasing above −log p, and increasing below it."""
    exact_nats = -log_p_of_orders.exp().mean(-1).log()
    above = [upper(log_p_of_orders, count) for count in (1, 2, 3)]
    below = [lower(log_p_of_orders, count) for count in (1, 2, 3)]
    chain = [*below, exact_nats, *above[::-1]]
    for smaller, larger in itertools.pairwise(chain):
        assert (smaller < larger).all()
    assert (above[0] - exact_nats).mean() > 2 * (above[2] - exact_nats).mean() > 0.1


def test_a_consistent_denoiser_has_no_gap() -> None:
    """Every order of the exact denoiser has the same likelihood, so that one of them is enough."""
    distribution = random_distribution(3, LENGTH, 0)
    score = exact.Score(distribution, PROCESS)
    for estimator in (ImportanceWeightedEstimator(PROCESS, 1), AllOrdersEstimator(PROCESS)):
        result = found(score, estimator, X, draws=2)
        assert result.nats == pytest.approx(-distribution.log_prob(X).mean().item() / LENGTH, abs=1e-9)


@pytest.mark.parametrize("mutant", ["none", "mean of logarithms"])
def test_the_estimate_has_the_expectation_of_its_orders(
    model: MeanModel, log_p_of_orders: torch.Tensor, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 5 standard errors (false alarm 6e-7). The mean of logarithms does not decrease: 10 or more off."""
    if mutant == "mean of logarithms":
        monkeypatch.setattr(orders, "minus_log_mean", lambda log_p: -log_p.mean(-1))
    expected = upper(log_p_of_orders, 3).mean().item() / LENGTH
    result = found(model, ImportanceWeightedEstimator(PROCESS, 3), X, draws=64)
    assert result.network_calls == 27 * 64 * 3 * LENGTH
    off = abs(result.nats - expected) / result.stderr
    assert off < 5 if mutant == "none" else off > 10


def test_the_error_is_the_spread_over_seeds(model: MeanModel) -> None:
    """54 seeds know it to 10 %, so that 40 % off is 4 standard errors."""
    estimator = ImportanceWeightedEstimator(PROCESS, 2)
    results = [found(model, estimator, X, draws=4, seed=seed) for seed in range(54)]
    reported = math.sqrt(sum(result.stderr**2 for result in results) / 54)
    spread = torch.tensor([result.nats for result in results]).std().item()
    assert abs(reported / spread - 1) < 0.4


def test_one_draw_depends_on_its_number_only(model: MeanModel) -> None:
    one, many = (
        found(model, ImportanceWeightedEstimator(PROCESS, 2), X, draws=4, batch=batch).nats for batch in (1, 100)
    )
    assert one == pytest.approx(many, abs=1e-12)


SAMPLES = 6000


@pytest.mark.parametrize("mutant", ["none", "any order", "inverse order", "greedy samples"])
def test_own_samples_are_bounded_from_both_sides(model: MeanModel, log_p_of_orders: torch.Tensor, mutant: str) -> None:
    """Both means have the enumerated expectation, within 5 standard errors, and the entropy lies between.

    Orders that did not generate the sample, an order with its positions and ranks exchanged, and samples of another
    distribution (temperature 0.7) have not: their lower bound is off by 10 standard errors or more.
    """
    temperature = 0.7 if mutant == "greedy samples" else 1.0
    settings = samplers.SamplingSettings("first-hitting", None, seed=3, temperature=temperature)
    drawn = samplers.SamplingRun(model, settings).sample(samplers.empty(SAMPLES, LENGTH), 2000)
    x_0, order = sequences_and_orders(drawn)
    if mutant == "any order":
        order = orders.random_orders(CounterRNG(5, torch.arange(SAMPLES)), LENGTH, 1)[:, 0]
    if mutant == "inverse order":
        order = order.argsort(-1)
    bounds = own_sample_bounds(model, PROCESS, x_0, order, 3, CounterRNG(4, torch.arange(SAMPLES)))
    p = log_p_of_orders.exp().mean(-1)
    entropy = -(p * p.log()).sum().item()
    low, high = (bound.mean().item() for bound in bounds)
    low_error, high_error = (bound.std().item() / math.sqrt(SAMPLES) for bound in bounds)
    expected_low, expected_high = ((p * f(log_p_of_orders, 3)).sum().item() for f in (lower, upper))
    if mutant == "none":
        assert abs(low - expected_low) < 5 * low_error
        assert abs(high - expected_high) < 5 * high_error
        assert low + 5 * low_error < entropy < high - 5 * high_error
    else:
        assert abs(low - expected_low) > 10 * low_error
