"""Low precision is used where it changes a result by less than a tenth of its standard error, and only there."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sedd.evaluation import results
from sedd.evaluation.quality.judge import Judge, score_in_low_precision
from sedd.likelihood import estimate_likelihood
from sedd.likelihood.estimate import default_batch
from sedd.likelihood.estimators import BoundEstimator, FixedOrderEstimator
from sedd.likelihood.precision_check import PrecisionCheck, check_precision
from sedd.loading import LoadedModel
from sedd.nn.transformer import Modern
from sedd.parameterization import ScoreModel
from sedd.process import Absorbing
from sedd.registry import PARAMETERIZATIONS
from sedd.runtime.distributed import Ranks
from sedd.schedule import LogLinear
from sedd.tokenizer import build_tokenizer
from sedd.training.config import RunConfig
from sedd.training.datasets import open_datasets, prepare_data
from sedd.training.setup import build_model, build_setup
from sedd.training.trainer import Trainer

ALONE = Ranks(0, 1, torch.device("cpu"))


def check(bias: float, spread: float, count: int = 4000, seed: int = 0) -> tuple[PrecisionCheck, float]:
    """Check values of standard deviation 1 to which low precision adds noise; also return the true mean difference."""
    rng = np.random.default_rng(seed)
    values, noise = rng.normal(size=count), bias + spread * rng.normal(size=count)
    found = check_precision(values + noise, lambda chosen: values[chosen], 1 / math.sqrt(count), seed)
    assert found is not None
    return found, float(noise.mean())


def test_a_small_difference_is_negligible_and_a_large_one_is_not() -> None:
    limit = 0.1 / math.sqrt(4000)
    small, _ = check(bias=limit / 20, spread=0.001)
    assert small.is_negligible
    assert small.compared < 500  # most values were not computed twice
    large, _ = check(bias=5 * limit, spread=0.001)
    assert not large.is_negligible
    assert large.compared < 500
    unclear, _ = check(bias=0.0, spread=10.0)
    assert not unclear.is_negligible
    assert 500 <= unclear.compared <= 1000
    assert abs(large.difference - 5 * limit) <= 4 * large.stderr + 1e-12


def test_few_values_and_values_that_are_not_finite_are_not_compared() -> None:
    assert check_precision(np.zeros(63), lambda chosen: np.zeros(len(chosen)), 1.0) is None
    assert check_precision(np.array([*[0.0] * 99, math.nan]), lambda chosen: np.zeros(len(chosen)), 1.0) is None
    found = check_precision(np.zeros(64), lambda chosen: np.zeros(len(chosen)), 1.0)
    assert found == PrecisionCheck(0.0, 0.0, 16, True)


def test_what_counts_as_negligible_is_so() -> None:
    """Near the limit, where errors are likeliest: fewer than 1 in 20 of 400."""
    limit = 0.1 / math.sqrt(4000)
    found = [check(bias=limit, spread=0.005, seed=seed) for seed in range(400)]
    wrong = sum(result.is_negligible and abs(truth) > limit for result, truth in found)
    assert wrong < 20
    careless = sum(abs(result.difference) < limit and abs(truth) > limit for result, truth in found)
    assert careless > 20  # the mutant: without two standard errors


def network(seed: int = 0) -> Modern:
    generator = torch.Generator().manual_seed(seed)
    net = Modern(states=6, width=16, depth=2, heads=2, generator=generator)
    with torch.no_grad():
        net.head.weight.normal_(0, 0.5, generator=generator)
    return net.eval().requires_grad_(False)


class Shifted(torch.nn.Module):
    """A model whose log-scores are off by a constant."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.model, self.shift = ScoreModel(network(), Absorbing(5)), shift
        self.process, self.schedule = self.model.process, self.model.schedule

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        log_score: torch.Tensor = self.model(x, sigma)
        return log_score + self.shift


@pytest.mark.parametrize(("shift", "is_negligible"), [(1e-6, True), (0.5, False)])
def test_an_estimate_is_of_low_precision_only_if_that_is_negligible(shift: float, is_negligible: bool) -> None:
    process, schedule = Absorbing(5), LogLinear()
    full, low = Shifted(0.0), Shifted(shift)
    rows = [np.random.default_rng(i).integers(0, 5, 7 + i % 3) for i in range(32)]
    options = {"draws": 8, "seed": 3, "batch": 64, "ranks": ALONE}
    by = BoundEstimator(process, schedule)
    found = estimate_likelihood(full, by, rows, low_precision_model=low, **options)
    again = estimate_likelihood(full, by, rows, low_precision_model=low, **{**options, "batch": 25})
    assert again.nats == pytest.approx(found.nats, rel=1e-6)
    assert again.precision_check.compared == found.precision_check.compared
    expected = estimate_likelihood(low if is_negligible else full, by, rows, **options)
    assert found.precision_check is not None
    assert found.precision_check.is_negligible == is_negligible
    assert replace(found, precision_check=None) == expected
    both = [estimate_likelihood(model, by, rows, **options).nats for model in (low, full)]
    if not is_negligible:
        error = 5 * found.precision_check.stderr + 5 * expected.stderr
        assert abs(found.precision_check.difference - (both[0] - both[1])) <= error


