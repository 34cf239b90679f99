"""The command line: output, stdout and stderr, exit codes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sedd import __version__, cli

Sedd = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["demo", "--help"],
        ["demo", "bound", "--help"],
        ["report", "--help"],
        ["data", "prepare", "--help"],
        ["eval", "--help"],
        ["score", "--help"],
        ["compare", "--help"],
        ["audit", "--help"],
        ["--version"],
    ],
)
def test_help_does_not_import_torch(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from sedd.cli import main\n"
        f"sys.argv = ['sedd', *{words!r}]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


HELP_OF_ALL = """
import contextlib, io, json, sys
from typer.main import get_command
from sedd.cli import main
from sedd.cli.root import app

def walk(command, words):
    yield words
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, [*words, name])

for words in walk(get_command(app), []):
    sys.argv, out = ["sedd", *words, "--help"], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main()
    print(json.dumps([words, out.getvalue()]))
"""


def test_help_fits_a_reader() -> None:
    """Of every command: no type beside a flag, no empty description, nothing wider than the terminal."""
    done = subprocess.run(
        [sys.executable, "-c", HELP_OF_ALL],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "90", "TERM": "dumb"},
    )
    pages = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(pages) > 25
    for words, text in pages:
        assert "Usage:" in text, words
        assert "bool" not in text, words
        assert max(map(len, text.splitlines())) <= 90, words
        for line in text.splitlines():
            assert not re.fullmatch(r"│ +--[a-z-]+( +<\S+>)? *│", line), (words, line)


def test_version(sedd: Sedd) -> None:
    assert sedd("--version").stdout == f"sedd {__version__}\n"


def test_demo_bound_as_json_and_as_a_table(sedd: Sedd) -> None:
    done = sedd("demo", "bound", "--vocab-size", "2", "--length", "2", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["process"], row["schedule"]) for row in rows} == {
        (process, schedule)
        for process in ("absorbing", "uniform")
        for schedule in ("log-linear", "geometric", "cosine", "polynomial")
    }
    for row in rows:
        assert abs(row["gap"]) < 1e-6
        assert abs(row["diffusion"] + row["prior"] + row["reconstruction"] - row["entropy"] - row["gap"]) < 1e-9
    table = sedd("demo", "bound", "--vocab-size", "2", "--length", "2").stdout
    assert "log-linear" in table
    assert "gap" in table


DEMONSTRATIONS = {
    "ratios": (["--states", "3", "--steps", "5"], 3 * 6),
    "one-step": (["--steps", "2", "--examples", "3"], 6 * 5 + 3),
    "all-masked": (["--steps", "2", "--sampling-steps", "2", "--draws", "100"], 3),
    "samplers": (["--length", "2", "--max-steps", "8"], 2 * 3 * (4 + 1)),
}


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_demonstrations_print_data_and_the_path_of_the_picture(sedd: Sedd, tmp_path: Path, name: str) -> None:
    words, rows = DEMONSTRATIONS[name]
    done = sedd("demo", name, *words, "--json", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert [type(json.loads(line)) for line in done.stdout.splitlines()] == [dict] * rows
    picture = tmp_path / "out" / f"{name}.png"
    assert f"picture: {picture}\n" in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "one-step", "--noise", "1"], "noise is 1"),
        (["report", "nowhere"], "not the folder of a run"),
        (["demo", "bound", "--length", "9"], "too many to enumerate"),
        (["demo", "bound", "--length", "10000"], "too many to enumerate"),
        (["demo", "bound", "--vocab-size", "1200", "--length", "1"], "too many to enumerate"),
        (["demo", "bound", "--seed", str(2**70)], "seed is"),
        (["demo", "bound", "--length", "0"], "length is 0"),
        (["demo", "bound", "--vocab-size", "1"], "vocab_size is 1"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(sedd: Sedd, words: list[str], message: str) -> None:
    done = sedd(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_options_are_refused(sedd: Sedd) -> None:
    done = sedd("demo", "bound", "--size", "3")
    assert done.returncode == 2
    assert "--size" in done.stderr


def test_out_of_memory_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU the message names remedies; other RuntimeErrors keep their traceback."""

    def run(error: Exception) -> None:
        def app() -> None:
            raise error

        monkeypatch.setattr(cli, "app", app)
        cli.main()

    with pytest.raises(SystemExit) as exit:
        run(torch.OutOfMemoryError("tried to allocate 3 GiB"))
    assert exit.value.code == 1
    message = capsys.readouterr().err
    assert all(
        word in message
        for word in (
            "train.grad_accumulation",
            "train.activation_checkpointing",
            "train.cuda_graphs",
            "--batch",
            "3 GiB",
        )
    )
    with pytest.raises(RuntimeError, match="a bug"):
        run(RuntimeError("a bug"))
