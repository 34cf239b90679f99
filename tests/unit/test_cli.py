"""The command line: what it prints, where, and with which exit code."""

import json
import subprocess
import sys

import pytest

from sedd import __version__


def sedd(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sedd", *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "words",
    [
        *(["--help"], ["lab", "--help"], ["lab", "bound", "--help"], ["data", "prepare", "--help"], ["--version"]),
        *(["eval", "--help"], ["score", "--help"], ["compare", "--help"]),
    ],
)
def test_help_answers_without_torch(words: list[str]) -> None:
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


def test_version() -> None:
    assert sedd("--version").stdout == f"sedd {__version__}\n"


def test_lab_bound_as_json_and_as_a_table() -> None:
    done = sedd("lab", "bound", "--vocab-size", "2", "--length", "2", "--json")
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
    table = sedd("lab", "bound", "--vocab-size", "2", "--length", "2").stdout
    assert "log-linear" in table
    assert "gap" in table


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["lab", "bound", "--length", "9"], "too many to enumerate"),
        (["lab", "bound", "--length", "10000"], "too many to enumerate"),
        (["lab", "bound", "--vocab-size", "1200", "--length", "1"], "too many to enumerate"),
        (["lab", "bound", "--seed", str(2**70)], "seed is"),
        (["lab", "bound", "--length", "0"], "length is 0"),
        (["lab", "bound", "--vocab-size", "1"], "vocab_size is 1"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(words: list[str], sentence: str) -> None:
    done = sedd(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_options_are_refused_too() -> None:
    done = sedd("lab", "bound", "--size", "3")
    assert done.returncode == 2
    assert "--size" in done.stderr
