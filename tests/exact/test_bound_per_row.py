"""`likelihood.bound`: the bound on each row, with a calibrated error, whatever the other rows are."""

import math

import numpy as np
import pytest
import torch
from test_estimate import ALONE, NOISES, bound_of_each, small
from toys import random_distribution, random_model

from sedd import exact
from sedd.draws import derive_seed
from sedd.likelihood import bound, estimate_likelihood
from sedd.likelihood.estimators import BoundEstimator
from sedd.nn.transformer import Modern
from sedd.parameterization import CausalModel, MeanModel, ScoreModel
from sedd.process import Absorbing, Hybrid, Process
from sedd.schedule import LogLinear, Schedule


def rows(count: int, length: int = 6) -> torch.Tensor:
    return torch.randint(0, 8, (count, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("process", "schedule"), NOISES, ids=str)
@pytest.mark.parametrize("wrapper", [None, ScoreModel, MeanModel], ids=["exact", "score", "mean"])
def test_each_row_has_the_bound_of_its_sequence(process: Process, schedule: Schedule, wrapper: type | None) -> None:
    """27 values within 5 standard errors, and their mean within 4: false alarm below 1e-4. The errors are small."""
    distribution = random_distribution(3, 3, 0)
    if wrapper is None:
        model = exact.Score(distribution, process, schedule)
    else:
        model = random_model(wrapper, process, 3).requires_grad_(False)
        model.schedule = schedule
    truth = torch.from_numpy(bound_of_each(model, process, schedule, nodes=80))
    found = bound(model, distribution.sequences, draws=1024, batch=4096)
    off = found.nats - truth
    assert (off.abs() <= 5 * found.stderr + 1e-3 * truth).all()
    assert abs(off.mean()) <= 4 * found.stderr.square().sum().sqrt() / 27 + 1e-3 * truth.mean()
    assert (found.stderr <= 0.1 * truth).all()
    assert not found.nats.requires_grad


def test_the_mean_of_the_exact_score_is_the_entropy() -> None:
    """2,000 sequences of the distribution: the mean is the entropy, 4 standard errors of the mean off at most."""
    distribution, generator = random_distribution(3, 3, 0), torch.Generator().manual_seed(0)
    model = exact.Score(distribution, Absorbing(3), LogLinear(1e-5))
    found = bound(model, distribution.draw(2000, generator), draws=8, batch=4096)
    assert abs(found.nats.mean() - distribution.entropy()) <= 4 * found.nats.std() / math.sqrt(2000)


@pytest.mark.parametrize(("process", "schedule"), [*NOISES, (Hybrid(3), LogLinear())], ids=str)
def test_the_error_of_a_row_is_calibrated(process: Process, schedule: Schedule) -> None:
    """27 sequences, 12 seeds: 90 to 99 % of the 95 % intervals contain the bound, 4 standard errors of a coverage.

    Draws are heavy-tailed and each row has few pairs, so that the errors are on average somewhat above the spread.
    """
    model = exact.Score(random_distribution(3, 3, 0), process, schedule)
    truth = torch.from_numpy(bound_of_each(model, process, schedule, nodes=80))
    x_0 = exact.all_sequences(3, 3)
    found = [bound(model, x_0, draws=256, seed=seed, batch=4096) for seed in range(12)]
    errors, stderr = torch.stack([each.nats - truth for each in found]), torch.stack([each.stderr for each in found])
    assert 0.9 <= (errors.abs() < 1.96 * stderr).double().mean() <= 0.99
    assert 0.9 <= stderr.square().mean().sqrt() / errors.square().mean().sqrt() <= 1.5


def test_a_row_does_not_depend_on_the_others() -> None:
    x_0 = rows(5)
    whole = bound(small(), x_0, draws=16, seed=3)
    for part, expected in (
        (bound(small(), x_0[:2], draws=16, seed=3), slice(0, 2)),
        (bound(small(), x_0[3:4], draws=16, seed=3), slice(3, 4)),
        (bound(small(), x_0, draws=16, seed=3, batch=7), slice(0, 5)),
    ):
        torch.testing.assert_close(part.nats, whole.nats[expected], rtol=1e-5, atol=0)
        torch.testing.assert_close(part.stderr, whole.stderr[expected], rtol=1e-4, atol=0)
    assert (bound(small(), x_0, draws=16, seed=4).nats != whole.nats).all()


def test_a_row_is_a_data_set_of_one_sequence() -> None:
    x_0 = rows(3)
    found = bound(small(), x_0, draws=20, seed=9)
    for i in range(3):
        alone = estimate_likelihood(
            small(), BoundEstimator(Absorbing(8), LogLinear()), [x_0[i].numpy()], draws=20,
            seed=derive_seed(9, f"{x_0[i].tolist()} 0"), batch=64, ranks=ALONE,
        )  # fmt: skip
        assert found.nats[i].item() == pytest.approx(alone.nats * 6, rel=1e-5)
        assert found.stderr[i].item() == pytest.approx(alone.stderr * 6, rel=1e-4)


def test_padding_changes_nothing() -> None:
    x_0 = rows(2, 9)
    valid = torch.ones_like(x_0, dtype=torch.bool)
    valid[1, 5:] = False
    found = bound(small(), x_0.masked_fill(~valid, -1), draws=16, valid=valid)
    shorter = bound(small(), x_0[:, :5], draws=16)
    torch.testing.assert_close(found.nats[1], shorter.nats[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(found.stderr[1], shorter.stderr[1], rtol=1e-4, atol=0)
    full = bound(small(), x_0, draws=16)
    torch.testing.assert_close(found.nats[0], full.nats[0], rtol=1e-5, atol=0)
    assert torch.equal(bound(small().bind(valid=valid), x_0, draws=16).nats, found.nats)


def causal() -> CausalModel:
    network = Modern(
        states=9, width=16, depth=1, heads=2, time_conditioning=False, causal=True, dropout=0.5,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    with torch.no_grad():
        network.head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    return CausalModel(network, Absorbing(8))


def test_an_autoregressive_model_has_an_exact_value() -> None:
    """Without dropout, which is on again afterwards."""
    x_0, model = rows(3), causal().train()
    found = bound(model, x_0)
    assert model.network.training
    log_p = model.eval().log_next(x_0).gather(-1, x_0[..., None]).squeeze(-1)
    torch.testing.assert_close(found.nats, -log_p.sum(-1).double(), rtol=1e-6, atol=0)
    assert (found.stderr == 0).all()
    valid = torch.ones(3, 6, dtype=torch.bool)
    valid[:, 4:] = False
    torch.testing.assert_close(bound(model, x_0, valid=valid).nats, -log_p[:, :4].sum(-1).double(), rtol=1e-6, atol=0)


def test_mistakes_are_named() -> None:
    x_0, model = rows(2), small()
    for arguments, message in (
        ((model.network, x_0), "which has no process"),
        ((model, x_0[0]), r"x_0\[None\]"),
        ((model, x_0.float()), "int64"),
        ((model, x_0 + 7), "tokens must lie in 0..7"),
        ((model, x_0, 5), "choose 2, 4, 6"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            bound(*arguments)
    with pytest.raises(ValueError, match=r"valid is torch\.int64"):
        bound(model, x_0, valid=x_0)
    with pytest.raises(ValueError, match="batch is 0"):
        bound(model, x_0, batch=0)
    with torch.no_grad():
        model.network.head.weight[0] = np.nan
    with pytest.raises(ValueError, match="rows \\[0, 1\\]"):
        bound(model, x_0)
