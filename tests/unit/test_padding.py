"""Ladder step 10: with padding to be ignored, a batch is its single rows, in the trainer's own loss and bound."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sedd import data, likelihood
from sedd.config import DataConfig, ModelConfig, NoiseConfig, RunConfig, TrainConfig
from sedd.diffusion.schedule import Times
from sedd.runtime.distributed import Ranks
from sedd.tokenizer import Characters
from sedd.training import Batch, Trainer, validation

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
    made = Characters(alphabet="ACGT")
    data.prepare([tmp_path / "records.txt"], tmp_path / "shards", made, packing="lines", length=LENGTH, pad="ignore")
    return tmp_path / "shards"


def trainer(folder: Path, kind: tuple[str, str, str], style: str) -> Trainer:
    """In float64, and with no weight at 0, so that nothing hides."""
    process, parameterization, objective = kind
    config = RunConfig(
        data=DataConfig(packing="lines", pad="ignore"),
        noise=NoiseConfig(process),
        model=ModelConfig(
            style, width=16, depth=2, heads=2, cond_dim=8, seq_len=LENGTH, parameterization=parameterization
        ),
        train=TrainConfig(batch_size=8, eval_sequences=12),
        objective=objective,
    ).resolved()
    blocks = [data.TokenBlocks.open(folder, LENGTH, split, 0.4) for split in ("train", "validation")]
    made = Trainer(config, *blocks, ALONE)
    generator = torch.Generator().manual_seed(1)
    for network in (made.network, made.average):
        network.double()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(0, 0.4, generator=generator)
    return made


def alone(batch: Batch, row: int) -> Batch:
    """One row without its padding."""
    length = int(batch.valid[row].sum())
    x_0, x_t, valid = (column[row : row + 1, :length] for column in (batch.x_0, batch.x_t, batch.valid))
    t, weight, label = (column[row : row + 1] for column in (batch.t, batch.weight, batch.label))
    return Batch(x_0, x_t, t, weight, valid, label, valid.sum(-1), valid.sum())


def every_row_is_itself(made: Trainer, losses: Callable[[torch.nn.Module, Batch], Tensor]) -> None:
    """Padded rows against single ones, with the right mates and with random ones."""
    batch = made.batches[0]
    assert not batch.valid.all()
    together = losses(made.network, batch)
    assert (together[~batch.valid] == 0).all()
    generator = torch.Generator().manual_seed(2)
    for row in range(8):
        single = losses(made.network, alone(batch, row)).squeeze(0)
        torch.testing.assert_close(together[row, : len(single)], single, rtol=1e-9, atol=1e-9)
        mates = torch.arange(8) != row
        random = torch.randint(4, batch.x_0.shape, generator=generator)
        where = mates[:, None] | ~batch.valid  # whatever stands in the padding of the row itself, too
        valid = torch.where(mates[:, None], torch.rand(batch.valid.shape, generator=generator) < 0.7, batch.valid)
        other = batch._replace(
            x_0=torch.where(where, random, batch.x_0), x_t=torch.where(where, random, batch.x_t), valid=valid
        )
        torch.testing.assert_close(losses(made.network, other)[row], together[row], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("style", ["reference", "modern"])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_loss_of_a_row_is_its_own(folder: Path, kind: tuple[str, str, str], style: str) -> None:
    made = trainer(folder, kind, style)
    every_row_is_itself(made, made.losses)


def test_padding_that_is_seen_is_noticed(folder: Path) -> None:
    made = trainer(folder, KINDS[0], "modern")
    made.padded = False  # the loss leaves padding out, but attention does not
    with pytest.raises(AssertionError, match="not close"):
        every_row_is_itself(made, made.losses)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_gradient_counts_valid_tokens_alone(folder: Path, kind: tuple[str, str, str]) -> None:
    """The mean over tokens of single rows; also in parts."""
    made = trainer(folder, kind, "modern")
    batch = made.batches[0]
    single = sum(made.losses(made.network, alone(batch, row)).sum() for row in range(8))
    torch.testing.assert_close(made.gradients(batch).loss.double(), single / batch.valid.sum(), rtol=1e-5, atol=1e-5)
    whole = [parameter.grad.clone() for parameter in made.network.parameters()]
    made.mover.forget()
    made.config.train.grad_accumulation = 4
    made.gradients(batch)
    torch.testing.assert_close([p.grad for p in made.network.parameters()], whole, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_held_out_bound_is_that_of_single_rows(folder: Path, kind: tuple[str, str, str]) -> None:
    made = trainer(folder, kind, "modern")
    bound = made.held_out_bound()
    rows = validation._rows(made.parts, made.held_out, 12, 8, made.config.seed)
    valid = rows[-2]
    assert len(valid) == 16
    assert not valid[12:].any()
    totals = []
    for row in range(12):
        length = int(valid[row].sum())
        x_0, x_t, x_first = (a[row : row + 1, :length] for a in rows[:3])
        t, weight = (a[row : row + 1] for a in rows[3:5])
        model = made.told(made.average, torch.ones(1, length, dtype=torch.bool), rows[-1][row : row + 1])
        terms = likelihood.terms(
            model, made.parts.process, made.parts.schedule, x_0, x_t, x_first, Times(t, weight), model.valid
        )
        totals.append(terms.total.item())
    counted = int(valid.sum())
    assert counted == sum(len(TEXTS[24:][i % 16]) for i in range(12))
    assert bound["bound"] == pytest.approx(sum(totals) / counted, rel=1e-9)
    error = np.std(totals) / np.sqrt(12) * 12 / counted
    assert bound["bound_stderr"] == pytest.approx(error, rel=1e-6)


def test_objectives_that_count_positions_are_refused(folder: Path, refuses: Callable[..., None]) -> None:
    refuses(lambda: trainer(folder, ("absorbing", "mean", "any-order"), "modern"), "counts positions", "lambda-dce")
