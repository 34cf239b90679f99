"""What a run without a recipe trains: chosen for machine, data and budget, and changed key by key."""

import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sedd import data
from sedd.tokenizer import Bytes
from sedd.training import recipes, sizing
from sedd.training.config import BudgetConfig, RunConfig
from sedd.training.overrides import merge_config

WORDS = ["The", "cat", "sat", "on", "a", "mat;", "TWO", "birds", "flew", "over", "(old)", "houses,", "0123456789", "!?"]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of known speed, without a GPU."""
    monkeypatch.setattr(sizing, "measure_flops", lambda device: 1e11)
    monkeypatch.setattr(sizing.torch.cuda, "is_available", lambda: False)


def write(path: Path, size: int, alphabet: str = "") -> str:
    draw = random.Random(0)
    text = "".join(draw.choices(alphabet, k=size)) if alphabet else " ".join(draw.choices(WORDS, k=size // 4))[:size]
    path.write_text(text)
    return str(path)


def weights(config: RunConfig) -> int:
    return config.model.depth * config.model.width**2


@pytest.mark.parametrize("tokenizer", [None, "bytes"])
def test_more_time_and_faster_machines_train_larger_networks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str | None
) -> None:
    """Never smaller, and from the smallest to the largest; a step never has less than 1024 tokens."""
    monkeypatch.setattr(sizing, "source_bytes", lambda options: 1e9)
    flags = {"sources": [write(tmp_path / "a.txt", 1000)], "tokenizer": tokenizer}
    found = [merge_config({**flags, "minutes": minutes}) for minutes in (0.1, 1, 5, 60, 1e3, 1e6)]
    sizes = [weights(config) for config in found]
    assert sizes == sorted(sizes)
    assert sizes[0] == 2 * 64**2
    assert sizes[-1] == 12 * 768**2
    for config in found:
        assert config.train.batch_size * config.model.seq_len >= 1024
        assert config.model.width % config.model.heads == 0
    monkeypatch.setattr(sizing, "measure_flops", lambda device: 1e14)
    assert weights(merge_config({**flags, "minutes": 5})) > sizes[2]


def test_a_short_text_gets_a_small_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine that could train a large one."""
    monkeypatch.setattr(sizing, "measure_flops", lambda device: 1e15)
    sizes = [weights(merge_config({"sources": [write(tmp_path / "a.txt", size)]})) for size in (1000, 10**5, 10**6)]
    assert sizes == sorted(set(sizes))
    assert 12 * sizes[1] <= sizing.WEIGHTS_PER_BYTE * 10**5


