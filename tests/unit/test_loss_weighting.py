"""``train.loss_weighting``: other gradients, the same logged loss, the same minimum; and the thread of the loader."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sedd import exact
from sedd.objectives import LambdaDCE, MeanCrossEntropy, TimeDCE
from sedd.parameterization import MeanModel
from sedd.process import Absorbing
from sedd.runtime.distributed import Ranks
from sedd.schedule import Cosine
from sedd.training.batches import use_one_core
from sedd.training.config import RunConfig, TrainConfig
from sedd.training.datasets import open_datasets, prepare_data
from sedd.training.trainer import Trainer

ALONE = Ranks(0, 1, torch.device("cpu"))
OBJECTIVES = ("lambda-dce", "any-order", "score-entropy", "concrete-score")


def build_trainer(folder: Path, objective: str, weighting: float) -> Trainer:
    (folder / "text.txt").write_text("one two buckle my shoe\n" * 60)
    config = RunConfig.from_dict(
        {
            "data": {"sources": [str(folder / "text.txt")], "tokenizer": "chars"},
            "model": {"width": 16, "depth": 2, "heads": 2, "seq_len": 12},
            "train": {"batch_size": 8, "loss_weighting": weighting},
            "objective": objective,
        }
    ).resolved()
    shards = prepare_data(config)
    trainer = Trainer(config, *open_datasets(config, lambda: shards, ALONE), ALONE)
    with torch.no_grad():
        trainer.network.head.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
    return trainer


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_is_weighted_and_the_log_is_not(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))
    plain, weighted = (build_trainer(tmp_path, objective, p) for p in (0.0, 0.5))
    batch = plain.dataloader[0]
    (total, losses), (weighted_total, same_losses) = (
        [a.detach() for a in trainer.batch_loss(batch)] for trainer in (plain, weighted)
    )
    torch.testing.assert_close(same_losses, losses, rtol=1e-5, atol=0)  # weights are in float32
    assert float(losses.sum()) == pytest.approx(float(total), rel=1e-5)
    masked = (
        batch.t if objective in ("lambda-dce", "any-order") else 1 - torch.exp(-plain.setup.schedule.sigma(batch.t))
    )
    assert float(weighted_total) == pytest.approx(float((1.5 * masked.sqrt() * losses).sum()), rel=1e-5)
    assert abs(weighted_total - total) > 0.01 * total  # the mutant: no weight


def test_the_corruption_probability_of_an_objective_is_that_of_its_noise() -> None:
    """Of 200,000 positions a fraction within five standard errors is masked."""
    process, t, generator = Absorbing(5), torch.tensor([0.1, 0.5, 0.9]), torch.Generator().manual_seed(0)
    x_0 = torch.zeros(3, 200_000, dtype=torch.long)
    for objective in (LambdaDCE(), TimeDCE(), MeanCrossEntropy()):
        model = MeanModel(exact.Table(6, 1), process, Cosine())
        p = objective.corruption_probability(model, t)
        masked = (objective.corrupt(model, x_0, t, generator) == 5).double().mean(-1)
        assert bool(((masked - p).abs() < 5 * (p * (1 - p) / 200_000).sqrt()).all())


def test_refusals(refuses: Callable[..., None]) -> None:
    refuses(
        lambda: RunConfig.from_dict(
            {"objective": "autoregressive", "train": {"loss_weighting": 0.5}}
        ).check_trainable(),
        "train.loss_weighting",
        "set it to 0",
    )
    refuses(lambda: TrainConfig(loss_weighting=-1.0), "train.loss_weighting is -1.0", "[0, inf)")


def test_the_thread_of_the_loader_uses_one_core_and_the_others_do_not() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as other:
            use_one_core(pool)
            torch.ones(100_000).sum()
            assert pool.submit(torch.get_num_threads).result() == 1
            assert other.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
