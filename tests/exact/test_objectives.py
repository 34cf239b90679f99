"""Ladder step 1: what the training code computes against definitions, and the identities of §7."""

import math

import definitions as definition
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import KINDS, Kind, expected_loss, frequency, hybrid, random_distribution, random_model, tensor, with_schedule

from sedd import exact, objectives
from sedd.exact.objectives import ExplicitConcreteScore, ExplicitScoreEntropy
from sedd.parameterization import CausalModel, ConditionalModel, MeanModel, ScoreModel, SignedScoreModel
from sedd.process import Absorbing, Process, Uniform, at_token, log_odds
from sedd.schedule import (
    Cosine,
    Geometric,
    ImportanceTimes,
    LogLinear,
    LowNoiseTimes,
    Polynomial,
    Schedule,
    corruption_probability,
    stratified,
)

PROCESSES = [kind(3) for kind in KINDS]
SCHEDULES: list[Schedule] = [LogLinear(), Geometric(), Cosine(), Polynomial()]
P_DATA = random_distribution(3, 3, seed=0)
AT_NOISE = {  # objective, definition, what it is tested on, whether the schedule's rate weighs it
    objectives.DenoisingScoreEntropy: (definition.denoising_score_entropy, ScoreModel, True),
    objectives.DenoisingConcreteScore: (definition.denoising_concrete_score, ScoreModel, True),
    objectives.SoftmaxLinear: (definition.softmax_linear, ScoreModel, True),
    objectives.ImplicitScoreEntropy: (definition.implicit_score_entropy, ScoreModel, True),
    ExplicitScoreEntropy: (definition.explicit_score_entropy, ScoreModel, True),
    ExplicitConcreteScore: (definition.explicit_concrete_score, ScoreModel, True),
    objectives.RatioMatching: (definition.ratio_matching, ConditionalModel, False),
    objectives.MeanCrossEntropy: (definition.mean_cross_entropy, MeanModel, False),
}


def make(kind: type) -> objectives.Objective:
    return kind(P_DATA) if issubclass(kind, ExplicitScoreEntropy) else kind()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("process", PROCESSES, ids=str)
