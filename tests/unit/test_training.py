"""What a run trains on, validates on, samples from and reports, by values that are known exactly."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sedd import evaluation
from sedd.data import block_order
from sedd.evaluation.corpus import validation_corpus
from sedd.likelihood.variance_reduction import neighbour_variance
from sedd.loading import load_model
from sedd.runtime.distributed import Ranks
from sedd.training import batches, loop, validation
from sedd.training import trainer as trainer_module
from sedd.training.config import RunConfig
from sedd.training.datasets import open_datasets, prepare_data
from sedd.training.trainer import Trainer, TrainingState, train_step

ALONE = Ranks(0, 1, torch.device("cpu"))
Options = dict[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))


def build_config(folder: Path, text: str, objective: str = "lambda-dce", **sections: dict[str, Any]) -> RunConfig:
    """Return the configuration of a tiny run on ``text``; ``sections`` are added to its own."""
    (folder / "text.txt").write_text(text)
    defaults: Options = {
        "data": {"sources": [str(folder / "text.txt")], "tokenizer": "chars"},
        "model": {"width": 16, "depth": 1, "heads": 2, "seq_len": 8},
        "train": {"batch_size": 8, "eval_sequences": 8, "log_every": 1},
        "optim": {"warmup_steps": 0},
        "budget": {"steps": 1},
    }
    merged = {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in {*defaults, *sections}}
    return RunConfig.from_dict({**merged, "objective": objective}).resolved()


def build_trainer(config: RunConfig, ranks: Ranks = ALONE) -> Trainer:
    """Return a trainer whose raw and averaged weights are random and differ."""
    shards = prepare_data(config)
    trainer = Trainer(config, *open_datasets(config, lambda: shards, ALONE), ALONE)
    for seed, network in enumerate((trainer.network, trainer.ema.network)):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in network.parameters():
                weight.normal_(0, 0.1, generator=generator)
    trainer.ranks = ranks
    return trainer


def no_handler(pending: object) -> None:
    raise AssertionError("a step was not finite")


def test_the_error_of_the_validation_bound_is_its_deviation_over_seeds(tmp_path: Path) -> None:
    """64 equal sequences, so that times and noise alone differ: 300 seeds, whose deviation has an error of 4 %.

    The error of independent times would be 1.4 times as large.
    """
    config = build_config(tmp_path, "ab" * 2048, train={"eval_sequences": 64}, data={"val_fraction": 0.5})
    trainer = build_trainer(config)
    bounds = []
    for seed in range(300):
        trainer.config.seed = seed
        bounds.append(trainer.validation_bound())
    deviation = np.std([bound["bound"] for bound in bounds])
    errors = np.sqrt(np.mean(np.square([bound["bound_stderr"] for bound in bounds])))
    assert errors == pytest.approx(deviation, rel=0.16)


def test_the_error_of_stratified_sums_counts_every_stratum_once() -> None:
    """Values 3, 1, 4 at the times 0.9, 0.1, 0.5: in order 1, 4, 3. Their pair differs by 3, the last by 1."""

    def variance(values: list[float], times: list[float]) -> float:
        return neighbour_variance(np.array(values), np.array(times))

    assert variance([3.0, 1.0, 4.0], [0.9, 0.1, 0.5]) == pytest.approx(3**2 + 1**2)
    assert variance([3.0, 1.0], [0.9, 0.1]) == pytest.approx(2**2)
    assert variance([3.0], [0.9]) == 0


# Held-out data ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_on_a(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """A run that is trained on nothing but a, while everything it holds out is b; and its log."""
    folder = tmp_path_factory.mktemp("held_out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEDD_CACHE", str(folder / "cache"))
        optim = {"lr": 0.02, "warmup_steps": 3, "lr_schedule": "linear", "final_lr_fraction": 0.5, "ema_decay": 0.5}
        config = build_config(
            folder, "a" * 480 + "b" * 160, data={"val_fraction": 0.25}, optim=optim, budget={"steps": 12}
        )
        prepare = lambda: prepare_data(config)  # noqa: E731
        loop.run(config, prepare, folder / "run", False, lambda kind, record: None)
        yield folder / "run", [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]


def test_validation_never_sees_training_data(run_on_a: tuple[Path, list[dict[str, Any]]]) -> None:
    """A guess between two letters costs log 2: what is learned costs less, and what was never seen far more."""
    _, log = run_on_a
    assert log[-1]["loss"] < 0.2 * math.log(2)
    assert log[-1]["bound"] > 2 * math.log(2)


def test_evaluation_of_a_run_never_sees_training_data(run_on_a: tuple[Path, list[dict[str, Any]]]) -> None:
    """`sedd eval RUN` scores the twenty held-out blocks of b; the same model gives a, as a text, a high likelihood."""
    run, log = run_on_a
    loaded = load_model(run / "checkpoints" / "step-00000012")  # the run's best is that of step 3
    (corpus,) = evaluation.load_corpora(loaded, None, evaluation.get_protocol("held-out"))
    assert [loaded.tokenizer.decode(ids) for ids in corpus.sequences] == ["b" * 8] * 20
    held_out = evaluation.evaluate(loaded, corpus, evaluation.get_protocol("held-out"), ALONE, draws=4)
    assert (held_out["tokens"], held_out["split"]) == (160, "the last 25.00% of blocks")
    assert held_out["nats_per_token"] > 2 * math.log(2)
    assert held_out["nats_per_token"] == pytest.approx(log[-1]["bound"], rel=0.2)
    (of_a,) = evaluation.text_corpora(["a" * 8], loaded)
    assert evaluation.evaluate(loaded, of_a, evaluation.SINGLE_TEXT, ALONE)["nats_per_token"] < 0.2 * math.log(2)


def test_the_learning_rate_of_every_step_is_logged_and_is_that_of_the_schedule(
    run_on_a: tuple[Path, list[dict[str, Any]]],
) -> None:
    """Linear warmup over three steps; linear decay to a half, of which step n has used n/12."""
    _, log = run_on_a
    warmup = [1 / 3, 2 / 3] + 10 * [1]
    assert [record["lr"] for record in log] == pytest.approx([0.02 * warmup[n] * (1 - n / 24) for n in range(12)])
    assert [record["step"] for record in log] == list(range(1, 13))
    assert log[-1]["tokens"] == 12 * 8 * 8


def test_the_splits_of_a_run_are_disjoint_and_complete(tmp_path: Path) -> None:
    text = "".join(chr(ord("A") + n // 8) for n in range(400))  # each block is one letter of its own
    trainer = build_trainer(build_config(tmp_path, text, data={"val_fraction": 0.2}))
    seen = [{row[0] for row in blocks.decode()} for blocks in (trainer.blocks, trainer.validation_blocks)]
    assert (len(seen[0]), len(seen[1]), len(seen[0] | seen[1])) == (40, 10, 50)
    assert trainer.validation_bound() != {}


# Averaged weights ------------------------------------------------------------------------------------------


def test_samples_validation_and_loading_use_averaged_weights(tmp_path: Path) -> None:
    """They do not change with the raw weights, and they do with the averaged ones."""
    trainer = build_trainer(build_config(tmp_path, "abcdefgh" * 50))

    def results() -> tuple[list[str], float]:
        return trainer.sample_texts(4, steps=8), trainer.validation_bound()["bound"]

    before = results()
    with torch.no_grad():
        trainer.network.head.weight.fill_(7)
    assert results() == before
    trainer.save(tmp_path / "run" / "checkpoints")
    default, model = (load_model(tmp_path / "run", *names).network.head.weight for names in ((), ("model",)))
    assert torch.equal(default, trainer.ema.network.head.weight)
    assert (model == 7).all()
    with torch.no_grad():
        trainer.ema.network.head.weight.mul_(-3)
    assert all(a != b for a, b in zip(results(), before, strict=True))


# One step --------------------------------------------------------------------------------------------------


def reference_step(
    trainer: Trainer, batch: batches.Batch, adam: torch.optim.AdamW, number: int, lr: float
) -> tuple[float, float]:
    """One step, written out: loss, gradient, clipping, AdamW, EMA; return the loss and the norm of the gradient."""
    objective, options = trainer.setup.objective, trainer.config.optim
    nats = objective.loss(trainer.model, batch.x_t, batch.x_0, batch.t)
    loss = (batch.weight.to(nats.dtype) * nats.sum(-1)).sum() / batch.x_0.numel()
    weights = list(trainer.network.parameters())
    grads = torch.autograd.grad(loss, weights)
    norm = torch.sqrt(sum((grad**2).sum() for grad in grads))
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad * min(1.0, options.grad_clip / (float(norm) + 1e-6))
    for group in adam.param_groups:
        group["lr"] = lr
    adam.step()
    decay = min(options.ema_decay, (1 + number) / (10 + number))
    for mean, weight in zip(trainer.ema.network.parameters(), weights, strict=True):
        mean.data.copy_(decay * mean.data + (1 - decay) * weight.data)
    return float(loss.detach()), float(norm)


UNFUSED = {"noise": {"process": "uniform"}, "model": {"parameterization": "mean"}}


@pytest.mark.parametrize(
    ("objective", "time_sampling", "sections"),
    [("lambda-dce", "low-noise", {}), ("score-entropy", "low-noise", {}), ("score-entropy", "bell", UNFUSED)],
    ids=["cross-entropy", "score entropy", "not fused"],
)
def test_a_step_is_loss_gradient_clipping_adamw_and_ema(
    tmp_path: Path, objective: str, time_sampling: str, sections: Options
) -> None:
    """Three steps in float64, with gradient accumulation, against the same written out; fused losses and others."""
    config = build_config(
        tmp_path,
        "one two buckle my shoe\n" * 40,
        objective,
        train={"grad_accumulation": 2, "time_sampling": time_sampling},
        optim={"grad_clip": 0.1, "ema_decay": 0.15, "weight_decay": 0.1},
        **sections,
    )
    ours = build_trainer(config)
    theirs = build_trainer(config)
    for trainer in (ours, theirs):
        trainer.network.double()
        trainer.ema.network.double()
    groups = [
        {"params": [w for w in theirs.network.parameters() if (w.ndim > 1) is is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, 0.1), (False, 0.0))
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    for number, lr in enumerate((1e-2, 5e-3, 2e-3)):
        batch = ours.dataloader[number]
        assert batch.weight.std() > 0.1  # weights that are not all 1
        metrics = train_step(ours, batch, lr, no_handler)
        expected = reference_step(theirs, batch, adam, number, lr)
        assert (metrics.loss.item(), metrics.grad_norm.item()) == pytest.approx(expected, rel=1e-5)
        assert metrics.grad_norm > config.optim.grad_clip
    for mine, other in ((ours.network, theirs.network), (ours.ema.network, theirs.ema.network)):
        torch.testing.assert_close(list(mine.parameters()), list(other.parameters()), rtol=1e-6, atol=1e-8)


def test_dropout_is_a_function_of_seed_step_and_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds of two steps on two ranks all differ; the same step repeats its loss, and the next one does not."""
    trainer = build_trainer(build_config(tmp_path, "ab" * 200, model={"dropout": 0.5}))
    batch, seeds = trainer.dataloader[0], {}
    with monkeypatch.context() as patch:

        def stop(device: torch.device, seed: int) -> None:
            seeds[trainer.config.seed, trainer.state.step, trainer.ranks.rank] = seed
            raise InterruptedError

        patch.setattr(trainer_module, "_seed_dropout", stop)
        for key in ((0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0)):
            trainer.config.seed, trainer.state.step, rank = key
            trainer.ranks = Ranks(rank, 2, torch.device("cpu"))
            with pytest.raises(InterruptedError):
                train_step(trainer, batch, 0.0, no_handler)
    assert len(set(seeds.values())) == len(seeds) == 5
    trainer.config.seed, trainer.ranks, losses = 0, ALONE, []
    for number in (0, 0, 1):
        trainer.state.step = number
        losses.append(train_step(trainer, batch, 0.0, no_handler).loss.item())
    assert losses[0] == losses[1] != losses[2]


