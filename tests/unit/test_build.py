"""The factory builds every process, schedule, objective and parameterization by its name."""

from collections.abc import Callable

import pytest
import torch

from sedd import exact, objectives
from sedd.evaluation.audit_losses import build_audited_process
from sedd.ops.fused_loss import fused_loss
from sedd.parameterization import CausalModel, MeanModel
from sedd.process import Absorbing, Frequency, Hybrid, Uniform
from sedd.registry import PARAMETERIZATIONS
from sedd.schedule import ImportanceTimes
from sedd.training.config import OBJECTIVES, PROCESSES, SCHEDULES, ModelConfig, RunConfig, TrainConfig
from sedd.training.setup import build_model, build_network, build_setup

P_DATA = exact.Distribution.random(4, 3, torch.Generator().manual_seed(0))
BOUNDS = {"score-entropy", "d3pm", "t-dce", "lambda-dce", "any-order", "autoregressive"}


def make(name: str) -> objectives.Objective:
    options = {"distribution": P_DATA} if name.startswith("explicit") else {}
    return OBJECTIVES.build(name, **options)


@pytest.mark.parametrize("process_name", PROCESSES.built_in)
@pytest.mark.parametrize("name", OBJECTIVES.built_in)
def test_every_objective_gives_a_finite_loss_per_position(name: str, process_name: str) -> None:
    if process_name != "absorbing" and name in {"t-dce", "lambda-dce", "any-order"}:
        return  # refused: see test_border
    generator = torch.Generator().manual_seed(0)
    process = build_audited_process(process_name, 4)
    loss_of = make(name)
    x_0 = P_DATA.draw(8, generator)
    loss = loss_of(exact.Score(P_DATA, process), x_0, generator=generator)
    assert loss.shape == x_0.shape
    assert loss.isfinite().all()
    assert loss_of.is_bound == (name in BOUNDS)


def test_every_parameterization_gives_log_scores_that_are_0_at_x_t() -> None:
    for process in (Uniform(4), Absorbing(4), Hybrid(4), Frequency(4, [1, 2, 3, 4])):
        for name in ("score", "mean", "conditional"):
            table = exact.Table(process.num_states, 3)
            with torch.no_grad():
                table.weight.normal_()
            model = PARAMETERIZATIONS.build(name, table, process)
            x_t = torch.randint(process.num_states, (5, 3))
            log_score = model(x_t, torch.rand(5))
            assert log_score.shape == (5, 3, process.num_states)
            assert (log_score.gather(-1, x_t[..., None]) == 0).all()
            assert hasattr(model, "log_mean") == (name == "mean")
            assert hasattr(model, "log_conditional") == (name == "conditional")
    assert hasattr(CausalModel(table, Absorbing(4)), "log_next")


def test_options_reach_what_is_built() -> None:
    assert SCHEDULES.build("geometric", lo=0.1, hi=3.0).hi == 3.0
    time_sampler = ImportanceTimes(torch.tensor([1.0, 3.0]))
    built = OBJECTIVES.build("score-entropy", t_min=0.25, time_sampler=time_sampler)
    times = built.times(torch.tensor([0.2, 0.6], dtype=torch.float64))
    torch.testing.assert_close(times.t, torch.tensor([0.25 + 0.75 * 0.4, 0.25 + 0.75 * (0.5 + 0.35 / 1.5)]).double())
    torch.testing.assert_close(times.weight, torch.tensor([1.5, 0.5]).double())
    assert OBJECTIVES.build("d3pm", steps=7).steps == 7


def test_the_time_sampling_of_a_run_reaches_its_objective(refuses: Callable[..., None]) -> None:
    u = torch.tensor([0.5], dtype=torch.float64)
    for name in ("score-entropy", "lambda-dce"):
        for time_sampler, t, weight in (("uniform", 0.5, 1.0), ("low-noise", 0.25, 1.0)):
            config = RunConfig(objective=name, train=TrainConfig(time_sampling=time_sampler)).resolved()
            times = build_setup(config, 4).objective.times(u)
            assert (times.t.item(), times.weight.item()) == (t, weight)
    refuses(
        lambda: build_setup(RunConfig(objective="d3pm", train=TrainConfig(time_sampling="low-noise")).resolved(), 4),
        "train.time_sampling is 'low-noise'; leave it out: d3pm has uniform times",
    )
    refuses(lambda: TrainConfig(time_sampling="late"), "'late'", "uniform, low-noise, bell")


