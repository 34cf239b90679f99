"""Labels and guidance on a small joint distribution of (label, sequence): samples against their distribution."""

from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sampler_distributions import p_value, run
from torch import Tensor, nn
from toys import tensor

from sedd import exact
from sedd.parameterization import MeanModel, ScoreModel
from sedd.process import Absorbing, Hybrid, Process, Uniform
from sedd.samplers import (
    Ancestral,
    Euler,
    FirstHitting,
    Gibbs,
    Guided,
    Ordered,
    Remask,
    Sampler,
    SamplingModel,
    Steps,
    Theta,
    Tweedie,
    Warped,
    empty,
    uniform_grid,
)
from sedd.samplers.model import networks
from sedd.schedule import LogLinear

FAMILY = 1e-6
"""The probability that any of the chi-square tests below fails although all is right, each taking an equal share."""
POWER = 1e-12
"""What a mutant's p-value must fall below."""
COUNT = 20_000
LABELS, TOKENS, LENGTH = 3, 3, 2
SCHEDULE = LogLinear(1e-2)
PROCESSES = {
    "absorbing": Absorbing(TOKENS),
    "uniform": Uniform(TOKENS),
    "hybrid": Hybrid(TOKENS, 0.6),
}
WRAPPERS = {"score": ScoreModel, "mean": MeanModel}
KINDS = [(process, wrapper) for process in PROCESSES for wrapper in WRAPPERS]
RATIOS = [("uniform", "score"), ("hybrid", "score")]
"""Models whose guidance mixes ratios, which have no normaliser."""


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def joint(length: int = LENGTH) -> Tensor:
    """p(label, x): labels differ in frequency, and each has a distribution far from the others."""
    weight = torch.rand(LABELS, TOKENS**length, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) ** 3
    weight = (weight + 0.02) * tensor(1.0).new_tensor([1.0, 2.0, 3.0])[:, None]
    return weight / weight.sum()


def distribution(label: int | None, length: int = LENGTH) -> exact.Distribution:
    """p(x | label), or p(x)."""
    p = joint(length).sum(0) if label is None else joint(length)[label]
    return exact.Distribution((p / p.sum()).view((TOKENS,) * length))


def tilted(free: Tensor, given: Tensor, weight: float) -> Tensor:
    """p^(1−γ)·q^γ, normalised."""
    p = free ** (1 - weight) * given**weight
    return p / p.sum()


class Truth(nn.Module):
    """The network of perfect training on the joint distribution; the label after the last stands for no label."""

    depends_on_sigma = True

    def __init__(self, process: Process, wrapper: type, length: int = LENGTH) -> None:
        super().__init__()
        distributions = [distribution(label, length) for label in (*range(LABELS), None)]
        self.scores, self.wrapper, self.process = [exact.Score(one, process) for one in distributions], wrapper, process
        self.head = nn.Identity()

    def hidden(self, x: Tensor, sigma: Tensor, valid: Tensor | None = None, label: Tensor | None = None) -> Tensor:
        label = torch.full(sigma.shape, LABELS) if label is None else label
        level = sigma.unique(return_inverse=True)[1]
        key = (level * (LABELS + 1) + label) * self.process.num_states ** x.shape[-1]
        inputs, rows = (key + exact.index_of(x, self.process.num_states)).unique(return_inverse=True)
        first = torch.empty_like(inputs).scatter(0, rows, torch.arange(len(x)))  # any row with this input
        x, label, sigma = x[first], label[first], sigma[first].double()
        output = torch.empty(*x.shape, self.process.num_states, dtype=torch.float64)
        for k in label.unique():
            output[label == k] = self._network_output(self.scores[k], x[label == k], sigma[label == k])
        return output[rows]

    def _network_output(self, score: exact.Score, x: Tensor, sigma: Tensor) -> Tensor:
        if self.wrapper is MeanModel:
            log_mean = score.log_mean(x, sigma)
            logits = log_mean - self.process.add_log_likelihood(torch.zeros_like(log_mean), x, sigma)
            return nn.functional.pad(logits, (0, self.process.num_states - TOKENS))
        return score(x, sigma) - self.process.base_log_score(x, sigma)

    def forward(self, x: Tensor, sigma: Tensor, valid: Tensor | None = None, label: Tensor | None = None) -> Tensor:
        return self.hidden(x, sigma, valid, label)


