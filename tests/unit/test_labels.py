"""Labels: from a column of a table to the label of each training sequence."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sedd import data
from sedd.parameterization import ScoreModel
from sedd.process import Uniform
from sedd.runtime.distributed import Ranks
from sedd.tokenizer import Characters
from sedd.training import optimizer, validation
from sedd.training.batches import TrainingDataLoader
from sedd.training.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from sedd.training.setup import ARCHITECTURES, build_setup
from sedd.training.trainer import Trainer, train_step

ROWS = [("ab", "up"), ("ba", None), ("b", "down"), ("", "lost"), ("aa", "up"), ("bb", ""), ("a", 3)] * 4
NONEMPTY = [row for row in ROWS if row[0]]
NAMES = ("up", "down", "3")
ALONE = Ranks(0, 1, torch.device("cpu"))


def jsonl(path: Path, rows: list[tuple[str, object]] = ROWS) -> Path:
    path.write_text("".join(json.dumps({"text": text, "mood": mood}) + "\n" for text, mood in rows))
    return path


def csv(path: Path) -> Path:
    path.write_text("text,mood\n" + "".join(f"{text},{'' if mood is None else mood}\n" for text, mood in ROWS))
    return path


def parquet(path: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    moods = [None if mood is None else str(mood) for _, mood in ROWS]
    parquet.write_table(pyarrow.table({"text": [text for text, _ in ROWS], "mood": moods}), path)
    return path


def prepare(source: Path, out: Path, **options: object) -> Path:
    data.prepare([source], out, Characters.fit(["ab"]), **({"packing": "lines", "label": "mood"} | options))
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(jsonl(tmp_path / "rows.jsonl"), tmp_path / "shards")


@pytest.mark.parametrize(("write", "name"), [(jsonl, "a.jsonl"), (csv, "a.csv"), (parquet, "a.parquet")])
def test_every_record_keeps_its_label(tmp_path: Path, write: Callable[[Path], Path], name: str) -> None:
    """In the order of the table, for every split; an empty label means none, empty records are dropped."""
    shards = prepare(write(tmp_path / name), tmp_path / "shards")
    records = []
    for split in ("train", "validation"):
        blocks = data.TokenBlocks.open(shards, 2, split, 0.3, check=True)
        assert blocks.labels == NAMES
        numbers = np.arange(len(blocks))
        names = [(*blocks.labels, None)[k] for k in blocks.label_ids(numbers)]
        texts = [blocks.tokenizer.decode(row) for row in blocks.read(numbers)[0]]
        records += zip(texts, names, strict=True)
    assert records == [(text, None if mood in ("", None) else str(mood)) for text, mood in NONEMPTY]


def test_data_without_labels_have_no_label_files(tmp_path: Path) -> None:
    """No labels.bin, no entry in the index, and no labels in the blocks."""
    shards = prepare(jsonl(tmp_path / "rows.jsonl"), tmp_path / "shards", label=None)
    assert "labels" not in json.loads((shards / "index.json").read_text())
    assert not (shards / "labels.bin").exists()
    blocks = data.TokenBlocks.open(shards, 2, "all")
    assert blocks.labels == ()
    assert not blocks.label_ids(np.arange(5)).any()


def test_damaged_labels_are_detected(folder: Path, refuses: Callable[..., None]) -> None:
    file = folder / "labels.bin"
    intact = file.read_bytes()
    file.write_bytes(intact[:2] + b"\x02\x00" + intact[4:])
    refuses(lambda: data.TokenBlocks.open(folder, 2, "train", check=True), "labels.bin", "SHA-256 is wrong")
    file.write_bytes(intact[:-2])
    refuses(lambda: data.TokenBlocks.open(folder, 2, "train"), "labels.bin", "it has")
    index = json.loads((folder / "index.json").read_text())
    index["labels"]["names"][0] = "sideways"
    (folder / "index.json").write_text(json.dumps(index))
    refuses(lambda: data.TokenBlocks.open(folder, 2, "train"), "index.json is damaged")


def test_invalid_labels_are_refused(tmp_path: Path, refuses: Callable[..., None]) -> None:
    def attempt(rows: list[tuple[str, object]], **options: object) -> Callable[[], Path]:
        return lambda: prepare(jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "shards", **options)

    lines = tmp_path / "lines.txt"
    lines.write_text("ab\nba\n")
    refuses(lambda: prepare(lines, tmp_path / "shards"), "label is 'mood'", "has no columns")
    refuses(attempt(ROWS, label="tone"), "label is 'tone'", "text, mood")
    refuses(attempt(ROWS, packing="packed"), "label applies", "lines")
    refuses(attempt([("ab", 0.5)]), "record 1", "float", "an integer")
    refuses(attempt([("ab", None), ("ba", "")]), "no record", "has a label")
    many = [("ab", number) for number in range(2**16)]
    refuses(attempt(many), "more than 65535 labels")
    assert not (tmp_path / "shards").exists()
    with pytest.raises(ValueError, match=r"set data\.packing=lines"):
        DataConfig(label="mood")
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        DataConfig(label_dropout=1.0)


# Label embedding -------------------------------------------------------------------------------------------


def build_network(architecture: str, conditioned: bool, labels: int) -> torch.nn.Module:
    options = {
        "states": 4,
        "width": 16,
        "depth": 1,
        "heads": 2,
        "cond_dim": 8,
        "time_conditioning": conditioned,
        "labels": labels,
    }
    network = ARCHITECTURES[architecture](**options, generator=torch.Generator().manual_seed(0)).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    return network


@pytest.mark.parametrize("conditioned", [True, False])
@pytest.mark.parametrize("architecture", ["reference", "modern"])
def test_a_label_adds_one_embedding_and_changes_every_position(architecture: str, conditioned: bool) -> None:
    plain, labelled = build_network(architecture, conditioned, 0), build_network(architecture, conditioned, 3)
    added = {name: weight.shape for name, weight in labelled.state_dict().items() if name not in plain.state_dict()}
    assert added == {"label_embed.embedding": (4, 16)}  # and a network without labels has the published layout
    x, sigma = torch.tensor([[0, 1, 2], [3, 3, 3]]), torch.tensor([0.3, 2.0], dtype=torch.float64)
    label = torch.tensor([1, 3])
    both = labelled(x, sigma, label=label)
    one, none = (labelled(x, sigma, label=torch.full((2,), k)) for k in label)
    torch.testing.assert_close(both, torch.stack([one[0], none[1]]))
    assert torch.equal(labelled(x, sigma), none)  # None is no label
    assert ((one - none).abs().amax(-1) > 1e-3).all()


def test_a_bound_label_is_an_input_of_the_network_and_of_its_backbone() -> None:
    """Logits of the whole network and from its hidden states; with padding, and for any number of rows."""
    network, label = build_network("modern", True, 3), torch.tensor(2)
    bound = ScoreModel(network, Uniform(4)).bind(label=label)
    x, sigma = torch.tensor([[0, 1, 2], [3, 3, 3]]), torch.tensor([0.3, 2.0])
    valid = torch.tensor([[True, True, False], [True, True, True]])
    expected = network(x, sigma, valid, label=label.expand(2)).scatter(-1, x[..., None], 0)
    assert torch.equal(bound.bind(valid=valid)(x, sigma), expected)
    hidden = bound.hidden(x, sigma, valid)
    assert torch.equal(
        bound.log_score_at(hidden.flatten(0, 1), x.flatten(), sigma.repeat_interleave(3)), expected.flatten(0, 1)
    )
    assert torch.equal(
        bound(x[:1], sigma[:1]), ScoreModel(network, Uniform(4)).bind(label=label[None])(x[:1], sigma[:1])
    )


# Training batches and losses -------------------------------------------------------------------------------


def build_loader(
    folder: Path, dropout: float, seed: int = 0, ranks: Ranks = ALONE, size: int = 400
) -> TrainingDataLoader:
    parts = build_setup(RunConfig(), 3)
    blocks = data.TokenBlocks.open(folder, 2, "all")
    return TrainingDataLoader(blocks, parts, size, seed, ranks, dropout)


def test_hidden_labels_are_a_function_of_seed_and_step(folder: Path) -> None:
    """Other sequences in every step; nothing else in a batch changes, and every process has its own sequences."""
    loader = build_loader(folder, 0.25)
    shown, batch = build_loader(folder, 0.0)[7], loader[7]
    assert torch.equal(batch.label, loader[7].label)
    for name in ("x_0", "x_t", "t", "weight", "valid"):
        assert torch.equal(getattr(shown, name), getattr(batch, name)), name
    hidden = [(build_loader(folder, 0.0)[step].label != loader[step].label) for step in (7, 8)]
    assert not torch.equal(*hidden)
    known = (shown.label < 3).sum()
    share = (hidden[0].sum() / known).item()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / known.item()) ** 0.5  # five standard deviations
    assert (batch.label[hidden[0]] == 3).all()
    parts = [build_loader(folder, 0.25, ranks=Ranks(rank, 2, torch.device("cpu")))[7].label for rank in range(2)]
    assert torch.equal(torch.cat(parts), batch.label)


def build_trainer(folder: Path) -> Trainer:
    config = RunConfig(
        data=DataConfig(packing="lines", label="mood", pad="model"),
        model=ModelConfig(width=16, depth=1, heads=2, cond_dim=8, seq_len=2),
        train=TrainConfig(batch_size=8, eval_sequences=8, grad_accumulation=2),
    ).resolved()
    trainer = Trainer(
        config, *(data.TokenBlocks.open(folder, 2, split, 0.4) for split in ("train", "validation")), ALONE
    )
    for network in (trainer.network, trainer.ema.network):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(0, 0.4, generator=torch.Generator().manual_seed(1))
    return trainer


def test_loss_and_validation_bound_depend_on_the_label_of_each_sequence(folder: Path) -> None:
    trainer = build_trainer(folder)
    batch = trainer.dataloader[0]
    losses = trainer.position_losses(trainer.model, batch).sum(-1)
    other = batch._replace(label=torch.where(torch.arange(8) == 2, (batch.label + 1) % 4, batch.label))
    changed = trainer.position_losses(trainer.model, other).sum(-1) != losses
    assert changed.tolist() == [row == 2 for row in range(8)]
    bound = trainer.validation_bound()["bound"]
    trainer.validation_blocks._labels = np.roll(
        trainer.validation_blocks._labels, 1
    )  # mutant: sequences with the label of another
    assert abs(trainer.validation_bound()["bound"] - bound) > 1e-3


def test_every_validation_sequence_has_its_own_label(folder: Path) -> None:
    """Also where sequences repeat, and where rows are appended for the processes."""
    trainer, count = build_trainer(folder), 12
    blocks = trainer.validation_blocks
    x_0, *_, label = validation._validation_columns(trainer.setup, blocks, count, 8, seed=0)
    numbers = np.arange(count) % len(blocks)
    assert len(blocks) < count < len(label)
    assert np.array_equal(x_0[:count], blocks.read(numbers)[0])
    assert label[:count].tolist() == blocks.label_ids(numbers).tolist()
    assert len(set(label.tolist())) > 2


def test_the_gradient_reaches_the_labels_in_the_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(folder)
    batch = trainer.dataloader[0]
    embedding, grads = trainer.network.label_embed.embedding, []
    monkeypatch.setattr(optimizer, "step_if_finite", lambda *args: grads.append(embedding.grad.clone()))
    train_step(trainer, batch, 0.0, lambda pending: None)
    grad = grads[0].abs().sum(-1)
    assert ((grad > 0) == torch.isin(torch.arange(4), batch.label)).all()
