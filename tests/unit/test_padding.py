"""Ignored padding (verification step 10): a padded batch has the losses and the bound of its sequences one by one."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sedd import data
from sedd.likelihood.estimators import default_estimator
from sedd.runtime.distributed import Ranks
from sedd.schedule import Geometric, LogLinear, Schedule
from sedd.tokenizer import Characters
from sedd.training import optimizer, validation
from sedd.training.batches import Batch
from sedd.training.config import DataConfig, ModelConfig, NoiseConfig, RunConfig, TrainConfig
from sedd.training.trainer import StepMetrics, Trainer, train_step

LENGTH, ALONE = 9, Ranks(0, 1, torch.device("cpu"))
TEXTS = ["ACGT" * 2, "A", "CG", "GGT", "TACA", "ACGTA", "CCCCCC", "GATTACA"] * 5
KINDS = [
    ("absorbing", "score", "score-entropy"),
    ("absorbing", "mean", "lambda-dce"),
    ("uniform", "score", "score-entropy"),
    ("uniform", "mean", "score-entropy"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "records.txt").write_text("\n".join(TEXTS))
    tokenizer = Characters(alphabet="ACGT")
    data.prepare(
        [tmp_path / "records.txt"], tmp_path / "shards", tokenizer, packing="lines", length=LENGTH, pad="ignore"
    )
    return tmp_path / "shards"


def build_trainer(folder: Path, kind: tuple[str, str, str], architecture: str) -> Trainer:
    """Build a trainer in float64 with no weight at 0, so that no dependence is hidden."""
    process, parameterization, objective = kind
    config = RunConfig(
        data=DataConfig(packing="lines", pad="ignore"),
        noise=NoiseConfig(process),
        model=ModelConfig(
            architecture, width=16, depth=2, heads=2, cond_dim=8, seq_len=LENGTH, parameterization=parameterization
        ),
        train=TrainConfig(batch_size=8, eval_sequences=12),
        objective=objective,
    ).resolved()
    blocks = [data.TokenBlocks.open(folder, LENGTH, split, 0.4) for split in ("train", "validation")]
    trainer = Trainer(config, *blocks, ALONE)
    generator = torch.Generator().manual_seed(1)
    for network in (trainer.network, trainer.ema.network):
        network.double()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(0, 0.4, generator=generator)
    return trainer


def single_sequence(batch: Batch, row: int) -> Batch:
    """Return one sequence without its padding."""
    length = int(batch.valid[row].sum())
    x_0, x_t, valid = (column[row : row + 1, :length] for column in (batch.x_0, batch.x_t, batch.valid))
    t, weight, label = (column[row : row + 1] for column in (batch.t, batch.weight, batch.label))
    return Batch(x_0, x_t, t, weight, valid, label, valid.sum(-1), valid.sum())


def check_rows_are_independent(trainer: Trainer, losses: Callable[[torch.nn.Module, Batch], Tensor]) -> None:
    """Compare each padded sequence with itself alone, and in a batch of other, random sequences."""
    batch = trainer.dataloader[0]
    assert not batch.valid.all()
    together = losses(trainer.model, batch)
    assert (together[~batch.valid] == 0).all()
    generator = torch.Generator().manual_seed(2)
    for row in range(8):
        single = losses(trainer.model, single_sequence(batch, row)).squeeze(0)
        torch.testing.assert_close(together[row, : len(single)], single, rtol=1e-9, atol=1e-9)
        others = torch.arange(8) != row
        random = torch.randint(4, batch.x_0.shape, generator=generator)
        where = others[:, None] | ~batch.valid  # also in the padding of the sequence itself
        valid = torch.where(others[:, None], torch.rand(batch.valid.shape, generator=generator) < 0.7, batch.valid)
        other = batch._replace(
            x_0=torch.where(where, random, batch.x_0), x_t=torch.where(where, random, batch.x_t), valid=valid
        )
        torch.testing.assert_close(losses(trainer.model, other)[row], together[row], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("architecture", ["reference", "modern"])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_losses_do_not_depend_on_padding_or_batch(folder: Path, kind: tuple[str, str, str], architecture: str) -> None:
    trainer = build_trainer(folder, kind, architecture)
    check_rows_are_independent(trainer, trainer.position_losses)


def test_attention_to_padding_is_detected(folder: Path) -> None:
    trainer = build_trainer(folder, KINDS[0], "modern")
    trainer.ignores_padding = False  # then only the loss leaves padding out
    with pytest.raises(AssertionError, match="not close"):
        check_rows_are_independent(trainer, trainer.position_losses)


def gradients(trainer: Trainer, batch: Batch) -> tuple[StepMetrics, list[Tensor]]:
    """Return metrics and gradients of a training step that leaves the weights as they are."""
    grads: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        copy_gradients = lambda *args: grads.extend(p.grad.clone() for p in trainer.network.parameters())  # noqa: E731
        patch.setattr(optimizer, "step_if_finite", copy_gradients)
        return train_step(trainer, batch, 0.0, lambda pending: None), grads


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_gradient_counts_valid_tokens_alone(folder: Path, kind: tuple[str, str, str]) -> None:
    """It is that of the mean over tokens of single sequences, with gradient accumulation too."""
    trainer = build_trainer(folder, kind, "modern")
    batch = trainer.dataloader[0]
    single = sum(trainer.position_losses(trainer.model, single_sequence(batch, row)).sum() for row in range(8))
    metrics, whole = gradients(trainer, batch)
    torch.testing.assert_close(metrics.loss.double(), single / batch.valid.sum(), rtol=1e-5, atol=1e-5)
    trainer.config.train.grad_accumulation = 4
    torch.testing.assert_close(gradients(trainer, batch)[1], whole, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_validation_bound_is_that_of_single_sequences(folder: Path, kind: tuple[str, str, str]) -> None:
    trainer = build_trainer(folder, kind, "modern")
    bound = trainer.validation_bound()
    columns = validation._validation_columns(trainer.setup, trainer.validation_blocks, 12, 8, trainer.config.seed)
    valid = columns[-2]
    assert len(valid) == 16
    assert not valid[12:].any()
    totals = []
    for row in range(12):
        length = int(valid[row].sum())
        x_0, x_t, x_first = (a[row : row + 1, :length] for a in columns[:3])
        t, weight = (a[row : row + 1] for a in columns[3:5])
        model = trainer.bind(trainer.ema_model, torch.ones(1, length, dtype=torch.bool), columns[-1][row : row + 1])
        terms = default_estimator(model).nats(model, x_0, x_t, x_first, t, weight, model.valid)
        totals.append(terms.total.item())
    tokens = int(valid.sum())
    assert tokens == sum(len(TEXTS[24:][i % 16]) for i in range(12))
    assert bound["bound"] == pytest.approx(sum(totals) / tokens, rel=1e-9)
    in_order = np.array(totals)[columns[3][:12].argsort()]  # of their times
    error = np.sqrt(np.square(in_order[1::2] - in_order[::2]).sum()) / tokens
    assert bound["bound_stderr"] == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize("schedule", [LogLinear(), Geometric(0.2, 8.0)], ids=str)
def test_the_reconstruction_term_has_the_noise_of_the_first_time(folder: Path, schedule: Schedule) -> None:
    """None with a schedule that begins without noise; else the share of masks is 1 − e^−σ(0), within 5 deviations."""
    trainer = build_trainer(folder, KINDS[0], "modern")
    setup = trainer.setup._replace(schedule=schedule)
    columns = validation._validation_columns(setup, trainer.validation_blocks, 1000, 8, trainer.config.seed)
    x_0, x_t, x_first, _, _, valid, _ = columns
    masks = (x_first != x_0)[valid]
    p, count = 1 - math.exp(-schedule.sigma(torch.zeros(1)).item()), int(valid.sum())
    assert abs(masks.double().mean() - p) <= 5 * math.sqrt(p * (1 - p) / count)
    assert (x_t != x_0)[valid].double().mean() > p + 0.1


def test_objectives_that_count_positions_are_refused(folder: Path, refuses: Callable[..., None]) -> None:
    refuses(
        lambda: build_trainer(folder, ("absorbing", "mean", "any-order"), "modern"), "counts positions", "lambda-dce"
    )