def labelled(
    kind: tuple[str, str], label: int | None, length: int = LENGTH, schedule: LogLinear = SCHEDULE
) -> ScoreModel | MeanModel:
    """Return the model with a label, as `factory` builds it."""
    process, wrapper = PROCESSES[kind[0]], WRAPPERS[kind[1]]
    network: nn.Module = Truth(process, wrapper, length)
    return wrapper(network, process, schedule).bind(label=None if label is None else torch.tensor(label))


def guided_model(
    kind: tuple[str, str], label: int, weight: float, length: int = LENGTH, schedule: LogLinear = SCHEDULE
) -> Guided:
    return Guided(*(labelled(kind, one, length, schedule) for one in (label, None)), weight)


def finest(kind: tuple[str, str]) -> tuple[Sampler, int | None]:
    """A sampler and steps whose distribution is the model's: exactly, or within its steps."""
    return (FirstHitting(), None) if kind[0] == "absorbing" else (Tweedie(), 100)


def enumerated(chosen: Sampler, model: Any, steps: Steps, length: int = LENGTH) -> Tensor:
    """The distribution of the samples, of sequences of tokens alone."""
    found = exact.sample_distribution(chosen, model, torch.full((length,), -1), steps)
    states = exact.all_sequences(model.process.num_states, length)
    assert found[(states == TOKENS).any(-1)].sum() < 1e-12
    return found[(states < TOKENS).all(-1)]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().sum() / 2)


# A label is bound -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("label", [1, None])
def test_samples_have_the_distribution_of_their_label(kind: tuple[str, str], label: int | None) -> None:
    """Without one, that of all sequences together."""
    (sampler, steps), model = finest(kind), labelled(kind, label)
    right, found = distribution(label).probabilities, enumerated(sampler, model, steps)
    assert distance(found, right) < (1e-6 if kind[0] == "absorbing" else 2e-2)
    x = run(sampler, model, empty(COUNT, LENGTH), steps)
    assert p_value(x, found, TOKENS) > FAMILY / 100
    others = [distribution(other).probabilities for other in (*range(LABELS), None) if other != label]
    assert min(distance(right, other) for other in others) > 0.1
    assert max(p_value(x, other, TOKENS) for other in others) < POWER  # a label ignored or mistaken is seen


def test_each_row_of_a_batch_may_have_a_label_of_its_own() -> None:
    """As in training, in any order."""
    process, sigma = PROCESSES["uniform"], tensor(0.7).expand(4)
    x, label = torch.tensor([[0, 1], [2, 2], [1, 0], [1, 1]]), torch.tensor([2, 0, LABELS, 1])
    network = Truth(process, ScoreModel)
    together = ScoreModel(network, process).bind(label=label)(x, sigma)
    for row in range(4):
        alone = labelled(("uniform", "score"), None if label[row] == LABELS else int(label[row]))
        torch.testing.assert_close(together[row], alone(x[row : row + 1], sigma[:1])[0])
    order = torch.tensor([3, 1, 0, 2])
    torch.testing.assert_close(ScoreModel(network, process).bind(label=label[order])(x[order], sigma), together[order])


# What guidance is ------------------------------------------------------------------------------------------