def test_the_network_sees_enough_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the arithmetic of the budget: the size that is chosen does, the next one does not."""
    monkeypatch.setattr(sizing, "source_bytes", lambda options: 1e9)
    config = merge_config({"sources": [write(tmp_path / "a.txt", 1000)], "minutes": 5})
    chosen = (config.model.width, config.model.depth)
    larger = sizing.SIZES[sizing.SIZES.index(chosen) + 1]
    flops = 5 * 60 * 1e11
    for size, is_enough in ((chosen, True), (larger, False)):
        seen = sizing.affordable_tokens(size, flops, "cpu") / sizing.block_weights(size)
        assert (seen >= sizing.TOKENS_PER_WEIGHT["cpu"]) == is_enough


@pytest.mark.parametrize(
    ("name", "size", "alphabet", "packing", "expected"),
    [
        ("short.txt", 10_000, "", "packed", "bytes"),
        ("book.txt", 1_000_000, "", "packed", "bpe:2048"),
        ("book.txt", 300_000, "", "packed", "bpe:512"),
        ("dna.txt", 500_000, "ACGT", "packed", "chars"),
        ("dna.txt", 5_000, "ACGT\n", "lines", "chars"),
        ("zinc.smi", 50_000, "CNOFSPIBHclnosr[]()+-=#/\\@123456789%\n", "lines", "chars"),
        ("lines.txt", 50_000, string.ascii_letters + string.digits + " .,\n", "lines", "bytes"),
    ],
)
def test_the_tokenizer_fits_the_text(
    tmp_path: Path, name: str, size: int, alphabet: str, packing: str, expected: str
) -> None:
    source = write(tmp_path / name, size, alphabet)
    assert merge_config({"sources": [source], "packing": packing}).data.tokenizer == expected


@pytest.mark.parametrize(
    ("alphabet", "tokenizer", "expected"),
    [
        ("ACGT", None, 3),
        ("ACDEFGHIKLMNP", None, 3),
        ("ACDEFGHIKLMNPQRSTVWY", None, 2),
        (string.ascii_letters + string.digits, "chars", 2),
        ("".join(map(chr, range(0x100, 0x200))), "chars", 1),
        ("", "bytes", 1),
        ("", "bpe:2048", 1),
        ("", "bpe:8192", 0),
        ("", "gpt2", 0),
    ],
)
def test_ngrams_are_few(tmp_path: Path, alphabet: str, tokenizer: str | None, expected: int) -> None:
    """On a CPU, with a norm after the embeddings; not where the network has none, nor if they were given."""
    flags = {"sources": [write(tmp_path / "a.txt", 20_000, alphabet)], "tokenizer": tokenizer}
    model = merge_config(flags).model
    assert (model.ngrams, model.embedding_norm) == (expected, True)
    if expected:
        assert (len(set(alphabet)) + 2) ** expected <= sizing.MAX_NGRAM_ROWS
    assert merge_config(flags, sets=["model.ngrams=0"]).model.ngrams == 0
    assert not merge_config({**flags, "objective": "ratio-matching"}).model.ngrams
    assert not merge_config(flags, sets=["model.architecture=reference"]).model.embedding_norm


@pytest.mark.parametrize(
    ("flags", "sets", "expected"),
    [
        ({}, [], 0.5),
        ({"objective": "lambda-dce"}, [], 0.5),
        ({}, ["train.loss_weighting=0"], 0.0),
        ({"process": "uniform"}, [], 0.0),
        ({"objective": "autoregressive"}, [], 0.0),
        ({"objective": "mean"}, [], 0.0),
        ({"recipe": "tiny"}, [], 0.0),
    ],
)
def test_losses_are_weighted_where_that_was_measured(
    tmp_path: Path, flags: dict[str, str], sets: list[str], expected: float
) -> None:
    """In runs that are sized, under absorbing noise, of objectives whose value is the bound; what is given wins."""
    recipe = flags.pop("recipe", None)
    given = {"sources": [write(tmp_path / "a.txt", 20_000)], **flags}
    assert merge_config(given, recipe=recipe, sets=sets).train.loss_weighting == expected


def test_ngrams_of_prepared_data_and_of_ids(tmp_path: Path) -> None:
    data.prepare([write(tmp_path / "a.txt", 300_000)], tmp_path / "prepared", Bytes())
    np.save(tmp_path / "a.npy", np.zeros((4, 8), dtype=np.uint8))
    assert [merge_config({"sources": [str(tmp_path / name)]}).model.ngrams for name in ("prepared", "a.npy")] == [1, 0]


def test_prepared_data_and_arrays_keep_their_tokenizer(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", 300_000)
    data.prepare([source], tmp_path / "prepared", Bytes())
    np.save(tmp_path / "a.npy", np.zeros((4, 8), dtype=np.uint8))
    for path in ("prepared", "a.npy"):
        assert merge_config({"sources": [str(tmp_path / path)]}).data.tokenizer == RunConfig().data.tokenizer


def test_data_of_unknown_size_is_taken_as_large() -> None:
    config = RunConfig.from_dict({"data": {"sources": ["hf:someone/something"]}})
    assert sizing.choose_sizing(config, {})["model"]["width"] > 64
    assert "data of unknown size" in sizing.describe_sizing(config)


def test_the_number_of_threads_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.from_dict({"data": {"sources": ["hf:someone/something"]}})
    for threads, words in ((1, "with 1 thread and"), (2, "with 2 threads and")):
        monkeypatch.setattr("torch.get_num_threads", lambda n=threads: n)
        assert words in sizing.describe_sizing(config, "cpu")


def test_given_keys_win_one_by_one(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", 300_000)
    lines: list[str] = []

    def merged(sets: list[str], **options: Any) -> RunConfig:
        return merge_config({"sources": [source], "minutes": 5, **options}, sets=sets, on_sizing=lines.append)

    chosen = merged([])
    changed = merged(["train.batch_size=24"], tokenizer="chars")
    assert (changed.train.batch_size, changed.data.tokenizer) == (24, "chars")
    changed.train.batch_size, changed.data.tokenizer = chosen.train.batch_size, chosen.data.tokenizer
    changed.model.ngrams = chosen.model.ngrams  # chosen for the tokenizer
    assert changed == chosen
    wide = merged(["model.width=256", "model.seq_len=512"])
    assert (wide.model.width, wide.model.depth, wide.model.seq_len) == (256, chosen.model.depth, 512)
    assert wide.model.width % (2 * wide.model.heads) == 0  # heads and batch fit what is given
    assert 1024 <= wide.train.batch_size * wide.model.seq_len < chosen.train.batch_size * 512
    assert lines[::2] == 3 * [f"{source}: the network is chosen for this machine, the data and the budget"]
    assert len(lines) == 6
    for words in ("24 sequences", "tokenizer chars", "0.3 MB", "5 minutes"):
        assert words in lines[3]
    assert merge_config({"sources": [source]}).budget.minutes == sizing.DEFAULT_MINUTES
    assert merge_config({"sources": [source], "steps": 3}).budget == merge_config({"steps": 3}).budget


def test_nothing_is_chosen_for_what_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a recipe, a stored configuration, a file or hand; nor by one of several processes for itself."""
    source, lines = write(tmp_path / "a.txt", 300_000), []
    sizes = ["model.width=32", "model.depth=2", "model.seq_len=16"]
    (tmp_path / "file.yaml").write_text("seed: 3\n")
    (tmp_path / "config.json").write_text('{"seed": 3}')
    for options in (
        {"sets": sizes},
        {"file": tmp_path / "file.yaml"},
        {"resume": tmp_path},
        *({"recipe": recipe} for recipe in recipes.RECIPES if "seq_len" in recipes.RECIPES[recipe]["model"]),
    ):
        config = merge_config({"sources": [source]}, **options, on_sizing=lines.append)
        assert config.optim.name == recipes.RECIPES.get(options.get("recipe"), {}).get("optim", {}).get("name", "adamw")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert merge_config({"sources": [source]}, on_sizing=lines.append).model == RunConfig().resolved().model
    assert not any("chosen for" in line for line in lines)
    assert lines[0] == (
        "as given: 2 blocks of width 32, 64 sequences of 16 tokens per step, tokenizer bytes, float32, 1,000 steps"
    )
    assert lines[1].startswith(f"settings of {tmp_path / 'file.yaml'}: 6 blocks of width 256, ")
    assert lines[2].startswith(f"run {tmp_path}: ")
    assert lines[4].startswith("recipe text8: 8 blocks of width 512, 256 sequences of 256 tokens per step, tokenizer c")