def test_a_zero_network_makes_every_token_equally_likely() -> None:
    """So the first loss of a model whose head starts at 0 is known: log N nats per token, for both wrappers."""
    generator = torch.Generator().manual_seed(0)
    process = Absorbing(4)
    for name in ("score", "mean"):
        model = PARAMETERIZATIONS.build(name, exact.Table(5, 3), process)
        x_t = torch.tensor([[4, 4, 0]])
        log_mean = model(x_t, torch.tensor([0.7])) + torch.log(torch.expm1(torch.tensor(0.7)))
        torch.testing.assert_close(log_mean[0, :2, :4].exp(), torch.full((2, 4), 0.25).double())
    loss = OBJECTIVES.build("any-order")
    mean = PARAMETERIZATIONS.build("mean", exact.Table(5, 3), process)
    total = loss(mean, P_DATA.draw(6, generator), generator=generator).sum(-1)
    torch.testing.assert_close(total, torch.full((6,), 3 * torch.log(torch.tensor(4.0)).item()).double())


def test_time_conditioning_follows_the_objective(refuses: Callable[..., object]) -> None:
    """By default sigma where the objective has times, else none; an unknown value is refused."""
    assert [RunConfig(objective=name).time_conditioning for name in ("score-entropy", "t-dce", "lambda-dce")] == [
        "sigma",
        "sigma",
        "none",
    ]
    assert (
        RunConfig(objective="t-dce", model=ModelConfig(time_conditioning="none")).resolved().time_conditioning == "none"
    )
    refuses(
        lambda: RunConfig(objective="lambda-dce", model=ModelConfig(time_conditioning="sigma")).resolved(),
        "lambda-dce",
        "model.time_conditioning",
    )
    refuses(lambda: ModelConfig(time_conditioning="t"), "model.time_conditioning is 't'", "sigma, zero, none")


@pytest.mark.parametrize("conditioning", ["sigma", "zero", "none"])
def test_time_conditioning_reaches_the_network(conditioning: str) -> None:
    """Zero: as at σ = 0 for any σ, in every use: as a whole, in two parts, with padding, in a fused loss."""
    run = RunConfig(
        model=ModelConfig("reference", 16, 1, 2, time_conditioning=conditioning, parameterization="mean"),
        objective="t-dce",
    ).resolved()
    made = build_setup(run, 5)
    network = build_network(run, made)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    model = build_model(run, network, made)
    assert network.depends_on_sigma == (conditioning != "none")
    assert model.depends_on_sigma == (conditioning == "sigma")
    x, sigma = torch.tensor([[5, 1, 5, 2]] * 2), torch.tensor([0.3, 2.0])
    valid = torch.tensor([[True, True, True, False]] * 2)
    for read in (
        lambda: model.log_mean(x, sigma),
        lambda: model.bind(valid=valid).log_mean(x, sigma)[:, :3],
        lambda: model.hidden(x, sigma),
    ):
        same = torch.equal(*read())
        assert same == (conditioning != "sigma")
    network_sigma = sigma if conditioning == "sigma" else torch.zeros(2)
    assert torch.equal(model.hidden(x, sigma), network.hidden(x, network_sigma))
    headed = model.log_mean_at(model.hidden(x, sigma)[:, 0], x[:, 0], sigma)
    torch.testing.assert_close(headed, model.log_mean(x, sigma)[:, 0])
    x_0, t = torch.tensor([[0, 1, 3, 2]] * 2), torch.tensor([0.3, 0.8]).double()
    plain = made.objective.loss(model, x, x_0, t)
    torch.testing.assert_close(fused_loss(made.objective, model, x, x_0, t, torch.ones(2)).positions, plain.float())


def test_zero_conditioning_of_a_network_without_hidden_states() -> None:
    class Wave(torch.nn.Module):
        def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            return torch.cos(sigma)[:, None, None] * torch.arange(5.0).expand(*x.shape, 5)

    x, sigma = torch.tensor([[4, 1]] * 2), torch.tensor([0.5, 3.0])
    model = MeanModel(Wave(), Absorbing(4), time_conditioning="zero")
    assert torch.equal(model.log_mean(x, sigma), MeanModel(Wave(), Absorbing(4)).log_mean(x, torch.zeros(2)))
    assert torch.equal(model.log_mean_at(model.hidden(x, sigma)[:, 0], x[:, 0], sigma), model.log_mean(x, sigma)[:, 0])
    assert not model.depends_on_sigma
