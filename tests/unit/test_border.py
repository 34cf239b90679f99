"""Bad input is refused in a sentence that names the value and the allowed range."""

import math

import pytest
import torch

from sedd import exact, objectives, parameterization
from sedd.exact.objectives import ExplicitScoreEntropy
from sedd.process import Absorbing, Frequency, Hybrid, Process, Uniform
from sedd.registry import PARAMETERIZATIONS
from sedd.schedule import (
    Cosine,
    Geometric,
    ImportanceTimes,
    LogLinear,
    Polynomial,
    Schedule,
)
from sedd.training.config import OBJECTIVES, PROCESSES, SCHEDULES, NoiseConfig

SIGMA = torch.tensor([0.5])
X = torch.tensor([[0, 1]])


@pytest.mark.parametrize("kind", [Uniform, Absorbing])
@pytest.mark.parametrize("size", [1, 0, -3])
def test_vocabulary_too_small(kind: type[Process], size: int, refuses: object) -> None:
    refuses(lambda: kind(size), f"vocab_size is {size}", "at least 2")


def test_distributions_that_noise_cannot_have(refuses: object) -> None:
    for share in (-0.1, 1.5, math.nan):
        refuses(lambda share=share: Process(4, mask_share=share), f"mask_share is {share}", "[0, 1]")
    for share in (0.0, 1.0):
        refuses(lambda share=share: Hybrid(4, share), f"mask_share is {share}", "uniform", "absorbing")
    for frequencies in ((1, 2, 3), (1, 2, 0, 3), (1, 2, -1, 3), (1, 2, 3, math.inf), (1, 2, 3, math.nan), ()):
        refuses(lambda frequencies=frequencies: Frequency(4, frequencies), "frequencies", "4 tokens")
    refuses(lambda: Frequency(4), "frequencies", "each token")
    refuses(lambda: NoiseConfig("uniform", mask_share=0.5), "mask_share", "noise.process=hybrid")
    refuses(lambda: NoiseConfig("hybrid", mask_share=1.0), "mask_share is 1.0", "(0, 1)")
    refuses(lambda: PROCESSES.build("frequency", 4), "frequencies are missing")
    refuses(lambda: PROCESSES.build("absorbing", 4, mask_share=0.5), "mask_share")


@pytest.mark.parametrize("process", [Uniform(4), Absorbing(4)], ids=str)
def test_tokens_out_of_range(process: Process, refuses: object, generator: torch.Generator) -> None:
    for bad in (-1, 7):
        refuses(lambda b=bad: process.corrupt(torch.tensor([[0, b]]), SIGMA, generator), f"token {bad}", "0..3")
    model = parameterization.ScoreModel(exact.Table(process.num_states, 2), process)
    refuses(lambda: model(torch.tensor([[0, 9]]), SIGMA), "state 9")


def test_masks_in_clean_data(refuses: object, generator: torch.Generator) -> None:
    masked = torch.tensor([[0, 4]])
    refuses(lambda: Absorbing(4).corrupt(masked, SIGMA, generator), "token 4", "mask", "0..3")
    model = parameterization.ScoreModel(exact.Table(5, 2), Absorbing(4))
    refuses(lambda: objectives.DenoisingScoreEntropy()(model, masked), "token 4", "mask", "0..3")


@pytest.mark.parametrize("process", [Uniform(4), Absorbing(4)], ids=str)
@pytest.mark.parametrize("sigma", [-0.1, math.nan])
def test_impossible_noise(process: Process, sigma: float, refuses: object, generator: torch.Generator) -> None:
    bad = torch.tensor([sigma])
    model = parameterization.ScoreModel(exact.Table(process.num_states, 2), process)
    refuses(lambda: process.corrupt(X, bad, generator), f"sigma is {bad.item()}", "0 or more")
    refuses(lambda: model(X, bad), f"sigma is {bad.item()}", "0 or more")
    refuses(lambda: LogLinear().t(bad), f"sigma is {bad.item()}", "between 0 and 6.9")
    refuses(lambda: Geometric().t(bad), f"sigma is {bad.item()}", "between 0.0001 and 20")


@pytest.mark.parametrize("schedule", [LogLinear(), Geometric(), Cosine(), Polynomial()], ids=str)
@pytest.mark.parametrize("t", [-0.01, 1.5, math.nan])
def test_times_outside_the_unit_interval(schedule: Schedule, t: float, refuses: object) -> None:
    bad = torch.tensor([0.5, t])
    refuses(lambda: schedule(bad), f"t is {bad[1].item()}", "[0, 1]")