def test_a_budget_replaces_that_of_the_recipe() -> None:
    assert merge_config({}, recipe="tiny").budget == BudgetConfig(steps=1000)
    assert merge_config({"minutes": 60}, recipe="tiny").budget == BudgetConfig(minutes=60.0)
    both = merge_config({"steps": 7000}, recipe="tiny", sets=["budget.tokens=90"]).budget
    assert both == BudgetConfig(7000, 90)
    assert both.describe() == "7,000 steps or 90 tokens"
    assert BudgetConfig(minutes=0.5).describe() == "0.5 minutes"


@pytest.mark.parametrize("recipe", [None, "molecules"])
def test_the_length_of_records_is_that_of_the_longest(tmp_path: Path, recipe: str | None) -> None:
    """In one line; a length that is given, by hand or by the run that is resumed, is kept without a scan."""
    (tmp_path / "a.smi").write_text("CCO ethanol\nc1ccccc1\nC\n" * 30)
    lines: list[str] = []
    flags = {"sources": [str(tmp_path / "a.smi")], "packing": "lines"}
    config = merge_config(flags, recipe=recipe, on_sizing=lines.append)
    assert (config.model.seq_len, config.data.tokenizer) == (8, "chars")
    assert "90 records of 1 to 8 tokens" in lines[-2]
    assert len(lines) == (3 if recipe is None else 2)  # and the sizes
    lines.clear()
    assert merge_config({**flags, "seq_len": 20}, recipe="molecules", on_sizing=lines.append).model.seq_len == 20
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(config.as_dict()))
    assert merge_config(flags, resume=tmp_path / "run", on_sizing=lines.append).model.seq_len == 8
    assert not any("records of" in line for line in lines)


def test_prepared_records_bring_their_packing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ACGT\nACG\n" * 30)
    data.prepare([tmp_path / "a.txt"], tmp_path / "out", Bytes(), packing="lines", pad="ignore")
    config = merge_config({"sources": [str(tmp_path / "out")]}, recipe="tiny", sets=["model.width=32"])
    assert (config.data.packing, config.data.pad, config.model.seq_len) == ("lines", "ignore", 128)
    config = merge_config({"sources": [str(tmp_path / "out")]}, recipe="molecules")
    assert (config.data.packing, config.data.pad, config.model.seq_len) == ("lines", "ignore", 4)


def test_a_budget_replaces_that_of_the_run_that_is_resumed(tmp_path: Path) -> None:
    stored = merge_config({"minutes": 0.1, "sources": [write(tmp_path / "a.txt", 1000)]}, recipe="tiny")
    (tmp_path / "config.json").write_text(json.dumps(stored.as_dict()))
    assert merge_config({"steps": 70}, resume=tmp_path).budget == BudgetConfig(steps=70)
    assert merge_config({}, resume=tmp_path).budget == BudgetConfig(minutes=0.1)


def test_prepared_data_of_another_packing_is_refused(tmp_path: Path, refuses: Callable[..., None]) -> None:
    data.prepare([write(tmp_path / "a.txt", 3000)], tmp_path / "packed", Bytes())
    refuses(
        lambda: merge_config({"sources": [str(tmp_path / "packed")], "packing": "lines"}, recipe="tiny"),
        "data.packing is lines",
        "prepared with packed",
    )
