"""A run can be used from any folder, moved and copied; messages name the run and the user's files."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from runs import SMALL, Sedd, ok

from sedd import load

HELD_OUT = ("--draws", 2, "--json")


def command(sedd: Sedd, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Type a command in ``folder``."""
    return sedd(*words, before=f"os.chdir({str(folder)!r})")


def value(done: subprocess.CompletedProcess[str]) -> float:
    ok(done)
    return float(json.loads(done.stdout)["nats_per_token"])


def test_a_run_is_used_from_elsewhere_moved_and_copied(
    sedd: Sedd, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed, evaluated, compared, described, reported and sampled, with relative paths and a tokenizer file."""
    home, away = tmp_path / "home", tmp_path / "away"
    (home / "texts").mkdir(parents=True)
    away.mkdir()
    (home / "texts" / "book.txt").write_text(corpus.read_text()[:8000])
    ok(command(sedd, home, "data", "prepare", "texts", "--out", "shards", "--tokenizer", "bpe:300"))
    shutil.copytree(home / "shards", home / "tokens")
    words = ["train", "texts", "--out", "run", *SMALL, "--tokenizer", "tokens", "--steps"]
    ok(command(sedd, home, *words, 1))
    expected = value(command(sedd, home, "eval", "run", *HELD_OUT))

    assert value(command(sedd, away, "eval", home / "run", *HELD_OUT)) == expected
    ok(command(sedd, away, "train", "--out", "../home/run", "--resume", "--steps", 2))
    expected = value(command(sedd, home, "eval", "run", *HELD_OUT))

    shutil.copytree(home / "run", away / "copy")  # the run alone: its data stays where it is
    assert value(command(sedd, away, "eval", "copy", *HELD_OUT)) == expected
    checkpoint = "copy/checkpoints/step-00000002"
    assert value(command(sedd, tmp_path, "eval", Path("away") / checkpoint, *HELD_OUT)) == expected

    home.rename(tmp_path / "moved")  # the run with its data
    moved = tmp_path / "moved"
    assert value(command(sedd, away, "eval", "../moved/run", *HELD_OUT)) == expected
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))
    in_python = load(moved / "run", device="cpu").evaluate(draws=2)
    assert in_python["nats_per_token"] == pytest.approx(expected, rel=1e-6)
    ok(command(sedd, moved, "train", "--out", "run", "--resume", "--steps", 3))
    config = json.loads((moved / "run" / "config.json").read_text())
    assert config["data"]["sources"] == [str(moved / "texts")]
    assert (config["data"]["tokenizer"], config["out"]) == (str(moved / "tokens"), str(moved / "run"))

    missing = [  # the copy is alone now
        (command(sedd, away, "eval", "copy"), "sedd eval RUN DATA --protocol held-out"),
        (command(sedd, away, "compare", "copy"), "--data DATA --protocol held-out"),
        (command(sedd, away, "train", "--out", "copy", "--resume"), "sedd train DATA --out copy --resume"),
    ]
    for done, advice in missing:
        assert (done.returncode, done.stdout) == (2, "")
        assert f"the run copy was trained on {home / 'texts'}, which does not exist now" in done.stderr
        assert f"name its new place: {advice}" in done.stderr
        assert not re.search("[0-9a-f]{32}", done.stderr)
    texts = os.path.relpath(moved / "texts", away)
    assert value(command(sedd, away, "eval", "copy", texts, "--protocol", "held-out", *HELD_OUT)) == expected
    ok(command(sedd, away, "compare", "copy", "--data", texts, "--protocol", "held-out", "--draws", 2))
    ok(command(sedd, away, "report", "copy", "--samples", 1))


def test_too_little_data_names_the_file(sedd: Sedd, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    done = command(sedd, tmp_path, "train", "short.txt", "--out", "run", *SMALL)
    assert done.returncode == 2
    assert "short.txt holds 11 tokens, 0 blocks of length 32" in done.stderr
    assert not re.search("[0-9a-f]{32}", done.stderr)


def test_a_folder_with_the_name_of_a_tokenizer_is_not_the_tokenizer(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").mkdir()
    for more in (["--steps", 1], ["--steps", 2, "--resume"]):
        ok(command(sedd, tmp_path, "train", corpus, "--out", "run", *SMALL, "--tokenizer", "bytes", *more))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["tokenizer"] == "bytes"
