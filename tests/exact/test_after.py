"""The likelihood of a continuation, against the conditional distribution; greedy decoding, against enumeration."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_estimate import bound_of_each
from toys import random_distribution

from sedd import evaluation, exact, samplers
from sedd.evaluation import continuation
from sedd.likelihood import LikelihoodEstimate
from sedd.loading import LoadedModel
from sedd.objectives import DenoisingScoreEntropy
from sedd.parameterization import CausalModel, DiscreteModel, MeanModel, ScoreModel
from sedd.process import Absorbing, Process, Uniform
from sedd.schedule import Geometric, LogLinear, Schedule
from sedd.tokenizer import Characters
from sedd.training.config import ModelConfig, RunConfig

P_DATA = random_distribution(3, 4, 0)
ABSORBING, UNIFORM = Absorbing(3), Uniform(3)


def rest_of(context: list[int]) -> exact.Distribution:
    """The distribution of what follows, by definition: p(context, rest)/p(context)."""
    joint = P_DATA.probabilities.view(3, 3, 3, 3)[tuple(context)]
    return exact.Distribution(joint / joint.sum())


def loaded(model: torch.nn.Module, process: Process, schedule: Schedule) -> LoadedModel:
    """A model of four of the tokens a, b, c, as if it came from a folder."""
    config = RunConfig(model=ModelConfig(seq_len=4)).resolved()
    letters = Characters(alphabet="abc")
    objective = DenoisingScoreEntropy()
    return LoadedModel(model, exact.Table(2, 1), process, schedule, objective, letters, config, Path())


def exact_denoiser() -> MeanModel:
    """Return the true posterior of the clean token as a network that does not depend on σ."""
    table = exact.Table(4, 4)
    x = exact.all_sequences(4, 4)
    log_mean = exact.Score(P_DATA, ABSORBING).log_mean(x, torch.ones(len(x)))
    with torch.no_grad():
        table.weight[..., :3] = log_mean.clamp_min(-1e3)  # −∞ at unmasked tokens
    return MeanModel(table.requires_grad_(False), ABSORBING)


class Next(torch.nn.Module):
    """The true distribution of the next token, for `CausalModel`: its input is shifted one position to the right."""

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        before = torch.nn.functional.pad(x[..., 1:], (0, 5 - length))
        return exact.Score(P_DATA, ABSORBING).log_next(before)[..., :length, :]


class TrueScore(torch.nn.Module):
    """The exact score as the network of a `ScoreModel`, which adds that of the prior."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.score = exact.Score(P_DATA, process)

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.score(x, sigma) - self.score.process.base_log_score(x, sigma.double())


def exact_model(process: Process) -> ScoreModel:
    return ScoreModel(TrueScore(process), process)


@pytest.mark.parametrize("context", [[1], [0, 2], [2, 1, 0]], ids=str)
def test_the_score_of_what_follows_is_the_conditional_score(context: list[int]) -> None:
    """Everywhere and at every noise; so is its bound in expectation, the entropy of what follows."""
    model, truth = exact_model(ABSORBING).bind(context=torch.tensor(context)), rest_of(context)
    x = exact.all_sequences(4, truth.length)
    masked = ABSORBING.is_noisy(x)
    for sigma in (0.01, 1.0, 5.0):
        level = torch.full((len(x),), sigma, dtype=torch.float64)
        torch.testing.assert_close(
            model(x, level)[masked], exact.Score(truth, ABSORBING)(x, level)[masked], rtol=0, atol=1e-9
        )
    bound = exact.bound(model, truth, ABSORBING, LogLinear(), true_base=True)
    torch.testing.assert_close(bound.total, truth.entropy(), rtol=0, atol=1e-9)


def test_under_uniform_noise_it_is_another_distribution() -> None:
    """A bound still, but of filling in behind a context that is taken for noisy: worse than the conditional."""
    model, truth = exact_model(UNIFORM).bind(context=torch.tensor([0, 2])), rest_of([0, 2])
    bound = exact.bound(model, truth, UNIFORM, LogLinear(), true_base=True, nodes=96).total
    assert bound > truth.entropy() + 1e-3
    own = exact.bound(exact.Score(truth, UNIFORM), truth, UNIFORM, LogLinear(), true_base=True, nodes=96).total
    torch.testing.assert_close(own, truth.entropy(), rtol=0, atol=1e-6)


NOISES = [(ABSORBING, LogLinear()), (ABSORBING, Geometric(1e-3, 8.0)), (UNIFORM, Geometric(1e-3, 8.0))]


@pytest.mark.parametrize(("process", "schedule"), NOISES, ids=str)
def test_the_estimate_is_the_bound_on_what_follows(process: Process, schedule: Schedule) -> None:
    """9 continuations, 5 standard errors of 4096 draws each: false alarm below 1e-5."""
    context = np.array([0, 2])
    model = exact_model(process)
    truth = bound_of_each(model.bind(context=torch.from_numpy(context)), process, schedule, length=2, nodes=80)
    if process is ABSORBING:  # the exact score: the bound is −log p(rest | context), but for base and reconstruction
        np.testing.assert_allclose(truth, -rest_of([0, 2]).log_prob(exact.all_sequences(3, 2)), atol=0.02)
    for rest, bound in zip(exact.all_sequences(3, 2).numpy(), truth, strict=True):
        found = evaluation.score_continuation(context, rest, loaded(model, process, schedule), draws=4096, batch=4096)
        assert abs(2 * found.nats - bound) <= 5 * 2 * found.stderr
        assert 5 * 2 * found.stderr < 0.2 * bound + 0.1