@pytest.mark.parametrize("kind", [LogLinear, Cosine, Polynomial])
@pytest.mark.parametrize("eps", [0.0, 1.0, -1e-3, 2.0])
def test_eps_outside_the_unit_interval(kind: type, eps: float, refuses: object) -> None:
    refuses(lambda: kind(eps=eps), f"eps is {eps}", "between 0 and 1")


def test_other_settings_of_schedules(refuses: object) -> None:
    refuses(lambda: Geometric(2.0, 1.0), "lo is 2.0 and hi is 1.0", "0 < lo < hi")
    refuses(lambda: Geometric(0.0, 1.0), "lo is 0.0")
    refuses(lambda: Polynomial(0.5), "power is 0.5", "1 or more")
    refuses(lambda: ImportanceTimes(torch.tensor([1.0, 0.0])), "[1.0, 0.0]", "above 0")
    refuses(lambda: objectives.DenoisingScoreEntropy(t_min=1.0), "t_min is 1.0", "[0, 1)")
    refuses(lambda: objectives.D3PM(steps=0), "steps is 0", "at least 1")


@pytest.mark.parametrize("name", ["t-dce", "lambda-dce", "any-order"])
def test_objectives_that_mask_need_a_mask(name: str, refuses: object) -> None:
    loss, model = OBJECTIVES.build(name), parameterization.MeanModel(exact.Table(4, 2), Uniform(4))
    refuses(lambda: loss(model, X), "Absorbing", "Uniform(vocab_size=4)")


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("mean", "log_mean"),
        ("d3pm", "log_mean"),
        ("any-order", "log_mean"),
        ("ratio-matching", "log_conditional"),
        ("autoregressive", "log_next"),
    ],
)
def test_objectives_refuse_models_that_do_not_predict_what_they_need(name: str, method: str, refuses: object) -> None:
    model, loss = parameterization.ScoreModel(exact.Table(5, 2), Absorbing(4)), OBJECTIVES.build(name)
    refuses(lambda: loss(model, X), method, "Score", "parameterization")


def test_networks_of_the_wrong_width(refuses: object) -> None:
    model = parameterization.ScoreModel(exact.Table(4, 2), Absorbing(4))
    refuses(lambda: model(X, SIGMA), "4 entries", "needs 5")


def test_distributions_that_are_none_are_refused(refuses: object) -> None:
    refuses(lambda: exact.Distribution(torch.ones(2, 3) / 6), "(2, 3)", "axis")
    refuses(lambda: exact.Distribution(torch.tensor([0.5, 0.6])), "sums to 1.1", "sum to 1")
    refuses(lambda: exact.Distribution(torch.tensor([1.5, -0.5])), "-0.5", "0 or more")
    distribution = exact.Distribution(torch.eye(2) / 2)
    refuses(lambda: distribution.at(Uniform(3), SIGMA), "2 tokens", "Uniform(vocab_size=3)")
    refuses(lambda: distribution.at(Uniform(2), torch.tensor([math.inf])), "inf", "finite")
    model = parameterization.ScoreModel(exact.Table(3, 2), Uniform(3))
    refuses(lambda: ExplicitScoreEntropy(distribution)(model, X), "2 tokens", "Uniform(vocab_size=3)")
    refuses(lambda: distribution.given(torch.tensor([0, 1])), "[0, 1]", "probability 0")
    refuses(lambda: distribution.given(torch.tensor([0])), "(1,)", "2 entries")


def test_unknown_names_are_refused(refuses: object) -> None:
    refuses(lambda: PROCESSES.build("gauss", 4), "'gauss'", "absorbing, uniform")
    refuses(lambda: SCHEDULES.build("linear"), "'linear'", "log-linear")
    refuses(lambda: SCHEDULES.build("cosine", lo=1.0), "cosine has no option lo", "eps")
    refuses(lambda: OBJECTIVES.build("dse"), "'dse'", "score-entropy")
    refuses(lambda: OBJECTIVES.build("d3pm", t_min=0.1), "no option t_min", "steps")
    refuses(lambda: OBJECTIVES.build("explicit-score-entropy"), "needs distribution")
    refuses(lambda: PARAMETERIZATIONS.build("noise", exact.Table(4, 2), Uniform(4)), "'noise'", "score, mean")