def test_a_low_precision_that_overflows_is_not_used() -> None:
    process, options = Absorbing(5), {"draws": 8, "seed": 3, "batch": 32, "ranks": ALONE}
    by, rows = BoundEstimator(process, LogLinear()), [np.arange(5)] * 20
    found = estimate_likelihood(Shifted(0.0), by, rows, low_precision_model=Shifted(math.nan), **options)
    assert found == estimate_likelihood(Shifted(0.0), by, rows, **options)


def test_an_exact_likelihood_never_uses_low_precision() -> None:
    process = Absorbing(5)
    full = PARAMETERIZATIONS.build("mean", network(), process)
    by = FixedOrderEstimator(process, torch.arange)
    rows = [np.arange(5)] * 3
    options = {"draws": 8, "seed": 3, "batch": 32, "ranks": ALONE}
    found = estimate_likelihood(full, by, rows, low_precision_model=None, **options)
    assert estimate_likelihood(full, by, rows, low_precision_model=object(), **options) == found


def loaded(tmp_path: Path) -> LoadedModel:
    config = RunConfig.from_dict({"model": {"width": 16, "depth": 2, "heads": 2, "seq_len": 8}}).resolved()
    setup = build_setup(config, 5)
    net = network()
    model = build_model(config, net, setup)
    return LoadedModel(model, net, *setup, build_tokenizer("bytes", lambda: []), config, tmp_path)


def test_models_by_precision(tmp_path: Path) -> None:
    given = loaded(tmp_path)
    assert results.models_by_precision(given) == (given.model, "float32", None)
    half, *others = results.models_by_precision(given, "bfloat16")
    assert others == ["bfloat16", None]
    assert {p.dtype for p in given.network.parameters()} == {torch.float32}  # a copy was converted
    x = torch.randint(6, (4, 8), generator=torch.Generator().manual_seed(1))
    sigma = torch.full((4,), 0.7)
    exact, rounded = given.model(x, sigma), half(x, sigma)
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.1)
    with pytest.raises(ValueError, match="choose one of float32, bfloat16"):
        results.models_by_precision(given, "float16")


def test_the_batch_of_a_gpu_is_limited_by_tokens_and_logits() -> None:
    assert default_batch(torch.device("cpu"), 9, 8) == 16
    assert default_batch(torch.device("meta"), 9, 256) == 256
    assert default_batch(torch.device("meta"), 50_258, 1024) == 20


class RowJudge(Judge):
    """A judge for which token i costs i nats times a factor."""

    skips_first_token = False

    def __init__(self, factor: float, low_precision: "RowJudge | None" = None) -> None:
        self.factor, self.low_precision, self.calls = factor, low_precision, 0

    def token_nll(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        self.calls += len(x)
        return x.double() * self.factor

    def encode(self, texts: object) -> list[np.ndarray]:
        raise NotImplementedError

    def decode(self, ids: object) -> str:
        raise NotImplementedError

    def features(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(("factor", "is_negligible"), [(1 + 1e-6, True), (1.5, False)])
def test_a_judge_uses_low_precision_only_if_that_is_negligible(factor: float, is_negligible: bool) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 100, int(n)) for n in rng.integers(3, 9, 200)]
    judge = RowJudge(1.0, RowJudge(factor))
    scores, found = score_in_low_precision(judge, rows, 8, lambda done, total: None)
    assert found is not None
    assert found.is_negligible == is_negligible
    expected = [row.sum() * (factor if is_negligible else 1.0) for row in rows]
    np.testing.assert_allclose(scores, expected)
    assert (judge.calls < 60) == is_negligible
    alone = RowJudge(1.0)
    scores, found = score_in_low_precision(alone, rows, 8, lambda done, total: None)
    assert (found, alone.calls) == (None, 200)


def trainer(folder: Path, precision: str) -> Trainer:
    (folder / "text.txt").write_text("one two buckle my shoe\n" * 60)
    config = RunConfig.from_dict(
        {
            "data": {"sources": [str(folder / "text.txt")], "tokenizer": "chars"},
            "model": {"width": 16, "depth": 2, "heads": 2, "seq_len": 12},
            "train": {"batch_size": 8, "eval_sequences": 24, "precision": precision},
        }
    ).resolved()
    shards = prepare_data(config)
    made = Trainer(config, *open_datasets(config, lambda: shards, ALONE), ALONE)
    with torch.no_grad():
        made.ema.network.head.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
    return made


def test_the_first_validation_states_what_bfloat16_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))
    exact = trainer(tmp_path, "float32").validation_bound()
    assert "bound_bfloat16_difference" not in exact
    mixed = trainer(tmp_path, "bfloat16")
    first, later = mixed.validation_bound(), mixed.validation_bound()
    difference = first.pop("bound_bfloat16_difference")
    assert first == later
    assert difference == pytest.approx(first["bound"] - exact["bound"], abs=1e-6)
    assert 0 < abs(difference) < exact["bound_stderr"] / 10


def test_validation_is_in_float32_where_bfloat16_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the standard error were a thousandth of what it is."""
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))
    exact, mixed = trainer(tmp_path, "float32").validation_bound(), trainer(tmp_path, "bfloat16")
    bound_of = mixed._bound_of
    monkeypatch.setattr(mixed, "_bound_of", lambda model: replace(bound_of(model), stderr=1e-3 * exact["bound_stderr"]))
    first, later = mixed.validation_bound(), mixed.validation_bound()
    assert abs(first.pop("bound_bfloat16_difference")) > 1e-4 * exact["bound_stderr"]
    assert first == later
    assert later["bound"] == pytest.approx(exact["bound"], abs=1e-6)