# Batches ---------------------------------------------------------------------------------------------------


def test_batches_follow_the_order_of_blocks_and_the_noise_of_every_step_is_new(tmp_path: Path) -> None:
    """Two epochs of batches are the blocks in their order; one repeated block has other times and noise each step."""
    trainer = build_trainer(build_config(tmp_path, "".join(map(chr, range(200, 600)))))
    count = len(trainer.blocks)
    size, steps = trainer.config.train.batch_size, 2 * count // trainer.config.train.batch_size
    rows = torch.cat([trainer.dataloader[number].x_0 for number in range(steps)])
    order = np.concatenate([block_order(0, number * size, size, count) for number in range(steps)])
    assert np.array_equal(rows.numpy(), trainer.blocks.read(order)[0])
    assert np.bincount(order).min() >= 1

    same = build_trainer(build_config(tmp_path, "abcdefgh" * 2, model={"seq_len": 8}, train={"batch_size": 64}))
    first, again, later = (same.dataloader[number] for number in (0, 0, 1))
    assert torch.equal(first.x_0, later.x_0)
    assert torch.equal(first.t, again.t)
    assert torch.equal(first.x_t, again.x_t)
    assert not (first.t == later.t).any()
    assert not torch.equal(first.x_t, later.x_t)


def test_every_use_of_random_numbers_has_a_stream_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise, label dropout and dropout of a step, and validation, are seeded by different keys."""
    trainer, keys = build_trainer(build_config(tmp_path, "ab" * 200)), []
    seeded: Callable[..., torch.Generator] = batches.seeded_generator

    def record(*key: int) -> torch.Generator:
        keys.append(key)
        return seeded(*key)

    for module in (batches, trainer_module, validation):
        monkeypatch.setattr(module, "seeded_generator", record)
    for number in (0, 1):
        train_step(trainer, trainer.dataloader[number], 0.0, no_handler)
    trainer.validation_bound()
    trainer.validation_bound()
    *of_steps, first, second = keys
    assert len(set(of_steps)) == len(of_steps) == 6  # three uses in each of two steps
    assert len({key[2] for key in of_steps}) == 3
    assert first == second  # always the same noise
    assert first not in of_steps
    assert all(key[0] == trainer.config.seed for key in keys)


# Units -----------------------------------------------------------------------------------------------------


def test_bits_per_character_of_characters_of_two_bytes(tmp_path: Path) -> None:
    """A token is a byte and half a character: two nats per token are 2/log 2 bits per byte and twice that per é."""
    config = build_config(tmp_path, "é" * 200, data={"tokenizer": "bytes"})
    trainer = build_trainer(config)
    assert trainer.blocks.bits_per_char(2.0) == pytest.approx(4 / math.log(2))
    assert trainer.blocks.text_per_token() == (0.5, 1)
    bound = trainer.validation_bound()
    assert bound["bound_bits_per_char"] == pytest.approx(2 * bound["bound"] / math.log(2))
    trainer.save(tmp_path / "run" / "checkpoints")
    loaded = load_model(tmp_path / "run")
    held_out = validation_corpus(trainer.blocks.folder, loaded)
    for corpus in (held_out, *evaluation.text_corpora(["éé"], loaded)):
        found = evaluation.evaluate(loaded, corpus, evaluation.SINGLE_TEXT, ALONE, draws=2)
        assert found["bits_per_token"] == pytest.approx(found["nats_per_token"] / math.log(2), abs=1e-4)
        assert found["bits_per_byte"] == pytest.approx(found["bits_per_token"], abs=1e-4)
        assert found["bits_per_char"] == pytest.approx(2 * found["bits_per_token"], abs=1e-4)
        assert found["ppl_bound"] == pytest.approx(math.exp(found["nats_per_token"]), rel=1e-3)


def test_the_best_checkpoint_is_that_of_the_lowest_bound() -> None:
    state, best = TrainingState(), []
    for number, bound in enumerate((3.0, 2.0, 2.5, math.nan, 1.0, 1.0)):
        state.step = number
        best.append(state.update_best(bound))
    assert best == [True, True, False, False, True, False]
    assert (state.best, state.best_step) == (1.0, 4)