@pytest.mark.parametrize("kind", AT_NOISE)
def test_losses_are_their_definitions(kind: type, process: Process, schedule: Schedule) -> None:
    define, wrapper, weighed = AT_NOISE[kind]
    model = random_model(wrapper, process, P_DATA.length)
    for t in map(tensor, (0.02, 0.5, 1.0)):
        sigma, rate = schedule(t)
        found = expected_loss(make(kind), model, P_DATA, schedule, t)
        expected = define(model, P_DATA, process, sigma) * (rate if weighed else 1)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_d3pm_is_its_definition(process: Process, schedule: Schedule) -> None:
    model, objective = random_model(MeanModel, process, 3), objectives.D3PM(steps=5)
    times = objective.times(torch.linspace(0.1, 0.9, 5).double())
    assert times.weight.tolist() == [5.0] * 5
    for t in times.t:
        s = schedule.sigma((t - 1 / 5).clamp_min(0))
        expected = definition.d3pm(model, P_DATA, process, s, schedule.sigma(t))
        torch.testing.assert_close(
            expected_loss(objective, model, P_DATA, schedule, t), expected, rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_time_dce_is_its_definition(schedule: Schedule) -> None:
    process = Absorbing(3)
    model, objective = random_model(MeanModel, process, 3), objectives.TimeDCE()
    for t in map(tensor, (0.02, 0.5, 1.0)):
        sigma, rate = schedule(t)
        found = expected_loss(objective, model, P_DATA, schedule, t)
        torch.testing.assert_close(found, rate * definition.t_dce(model, P_DATA, process, sigma), rtol=1e-10, atol=0)


@pytest.mark.parametrize("masked", [0.01, 0.4, 0.99])
def test_lambda_dce_is_its_definition(masked: float) -> None:
    process, at = Absorbing(3), tensor(masked)
    model = random_model(MeanModel, process, 3)
    linear = LogLinear(1e-12)  # σ(t) = −log(1 − t) but for the last digit
    found = expected_loss(objectives.LambdaDCE(), model, P_DATA, linear, at)
    torch.testing.assert_close(found, definition.lambda_dce(model, P_DATA, process, at), rtol=1e-9, atol=0)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_any_order_is_its_definition(k: int) -> None:
    process = Absorbing(3)
    model, objective = random_model(MeanModel, process, 3), objectives.AnyOrder()
    x_0, generator = P_DATA.sequences.repeat(4000, 1), torch.Generator().manual_seed(0)
    t = tensor((k - 0.5) / 3).expand(len(x_0))
    x_t = objective.corrupt(model, x_0, t, generator)
    assert ((x_t == process.mask).sum(-1) == k).all()
    shown, how_often = torch.unique(x_t == process.mask, dim=0, return_counts=True)
    assert len(shown) == math.comb(3, k)  # every choice of k positions, equally often: within 5 standard errors
    share = 1 / len(shown)
    assert (how_often / len(x_t) - share).abs().max() <= 5 * math.sqrt(share * (1 - share) / len(x_t))
    total = torch.zeros(()).double()
    for hidden in shown:
        loss = objective.loss(
            model, torch.where(hidden, process.mask, P_DATA.sequences), P_DATA.sequences, t[: len(P_DATA.sequences)]
        )
        total += (P_DATA.probabilities * loss.sum(-1)).sum() / len(shown)
    torch.testing.assert_close(total, definition.any_order(model, P_DATA, process, k), rtol=1e-10, atol=0)


def test_autoregressive_is_its_definition_and_the_entropy_at_the_truth() -> None:
    objective = objectives.Autoregressive()
    causal = CausalModel(CausalTable(), Absorbing(3))
    for model in (causal, exact.Score(P_DATA, Absorbing(3))):
        t = torch.zeros(len(P_DATA.sequences)).double()
        found = (P_DATA.probabilities * objective.loss(model, P_DATA.sequences, P_DATA.sequences, t).sum(-1)).sum()
        torch.testing.assert_close(found, definition.autoregressive(model, P_DATA), rtol=1e-12, atol=0)
    torch.testing.assert_close(found, P_DATA.entropy(), rtol=1e-12, atol=0)
    torch.testing.assert_close(causal.log_next(P_DATA.sequences).exp().sum(-1), torch.ones(27, 3).double())
    changed = P_DATA.sequences.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 3
    assert torch.equal(causal.log_next(changed), causal.log_next(P_DATA.sequences))  # the last token is seen by none


def test_the_first_token_is_predicted_from_a_start_token_of_its_own() -> None:
    seen = []

    class Sees(torch.nn.Module):
        def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return torch.zeros(*x.shape, 4)

    CausalModel(Sees(), Absorbing(3)).log_next(torch.tensor([[0, 1, 2]]))
    assert seen[0].tolist() == [[3, 0, 1]]


def test_no_masked_token_and_no_time_give_no_nan() -> None:
    process = Absorbing(3)
    model = random_model(MeanModel, process, 3)
    x_0 = P_DATA.sequences[:4]
    loss = objectives.LambdaDCE().loss(model, x_0, x_0, torch.zeros(4).double())
    loss.sum().backward()
    assert (loss == 0).all()
    assert model.network.weight.grad.isfinite().all()


class CausalTable(torch.nn.Module):
    """Reads what stands at i of the shifted sequence, and nothing else."""

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)).double()
        return weight[x]


@given(st.sampled_from(KINDS), st.integers(2, 4), st.integers(1, 3), st.floats(1e-3, 8.0), st.integers(0, 99))
def test_explicit_score_entropy_is_zero_at_the_truth_alone(
    kind: Kind, n: int, length: int, sigma: float, seed: int
) -> None:
    distribution, process = random_distribution(n, length, seed), kind(n)
    truth = definition.explicit_score_entropy(exact.Score(distribution, process), distribution, process, tensor(sigma))
    wrong = definition.explicit_score_entropy(
        random_model(ScoreModel, process, length, seed), distribution, process, tensor(sigma)
    )
    assert abs(truth) <= 1e-10
    assert wrong > 1e-6