WEIGHTS = [0.4, 1.0, 2.5]


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_mask_is_revealed_at_its_pace_to_a_normalised_mixture(wrapper: str, weight: float) -> None:
    """s_y = p_γ(y | x)/e by Bayes' rule, at every noise, for score models and for denoisers."""
    model, process = guided_model(("absorbing", wrapper), 1, weight), PROCESSES["absorbing"]
    x = exact.all_sequences(process.num_states, LENGTH)
    for noise in (0.02, 0.7, 4.0):
        sigma = tensor(noise).expand(len(x))
        free, given = (exact.Score(distribution(label), process).log_mean(x, sigma).exp() for label in (None, 1))
        p = free ** (1 - weight) * given**weight
        right = p / p.sum(-1, keepdim=True) / torch.expm1(sigma)[:, None, None]
        score, masked = model(x, sigma).exp(), process.is_noisy(x)
        torch.testing.assert_close(score[masked][:, :TOKENS], right[masked], rtol=1e-6, atol=1e-9)
        if weight != 1:  # the mutant: what is not normalised has another pace
            assert ((p.sum(-1) > 1.01) if weight > 1 else (p.sum(-1) < 0.99))[masked].any()


@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_guided_score_under_uniform_noise_is_the_score_of_the_tilted_noisy_distribution(weight: float) -> None:
    """p_t(x)^(1−γ)·p_t(x | label)^γ, at every noise."""
    model, process = guided_model(("uniform", "score"), 1, weight), PROCESSES["uniform"]
    x = exact.all_sequences(TOKENS, LENGTH)
    for noise in (0.02, 0.7, 4.0):
        sigma = tensor(noise)
        p = tilted(*(distribution(label).at(process, sigma) for label in (None, 1)), weight)
        here = exact.index_of(x, TOKENS)[:, None, None]
        stride = TOKENS ** torch.arange(LENGTH - 1, -1, -1)[:, None]
        there = here + (torch.arange(TOKENS) - x[..., None]) * stride
        torch.testing.assert_close(model(x, sigma.expand(len(x))).exp(), p[there] / p[here], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_guided_denoiser_under_uniform_noise_is_a_normalised_mixture(weight: float) -> None:
    model, process = guided_model(("uniform", "mean"), 1, weight), PROCESSES["uniform"]
    x = exact.all_sequences(TOKENS, LENGTH)
    sigma = tensor(0.7).expand(len(x))
    p = torch.lerp(
        *(exact.Score(distribution(label), process).log_mean(x, sigma) for label in (None, 1)), weight
    ).softmax(-1)
    torch.testing.assert_close(model.log_mean(x, sigma).exp(), p, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(model(x, sigma), process.mean_score(p.log(), x, sigma), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_at_weight_1_guidance_is_the_label_and_towards_0_there_is_none(kind: tuple[str, str]) -> None:
    process = PROCESSES[kind[0]]
    x = exact.all_sequences(process.num_states, LENGTH)
    sigma, seen = tensor(0.7).expand(len(x)), process.is_noisy(x)
    for weight, label in ((1.0, 1), (1e-9, None)):
        found, right = (model(x, sigma)[seen] for model in (guided_model(kind, 1, weight), labelled(kind, label)))
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


# What guidance samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in RATIOS], ids="-".join)
def test_one_token_has_the_tilted_distribution(kind: tuple[str, str], weight: float) -> None:
    """p(x)^(1−γ)·p(x | label)^γ exactly: the step is exact, and the mixture is the posterior of that distribution."""
    full_noise = LogLinear(1e-8)
    right = tilted(distribution(None, 1).probabilities, distribution(1, 1).probabilities, weight)
    assert distance(enumerated(Tweedie(), guided_model(kind, 1, weight, 1, full_noise), 5, 1), right) < 1e-5
    rates = Rates(*(labelled(kind, one, 1, full_noise) for one in (None, 1)), weight)
    if kind[0] != "absorbing" and weight != 1:  # the mutant: the score tilted, not the distribution of the clean token
        assert distance(enumerated(Tweedie(), rates, 5, 1), right) > 1e-3


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_several_masks_have_the_distribution_of_guided_choices_one_after_another(wrapper: str, weight: float) -> None:
    """The mean over orders of Π p_γ(x_i | those before it): without process or sampler."""
    model = guided_model(("absorbing", wrapper), 1, weight)
    free, given = (distribution(label).probabilities.view(TOKENS, TOKENS) for label in (None, 1))
    right = torch.zeros(TOKENS, TOKENS, dtype=torch.float64)
    for order in permutations(range(LENGTH)):
        p, q = free.permute(order), given.permute(order)
        first = tilted(p.sum(1), q.sum(1), weight)
        second = torch.stack([tilted(a / a.sum(), b / b.sum(), weight) for a, b in zip(p, q, strict=True)])
        right += (first[:, None] * second).permute(order) / 2
    assert distance(enumerated(FirstHitting(), model, None), right.flatten()) < 1e-6
    clean = tilted(free, given, weight)
    assert (distance(right, clean) < 1e-12) == (weight == 1)  # it is not the tilted distribution of the whole sequence


@pytest.mark.parametrize("weight", [0.4, 2.5])
def test_corrections_under_uniform_noise_lead_to_the_tilted_distribution(weight: float) -> None:
    """Gibbs steps leave p_t(x)^(1−γ)·p_t(x | label)^γ as it is, so the more of them, the nearer at the last noise."""
    model = guided_model(("uniform", "score"), 1, weight)
    right = tilted(distribution(None).probabilities, distribution(1).probabilities, weight)
    times = torch.cat([uniform_grid(20)[:-1], tensor(1e-4)[None], tensor(0.0)[None]])
    plain = distance(enumerated(Tweedie(), model, times), right)
    found = [distance(enumerated(Gibbs(sites), model, times), right) for sites in (1, 4, 32)]
    assert plain > found[0] > found[1] > found[2]
    assert found[2] < 1e-3 < 1e-2 < plain


@pytest.mark.parametrize("label", range(LABELS))
@pytest.mark.parametrize("weight", [0.4, 2.0])
def test_corrections_at_a_fixed_noise_level_do_not_reach_the_tilted_distribution(weight: float, label: int) -> None:
    """However many there are; the error falls to 0 with the last noise level, as the numbers of §9 show."""
    model = guided_model(("uniform", "score"), label, weight)
    right = tilted(distribution(None).probabilities, distribution(label).probabilities, weight)

    def error(sites: int, steps: int) -> float:
        """The total variation after ``sites`` corrections at t = 1/steps, and the last step from there."""
        times = tensor(1.0).new_tensor([1, 1 / steps, 0])
        return distance(enumerated(Gibbs(sites), model, times), right)

    found = {steps: error(60, steps) for steps in (4, 8, 32, 128, 512)}
    assert found[4] > 0.01
    assert error(120, 4) == pytest.approx(found[4], abs=1e-6)  # more corrections change nothing
    assert found[32] > 2 * found[128] > 4 * found[512]
    assert found[512] < 2e-3
    if (weight, label) == (2.0, 2):
        stated = (Path(__file__).parents[2] / "docs/mathematics.md").read_text()
        assert [value for value in found.values() if f"{value:.3f}" not in stated] == []


SAMPLERS: dict[str, tuple[str, Sampler]] = {
    "tweedie": ("any", Tweedie()),
    "euler": ("any", Euler()),
    "theta": ("any", Theta()),
    "ancestral": ("mean", Ancestral()),
    "first-hitting": ("absorbing", FirstHitting()),
    "ordered": ("absorbing", Ordered()),
    "remask": ("absorbing", Remask(eta=0.2)),
    "gibbs": ("tokens", Gibbs(sites=2)),
}
CASES = [
    (name, kind)
    for name, (needs, _) in SAMPLERS.items()
    for kind in KINDS
    if needs in ("any", *kind, "masks" if kind[0] == "absorbing" else "tokens")
]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_draws_have_the_enumerated_distribution(name: str, kind: tuple[str, str], temperature: float) -> None:
    chosen, model = SAMPLERS[name][1], guided_model(kind, 0, 2.0)
    model = model if temperature == 1 else Warped(model, temperature)
    x = run(chosen, model, empty(COUNT, LENGTH), 5, seed=3)
    assert p_value(x, enumerated(chosen, model, 5), TOKENS) > FAMILY / 100


# Wrong guidance must be caught -----------------------------------------------------------------------------


class Rates:
    """A mutant: rates are mixed, and nothing is normalised."""

    depends_on_sigma = True

    def __init__(self, free: ScoreModel | MeanModel, given: ScoreModel | MeanModel, weight: float) -> None:
        self.free, self.given, self.weight = free, given, weight
        self.process, self.schedule = given.process, given.schedule

    def __call__(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        return torch.lerp(self.free(x_t, sigma), self.given(x_t, sigma), self.weight)

    def hidden(self, x_t: Tensor, sigma: Tensor, valid: Tensor | None = None) -> Tensor:
        return self(x_t, sigma)

    def log_score_at(self, hidden: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
        return hidden


MUTANTS: dict[str, Callable[[ScoreModel | MeanModel, ScoreModel | MeanModel], object]] = {
    "not normalised": lambda free, given: Rates(free, given, 2.5),
    "label ignored": lambda free, given: Guided(free, free, 2.5),
    "label and none swapped": lambda free, given: Guided(free, given, 2.5),
    "weight counted from the label": lambda free, given: Guided(given, free, 3.5),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_wrong_guidance_is_caught(kind: tuple[str, str], mutant: str) -> None:
    """By draws against the right distribution; under uniform noise a score is a ratio and is not normalised."""
    right = enumerated(Tweedie(), guided_model(kind, 1, 2.5), 5)
    wrong = MUTANTS[mutant](labelled(kind, None), labelled(kind, 1))
    found = p_value(run(Tweedie(), wrong, empty(COUNT, LENGTH), 5, seed=4), right, TOKENS)
    same = mutant == "not normalised" and kind in RATIOS
    assert found > FAMILY / 100 if same else found < POWER


# Calls and impossible tokens ---------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_two_calls_are_counted_as_two(temperature: float) -> None:
    kind = ("absorbing", "mean")
    calls = {}
    for name, model in (("label", labelled(kind, 1)), ("guided", guided_model(kind, 1, 2.0))):
        view = SamplingModel(Warped(model, temperature))
        Ordered().sample(view, 7, LENGTH, steps=5)
        calls[name] = view.stats.batch_calls, view.stats.row_calls
    assert calls == {"label": (LENGTH, 7 * LENGTH), "guided": (2 * LENGTH, 2 * 7 * LENGTH)}


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_a_wrapper_is_a_model(kind: tuple[str, str]) -> None:
    """Wrapped in each other, in either order, and by a wrapper that changes nothing."""
    model, given, free = guided_model(kind, 1, 2.0), labelled(kind, 1), labelled(kind, None)
    x = exact.all_sequences(model.process.num_states, LENGTH)
    sigma, noisy = tensor(0.7).expand(len(x)), model.process.is_noisy(x)
    for one, other in ((Warped(given), given), (Guided(given, given, 2.0), given)):
        torch.testing.assert_close(one(x, sigma)[noisy], other(x, sigma)[noisy], rtol=1e-6, atol=1e-6)
    inside = Guided(Warped(given, 0.7), Warped(free, 0.7), 2.0)
    torch.testing.assert_close(inside.log_mean(x, sigma).exp().sum(-1), torch.ones(x.shape).double())
    assert isinstance(networks(Warped(inside))[-1], type(given))
    if kind[1] == "mean":  # p^(1/T) of a mixture of log p is the mixture of p^(1/T)
        found, right = inside.log_mean(x, sigma), Warped(model, 0.7).log_mean(x, sigma)
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_what_a_label_rules_out_is_never_drawn(process: Process) -> None:
    """And a token that occurs in no sequence makes no NaN."""
    both, one = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    for weight in (0.4, 2.5):
        scores = (exact.Score(exact.Distribution(p.double()), process, LogLinear(1e-8)) for p in (both, one))
        free, given = scores
        found = enumerated(Tweedie(), Guided(given, free, weight), 6, 1)
        torch.testing.assert_close(found, one.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_meaningless_weights_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="guidance is"):
        guided_model(("absorbing", "mean"), 1, weight)
