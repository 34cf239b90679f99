"""File names of any characters and bytes, terminals of any encoding, Ctrl-C at any moment."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SMALL, Sedd, ok

WORDS = [*SMALL, "--tokenizer", "bytes", "--steps", 2]


@pytest.mark.parametrize("name", ["💥", os.fsdecode(b"caf\xe9")], ids=["emoji", "latin-1"])
def test_data_and_results_of_any_name(sedd: Sedd, corpus: Path, tmp_path: Path, name: str) -> None:
    """The name is stored, read again as an option file, found at resume, and printed."""
    folder, run, again = tmp_path / name, tmp_path / "run", tmp_path / "again"
    folder.mkdir()
    text = folder / f"{name}.txt"
    text.write_text(corpus.read_text()[:9000])
    ok(sedd("train", text, *WORDS, "--out", run))
    assert json.loads((run / "config.json").read_text())["data"]["sources"] == [str(text)]
    ok(sedd("train", "--out", run, "--resume", "--steps", 3))
    ok(sedd("train", "--config", run / "config.json", "--out", again, "--steps", 1))
    assert json.loads(sedd("runs", tmp_path, "--json").stdout.splitlines()[0])["data"] == text.name
    ok(sedd("runs", tmp_path))
    ok(sedd("data", "prepare", text, "--out", folder / "shards"))
    ok(sedd("eval", run, text, "--draws", 2, "--out", folder / "result.jsonl"))
    assert json.loads((folder / "result.jsonl").read_text())["data"] == str(text)
    missing = sedd("train", folder / "missing", "--out", tmp_path / "new")
    assert missing.returncode == 2
    assert "missing does not exist" in missing.stderr


def test_a_model_whose_folder_is_not_utf_8(sedd: Sedd, corpus: Path, words_run: Path, tmp_path: Path) -> None:
    """The library of the format of weights cannot open it; that is said before any work."""
    out = tmp_path / os.fsdecode(b"caf\xe9")
    commands = (["train", corpus, *WORDS], ["export", words_run, "--dtype", "int8"], ["push", words_run, "owner/name"])
    for words in commands:
        done = sedd(*words, "--out", out)
        assert done.returncode == 2
        assert done.stderr.startswith(f"sedd: {tmp_path}/caf\\udce9 is not UTF-8")
        assert len(done.stderr.splitlines()) == 1
    assert not out.exists()


def test_an_ascii_terminal(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """As with PYTHONIOENCODING=ascii: what cannot be shown is escaped."""
    ascii_only = "for stream in (sys.stdout, sys.stderr): stream.reconfigure(encoding='ascii', errors='strict')"
    done = sedd("train", corpus, *WORDS, "--out", tmp_path / "π", before=ascii_only)
    ok(done)
    assert f"{tmp_path}/\\u03c0: 2 steps" in done.stdout
    assert "\\xb1" in done.stdout


INTERRUPTED = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for programs in the background
def interrupt(event, arguments):
    if event == "import" and arguments[0] == {module!r}:
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
sys.argv = ["sedd", "info", "stories"]
runpy.run_module("sedd", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["typing", "sedd.cli", "typer", "sedd.cli.train", "sedd.card_facts"])
def test_ctrl_c_while_the_command_is_imported(module: str) -> None:
    """The packages of the command line, and what a command imports when it runs."""
    command = [sys.executable, "-c", INTERRUPTED.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


def test_the_command_starts_where_ctrl_c_is_handled() -> None:
    scripts = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'sedd = "sedd.__main__:main"' in scripts