@pytest.mark.parametrize("split", [1, 2, 3])
def test_denoisers_and_autoregressive_models_have_the_exact_conditional(split: int) -> None:
    """In one order and left to right to 1e-9, in any order within 5 standard errors."""
    denoiser = loaded(exact_denoiser(), ABSORBING, LogLinear())
    causal = loaded(CausalModel(Next(), ABSORBING), ABSORBING, LogLinear())
    for x in P_DATA.sequences[::7]:
        context, rest = x[:split].numpy(), x[split:].numpy()
        truth = -rest_of(context.tolist()).log_prob(x[None, split:]).item()
        in_order = evaluation.score_continuation(context, rest, denoiser, estimator="backward")
        assert in_order.nats * len(rest) == pytest.approx(truth, abs=1e-9)
        any_order = evaluation.score_continuation(context, rest, denoiser, estimator="any-order", draws=512, batch=512)
        assert abs(any_order.nats * len(rest) - truth) <= 5 * len(rest) * any_order.stderr + 1e-9
        assert evaluation.score_continuation(context, rest, causal).nats * len(rest) == pytest.approx(truth, abs=1e-9)


# Tests of the tests ----------------------------------------------------------------------------------------


def masked_context(bind: object) -> object:
    """A context that is masked like everything else: none at all."""

    def bound(model: DiscreteModel, *, context: torch.Tensor) -> DiscreteModel:
        return bind(model, context=torch.full_like(context, ABSORBING.mask))

    return bound


def whole_row(estimate: object) -> object:
    """The bound on context and continuation together, taken for that on the continuation."""

    def estimate_likelihood(
        model: DiscreteModel, by: object, rows: list[np.ndarray], **options: object
    ) -> LikelihoodEstimate:
        row = np.concatenate([model.context.numpy(), rows[0]])
        unbound = copy.copy(model)
        unbound.context = None
        found = estimate(unbound, by, [row], **options)
        share = len(row) / len(rows[0])
        return replace(found, nats=found.nats * share, stderr=found.stderr * share)

    return estimate_likelihood


@pytest.mark.parametrize("mutant", [None, "context", "whole"])
def test_mutants_are_caught(mutant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right is within 4 standard errors, what is wrong is not within 8."""
    if mutant == "context":
        monkeypatch.setattr(DiscreteModel, "bind", masked_context(DiscreteModel.bind))
    if mutant == "whole":
        monkeypatch.setattr(continuation, "estimate_likelihood", whole_row(continuation.estimate_likelihood))
    made = loaded(exact_denoiser(), ABSORBING, LogLinear())
    rest = np.array([1, 1])
    truth = -rest_of([0, 2]).log_prob(torch.tensor([[1, 1]])).item()
    found = evaluation.score_continuation(np.array([0, 2]), rest, made, estimator="any-order", draws=4096, batch=4096)
    off = abs(2 * found.nats - truth) / (2 * found.stderr)
    assert off < 4 if mutant is None else off > 8


# Greedy ----------------------------------------------------------------------------------------------------


def most_certain_first(context: list[int]) -> list[tuple[int, int]]:
    """By enumeration: of all places that are free, the one whose likeliest token is likeliest."""
    x, found = context + [-1] * (4 - len(context)), []
    while -1 in x:
        joint = P_DATA.given(torch.tensor(x)).probabilities.view(3, 3, 3, 3)
        distributions = {i: joint.sum([j for j in range(4) if j != i]) for i in range(4) if x[i] < 0}
        best = max(distributions, key=lambda i: distributions[i].max().item())
        x[best] = int(distributions[best].argmax())
        found.append((best - len(context), x[best]))
    return found


def left_to_right(context: list[int]) -> list[tuple[int, int]]:
    x = list(context)
    while len(x) < 4:
        joint = P_DATA.probabilities.view(3, 3, 3, 3)[tuple(x)]
        x.append(int(joint.reshape(3, -1).sum(-1).argmax()))
    return list(enumerate(x[len(context) :]))


@pytest.mark.parametrize("context", [[], [1], [0, 2], [2, 1, 0]], ids=str)
def test_greedy_texts_are_made_of_likeliest_tokens(context: list[int]) -> None:
    """A score, a denoiser and an autoregressive model of the true distribution, against enumeration."""
    score = loaded(exact.Score(P_DATA, ABSORBING), ABSORBING, Geometric())
    denoiser = loaded(exact_denoiser(), ABSORBING, LogLinear())
    causal = loaded(CausalModel(Next(), ABSORBING), ABSORBING, LogLinear())
    given = np.array(context, dtype=np.int64)
    for made, truth in [(score, most_certain_first), (denoiser, most_certain_first), (causal, left_to_right)]:
        assert list(samplers.decode_greedy(made, given, 4 - len(context))) == truth(context)
    assert any(most_certain_first([a]) != left_to_right([a]) for a in range(3))  # the order matters here


def test_greedy_texts_under_uniform_noise_are_whole_and_repeat() -> None:
    made = loaded(exact.Score(P_DATA, UNIFORM), UNIFORM, Geometric(1e-3, 8.0))
    first, again = (list(samplers.decode_greedy(made, np.array([1]), 3)) for _ in range(2))
    assert first == again
    assert [place for place, _ in first] == [0, 1, 2]
    assert all(0 <= token < 3 for _, token in first)
