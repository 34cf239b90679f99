"""Held-out numbers: characters of the split itself, and a tokenizer that never saw it."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from runs import SMALL, Sedd, ok

from sedd import data
from sedd.tokenizer import load_tokenizer
from sedd.training.config import DataConfig, ModelConfig, RunConfig
from sedd.training.datasets import prepare_data

NONSENSE = "the cat sat on a mat and saw two small birds fly over old red houses near water"
WORDS = NONSENSE.split()


def text_with_another_tail() -> str:
    """20,000 characters of words, of which BPE joins most letters, then 1,500 of letters in no order and of é."""
    draw = random.Random(0)
    words = " ".join(draw.choices(WORDS, k=5200))[:20_000]
    return words + "".join(draw.choices("bcdfgjklmqzé", k=1500))


def evaluated(sedd: Sedd, *words: object) -> dict[str, float]:
    done = sedd("eval", *words, "--json")
    ok(done)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("tokenizer", ["bpe:300", "bytes", "chars"])
def test_bits_of_the_held_out_split_are_those_of_the_same_text_as_a_file(
    sedd: Sedd, tmp_path: Path, tokenizer: str
) -> None:
    """Per character and per byte, where the tail has other characters per token than the rest, and in the log too."""
    book, run = tmp_path / "book.txt", tmp_path / "run"
    book.write_text(text_with_another_tail())
    ok(sedd("train", book, *SMALL, "--tokenizer", tokenizer, "--steps", 2, "--out", run))
    made = load_tokenizer(next(run.glob("checkpoints/step-*")))
    ids = made.encode(book.read_text())
    blocks = len(ids) // 32
    held_out = ids[(blocks - max(1, round(0.05 * blocks))) * 32 : blocks * 32]
    (tmp_path / "tail.txt").write_bytes(made.decode(held_out).replace("\ufffd", "").encode())
    split, tail = (evaluated(sedd, run, *source, "--draws", 2) for source in ((), (tmp_path / "tail.txt",)))
    assert split["tokens"] == pytest.approx(tail["tokens"], abs=2)  # the split may begin inside é
    for unit in ("char", "byte"):
        per_token = [found[f"bits_per_{unit}"] / found["nats_per_token"] for found in (split, tail)]
        assert per_token[0] == pytest.approx(per_token[1], rel=2e-3)
    assert split["bits_per_char"] == pytest.approx(
        split["nats_per_token"] / math.log(2) * len(held_out) / len(made.decode(held_out)), rel=2e-3
    )
    logged = np.resize(held_out, 16 * 32)  # SMALL evaluates 16 sequences, and repeats them where there are fewer
    (last,) = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines() if '"bound"' in line]
    expected = last["bound"] / math.log(2) * len(logged) / len(made.decode(logged))
    assert last["bound_bits_per_char"] == pytest.approx(expected, rel=1e-6)


def test_bits_of_records_with_a_label_count_their_own_characters(sedd: Sedd, tmp_path: Path) -> None:
    """Long records of one label and short ones of the other: each is as many bits per character as its own text."""
    draw = random.Random(0)
    rows = [
        {"text": " ".join(draw.choices(WORDS, k=12 if name == "long" else 2)), "kind": name}
        for name in draw.choices(["long", "short"], k=300)
    ]
    table, run = tmp_path / "rows.jsonl", tmp_path / "run"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["--set", "model.width=32", "--set", "model.depth=1", "--set", "model.heads=2"]
    words = ["--tokenizer", "bpe:300", "--packing", "lines", "--label", "kind", "--steps", 2]
    ok(sedd("train", table, *small, *words, "--set", "data.val_fraction=0.3", "--out", run))
    length = json.loads((run / "config.json").read_text())["model"]["seq_len"]
    for name in ("long", "short"):
        texts = [row["text"] for row in rows[-90:] if row["kind"] == name]
        found = evaluated(sedd, run, "--label", name, "--draws", 2)
        assert found["tokens"] == len(texts) * length
        expected = found["nats_per_token"] / math.log(2) * found["tokens"] / sum(map(len, texts))
        assert found["bits_per_char"] == pytest.approx(expected, rel=1e-4)


def prepared(tmp_path: Path, text: str, packing: str = "packed") -> tuple[RunConfig, Path]:
    (tmp_path / "text.txt").write_text(text)
    config = RunConfig(
        data=DataConfig([str(tmp_path / "text.txt")], tokenizer="bpe:300", packing=packing),
        model=ModelConfig(seq_len=64),
    )
    return config, prepare_data(config)


@pytest.mark.parametrize("packing", ["packed", "lines"])
def test_held_out_text_does_not_change_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    """BPE fitted to a text equals BPE fitted to the same text with any other end; its beginning decides."""
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS, k=5)) for _ in range(2000)]
    tail = ["".join(draw.choices("qxzj", k=len(line))) for line in lines[-100:]]
    head = ["".join(draw.choices("qxzj", k=len(line))) for line in lines[:100]]
    made = [
        load_tokenizer(prepared(tmp_path, "\n".join(text), packing)[1])
        for text in (lines, lines[:-100] + tail, head + lines[100:])
    ]
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_a_tokenizer_that_saw_held_out_text_is_fitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end, 15 % of the characters, has such long tokens that the last 5 % of them begin within the first 90 %."""
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))
    draw = random.Random(0)
    head = "".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(8500))  # two tokens or more each
    config, folder = prepared(tmp_path, head + " ".join(draw.choices(WORDS, k=400))[:1500])
    train, held_out = (data.TokenBlocks.open(folder, 64, split) for split in ("train", "validation"))
    index = data.Index.read(folder)
    assert train._split_text[1] + held_out._split_text[1] == index.characters
    assert 0.9 * index.characters > train._split_text[1]  # what would have leaked
    assert "first 45%" in capsys.readouterr().err
    fitted = data.fit_tokenizer("bpe:300", config.data.sources, fraction=0.45)
    assert load_tokenizer(folder) == fitted.with_specials(eos=False, pad=False)


def test_a_prepared_folder_names_text_that_its_tokenizer_saw(sedd: Sedd, tmp_path: Path) -> None:
    """BPE of `sedd data prepare` never sees the end of the data; holding out more than that is a warning."""
    draw = random.Random(0)
    text = " ".join(draw.choices(WORDS, k=4000))
    last = len(text) // 20
    for name, end in (("one", text[-last:]), ("two", "qxzj" * (last // 4))):
        (tmp_path / f"{name}.txt").write_text(text[:-last] + end)
        ok(sedd("data", "prepare", tmp_path / f"{name}.txt", "--tokenizer", "bpe:300", "--out", tmp_path / name))
    assert load_tokenizer(tmp_path / "one") == load_tokenizer(tmp_path / "two")
    for fraction, is_seen in ((0.05, False), (0.3, True)):
        words = [*SMALL, "--steps", 1, "--set", f"data.val_fraction={fraction}"]
        done = sedd("train", tmp_path / "one", *words, "--out", tmp_path / f"run-{fraction}")
        ok(done)
        assert ("was fitted to text that is held out here" in done.stderr) == is_seen
