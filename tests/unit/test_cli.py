"""The command line: output, stdout and stderr, exit codes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from sedd import __version__, cli

Sedd = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
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
    assert len(pages) > 20
    for words, text in pages:
        assert "Usage:" in text, words
        assert "bool" not in text, words
        assert max(map(len, text.splitlines())) <= 90, words
        for line in text.splitlines():
            assert not re.fullmatch(r"│ +--[a-z-]+( +<\S+>)? *│", line), (words, line)


def test_version(sedd: Sedd) -> None:
    assert sedd("--version").stdout == f"sedd {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "nowhere"], "not the folder of a run"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(sedd: Sedd, words: list[str], message: str) -> None:
    done = sedd(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_options_are_refused(sedd: Sedd) -> None:
    done = sedd("plan", "--size", "3")
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