def gradient(loss: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    (grad,) = torch.autograd.grad(loss, list(model.parameters()))
    return grad


@given(st.sampled_from(KINDS), st.integers(2, 3), st.integers(1, 3), st.floats(1e-2, 5.0), st.integers(0, 99))
def test_three_forms_of_score_entropy_have_one_gradient(
    kind: Kind, n: int, length: int, sigma: float, seed: int
) -> None:
    """§7.1, and two forms of concrete score matching likewise."""
    distribution, process, model = (
        random_distribution(n, length, seed),
        kind(n),
        random_model(ScoreModel, kind(n), length, seed),
    )
    sigma = tensor(sigma)
    truth = gradient(definition.explicit_score_entropy(model, distribution, process, sigma), model)
    for form in (definition.denoising_score_entropy, definition.implicit_score_entropy):
        torch.testing.assert_close(
            gradient(form(model, distribution, process, sigma), model), truth, rtol=1e-9, atol=1e-10
        )
    truth = gradient(definition.explicit_concrete_score(model, distribution, process, sigma), model)
    denoising = gradient(definition.denoising_concrete_score(model, distribution, process, sigma), model)
    torch.testing.assert_close(denoising, truth, rtol=1e-9, atol=1e-9 * truth.abs().max().item())


@pytest.mark.parametrize("process", PROCESSES, ids=str)
@pytest.mark.parametrize("kind", [k for k, (_, wrapper, _) in AT_NOISE.items() if wrapper is ScoreModel])
def test_gradients_of_the_training_code_are_those_of_the_definitions(kind: type, process: Process) -> None:
    define, _, _ = AT_NOISE[kind]
    model, schedule, t = random_model(ScoreModel, process, 3), LogLinear(), tensor(0.3)
    sigma, rate = schedule(t)
    found = gradient(expected_loss(make(kind), model, P_DATA, schedule, t), model)
    torch.testing.assert_close(
        found, gradient(rate * define(model, P_DATA, process, sigma), model), rtol=1e-9, atol=1e-11
    )


@given(st.integers(2, 40), st.floats(1e-3, 1.0), st.floats(1e-4, 0.5), st.integers(0, 99))
def test_score_entropy_of_a_mask_is_cross_entropy_and_an_excess(n: int, t: float, eps: float, seed: int) -> None:
    """§7.3: (1/t)·[CE(z, x_0) + S − 1 − log S], gradient (1/t)(exp(z_y − log N) − [y = x_0])."""
    process, schedule = Absorbing(n), LogLinear(eps)
    z = torch.randn(1, 1, n + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)
    x_0, x_t = torch.tensor([[seed % n]]), torch.tensor([[n]])
    model = ScoreModel(ConstantOutput(z), process, schedule)
    loss = objectives.DenoisingScoreEntropy().loss(model, x_t, x_0, tensor(t).view(1)).sum()
    tokens = z[0, 0, :n]
    S = torch.exp(tokens - math.log(n)).sum()
    expected = (torch.nn.functional.cross_entropy(tokens, x_0[0, 0]) + S - 1 - S.log()) / t
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    grad = torch.exp(tokens - math.log(n)).index_put((x_0[0],), tensor(-1.0), accumulate=True) / t
    torch.testing.assert_close(torch.autograd.grad(loss, z)[0][0, 0, :n], grad, rtol=1e-10, atol=1e-10)


class ConstantOutput(torch.nn.Module):
    """A network with the same output for every input."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.output.expand(*x.shape, -1)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_score_entropy_of_a_denoiser_is_time_dce_point_by_point(schedule: Schedule) -> None:
    """§7.4, first half."""
    model = with_schedule(random_model(MeanModel, Absorbing(3), 3), schedule)
    x_t, x_0 = exact.all_sequences(4, 3).repeat_interleave(27, 0), exact.all_sequences(3, 3).repeat(64, 1)
    for at in (1e-3, 0.5, 1.0):
        t = tensor(at).expand(len(x_t))
        entropy = objectives.DenoisingScoreEntropy().loss(model, x_t, x_0, t)
        dce = objectives.TimeDCE().loss(model, x_t, x_0, t)
        torch.testing.assert_close(entropy, dce, rtol=1e-10, atol=1e-10)


def test_time_lambda_and_any_order_are_one_number() -> None:
    """§7.4, second half: ∫ t-DCE = ∫ λ-DCE = mean over k of any-order, up to the prior of a finite σ(1)."""
    process, model = Absorbing(3), random_model(MeanModel, Absorbing(3), 3)
    by_lambda = exact.integrate(lambda m: definition.lambda_dce(model, P_DATA, process, m), nodes=8)
    by_order = torch.stack([definition.any_order(model, P_DATA, process, k) for k in (1, 2, 3)]).mean()
    torch.testing.assert_close(by_lambda, by_order, rtol=1e-12, atol=0)
    for schedule in (LogLinear(1e-12), Polynomial(2.0, 1e-12)):
        by_time = exact.integrate(
            lambda t, s=schedule: expected_loss(objectives.TimeDCE(), model, P_DATA, s, t), nodes=16
        )
        torch.testing.assert_close(by_time, by_order, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("process", "schedule", "steps"),
    [
        (Absorbing(3), LogLinear(), 64),
        *((kind(3), Geometric(1e-2, 8.0), steps) for kind, steps in ((Uniform, 64), (frequency, 64), (hybrid, 256))),
    ],
)
def test_d3pm_goes_to_score_entropy_as_steps_grow(process: Process, schedule: Schedule, steps: int) -> None:
    """The distance halves as T doubles, and from above at the truth; the reconstruction from σ(0) is in neither."""

    def distance(model: object, steps: int) -> float:
        t = torch.arange(1, steps + 1).double() / steps
        objective = objectives.D3PM(steps=steps)
        return sum(expected_loss(objective, model, P_DATA, schedule, x) for x in t).item() - integral(model)

    def integral(model: object) -> float:
        objective = objectives.DenoisingScoreEntropy()
        return exact.integrate(lambda t: expected_loss(objective, model, P_DATA, schedule, t), nodes=80).item()

    truth, wrong = exact.Score(P_DATA, process), random_model(MeanModel, process, 3, seed=2)
    assert distance(truth, steps) > 0
    for model in (truth, wrong):
        assert 1.9 < distance(model, steps) / distance(model, 2 * steps) < 2.1


@pytest.mark.parametrize(("schedule", "t_min"), [(LogLinear(), 0.0), (LogLinear(), 1e-3), (Geometric(0.1, 4.0), 0.2)])
def test_the_constant_by_which_other_code_differs_in_t_dce(schedule: Schedule, t_min: float) -> None:
    """With log(p/e) in place of log p: H(m_0) − H(m_1) nats per token for every model, m the masked fraction."""
    process = Absorbing(3)
    ends = corruption_probability(schedule.sigma(torch.tensor([t_min, 1.0]).double()))
    H = -(torch.xlogy(ends, ends) + torch.xlogy(1 - ends, 1 - ends))

    class Scaled:
        """The denoiser p/e: the score."""

        def __init__(self, model: MeanModel) -> None:
            self.model, self.process = model, model.process

        def log_mean(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            return self.model.log_mean(x_t, sigma) - log_odds(sigma)[..., None, None]

    for seed in (1, 2):
        model, objective = random_model(MeanModel, process, 3, seed), objectives.TimeDCE()

        def difference(
            t: torch.Tensor, model: MeanModel = model, objective: objectives.TimeDCE = objective
        ) -> torch.Tensor:
            losses = (expected_loss(objective, one, P_DATA, schedule, t) for one in (Scaled(model), model))
            return next(losses) - next(losses)

        found = exact.integrate(lambda u: (1 - t_min) * difference(t_min + (1 - t_min) * u), nodes=120)
        torch.testing.assert_close(found, 3 * (H[0] - H[1]), rtol=0, atol=2e-4)
    if schedule == LogLinear():
        assert (H[0] - H[1]).item() == pytest.approx(-0.0079 if t_min == 0 else -7e-6, rel=0.05)


def test_the_truth_is_where_ratio_matching_and_cross_entropy_are_least() -> None:
    for process in PROCESSES:
        truth, sigma = exact.Score(P_DATA, process), tensor(0.6)
        for define, wrapper in (
            (definition.ratio_matching, ConditionalModel),
            (definition.mean_cross_entropy, MeanModel),
        ):
            best = define(truth, P_DATA, process, sigma)
            for seed in range(5):
                assert define(random_model(wrapper, process, 3, seed), P_DATA, process, sigma) > best


def test_softmax_linear_is_not_least_at_the_truth() -> None:
    """One position, where a softmax can represent the true ratios up to scale; another score has a lower loss."""
    distribution, process, sigma = random_distribution(3, 1, 0), Absorbing(3), tensor(0.6)
    truth = exact.Score(distribution, process)
    peaked = definition.softmax_linear(lambda x, s: 40 * truth(x, s), distribution, process, sigma)
    assert peaked < definition.softmax_linear(truth, distribution, process, sigma) - 0.05


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_losses_of_sampled_noise_average_to_the_expected_loss(process: Process) -> None:
    """The whole call: times, weights, noise. 5 standard errors; false alarm below 1e-5 over its 4 comparisons."""
    schedule, generator = Geometric(1e-3, 10.0), torch.Generator().manual_seed(0)
    model = with_schedule(random_model(ScoreModel, process, 3).requires_grad_(False), schedule)
    even = objectives.DenoisingScoreEntropy()
    expected = exact.integrate(lambda t: expected_loss(even, model, P_DATA, schedule, t), nodes=80)
    x_0, t = P_DATA.draw(20_000, generator), even.times(stratified(20_000, generator)).t
    losses = even.loss(model, even.corrupt(model, x_0, t, generator), x_0, t).sum(-1)
    time_sampler = ImportanceTimes.fit(t, losses)
    variance = []
    for objective in (even, objectives.DenoisingScoreEntropy(time_sampler=time_sampler)):
        rows = [P_DATA.draw(400, generator) for _ in range(2000)]
        means = torch.stack([objective(model, x_0, generator=generator).sum(-1).mean() for x_0 in rows])
        assert (means.mean() - expected).abs() <= 5 * means.std() / math.sqrt(len(means))
        variance.append(means.var())
    assert variance[1] < 0.8 * variance[0]  # what importance sampling is for


@pytest.mark.parametrize("kind", [objectives.DenoisingScoreEntropy, objectives.LambdaDCE, objectives.AnyOrder])
def test_a_call_is_its_three_steps(kind: type) -> None:
    """Times, noise and loss, with one weight per sequence, for any number of batch dimensions."""
    model = random_model(MeanModel, Absorbing(3), 3).requires_grad_(False)
    objective, x_0 = kind(time_sampler=LowNoiseTimes()), P_DATA.sequences[:6].view(2, 3, 3)
    generator = torch.Generator().manual_seed(1)
    times = objective.times(stratified(6, generator).view(2, 3))
    x_t = objective.corrupt(model, x_0, times.t, generator)
    expected = times.weight[..., None] * objective.loss(model, x_t, x_0, times.t)
    assert torch.equal(objective(model, x_0, generator=torch.Generator().manual_seed(1)), expected)


def test_without_a_generator_the_global_seed_decides() -> None:
    model = random_model(MeanModel, Absorbing(3), 3).requires_grad_(False)
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(objectives.LambdaDCE()(model, P_DATA.sequences))
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


def test_at_token_and_log_odds() -> None:
    assert at_token(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([2])).tolist() == [3.0]
    assert torch.isfinite(log_odds(torch.tensor([0.0, 1e-30, 500.0]))).all()


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_concrete_score_matching_of_scores_of_any_sign(process: Process) -> None:
    """Its gradient is that of ½(s − p_t(y)/p_t(x))²; of positive scores it is the loss of a score model."""
    schedule, t = LogLinear(), tensor(0.3)
    (sigma, rate), objective = schedule(t), objectives.DenoisingConcreteScore()
    signed, positive = (random_model(kind, process, 3) for kind in (SignedScoreModel, ScoreModel))
    truth = exact.Score(P_DATA, process)

    def explicit(model: SignedScoreModel) -> torch.Tensor:
        def loss(x_t: torch.Tensor, x_0: torch.Tensor) -> torch.Tensor:
            sigmas = sigma.expand(len(x_t))
            each = (model.score(x_t, sigmas) - truth(x_t, sigmas).exp()) ** 2 / 2
            rates = process.rate_matrix()[x_t].scatter(-1, x_t[..., None], 0)
            return torch.where(rates > 0, rates * each, 0).sum((-1, -2))

        return rate * exact.expect(loss, P_DATA, process, sigma)

    assert (signed.score(P_DATA.sequences, sigma.expand(27)) < 0).any()
    found = expected_loss(objective, signed, P_DATA, schedule, t)
    torch.testing.assert_close(gradient(found, signed), gradient(explicit(signed), signed), rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        signed.network.weight.copy_(torch.expm1(positive.network.weight))
    of_signed, of_positive = (expected_loss(objective, model, P_DATA, schedule, t) for model in (signed, positive))
    torch.testing.assert_close(of_signed, of_positive, rtol=1e-10, atol=0)
    log_scores = (model(P_DATA.sequences, sigma.expand(27)) for model in (signed, positive))
    torch.testing.assert_close(*log_scores, rtol=1e-10, atol=1e-12)


def test_a_signed_score_trained_through_its_logarithm_would_stay_negative() -> None:
    """The mutant: the gradient of the floor is 0, so squared error of exp(log-score) cannot raise a negative score."""
    process, schedule, t = Uniform(3), LogLinear(), tensor(0.3)
    objective, model = objectives.DenoisingConcreteScore(), random_model(SignedScoreModel, process, 1)
    with torch.no_grad():
        model.network.weight.fill_(-2)
    data = random_distribution(3, 1, seed=0)
    assert gradient(expected_loss(objective, model, data, schedule, t), model).abs().max() > 0.1

    class ThroughLog:
        def __init__(self) -> None:
            self.process = process

        def __call__(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            return model(x_t, sigma)

    through_log = expected_loss(objective, ThroughLog(), data, schedule, t)
    assert gradient(through_log, model).abs().max() == 0
