"""Every command of the ``sh`` blocks of the README and the docs runs, or is listed here with the reason why it cannot.

The commands of a page run in order, in one shell, in one folder of files and tiny runs (`prepared.py`), with smaller
budgets (`shortened.py`).
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import local_hub
import prepared
import pytest
import shortened
from commands import Commands
from shell_blocks import BLOCK, ROOT, commands, name, pages, split, without_comment

NOT_RUN: dict[str, str] = {  # pattern at the beginning of a command: the reason why it is not run
    r"make (demo|test|lint|verify|docs)\b": "installs into .venv, or runs these tests; .ci/run does it from a clone",
    r"source \.venv/bin/activate": "the environment of the tests is on the PATH already",
    r"(uv )?pip (install|download) |uv venv ": "needs a package index; .ci/run and make journeys install the package",
    r"uv build |fresh/bin/": "needs a package index; the page says when it was tried",
    r"docker ": "needs docker; tests/integration/test_serve_command.py tests the command that the image runs",
    r"(RAY_ADDRESS=auto )?python examples/ray_": "needs Ray: make ray",
    r"sedd lm-eval --model sedd .*lambada": "downloads a data set; tests/integration/test_lm_eval.py runs local tasks",
}
EXIT_CODES: dict[str, int] = {  # commands that end with another code than 0, as their page says
    r"sedd audit examples/audited_losses.py:unweighted_cross_entropy": 1,
}


class Page(NamedTuple):
    """A page, and its commands."""

    path: Path
    commands: list[str]


PAGES = [Page(path, found) for path in pages() if (found := commands(path))]
ALL = [without_comment(command) for page in PAGES for command in page.commands]


def reason(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, without_comment(command))), None)


def expected_code(command: str) -> int:
    return next((code for pattern, code in EXIT_CODES.items() if re.match(pattern, command)), 0)


def known_programs() -> set[str]:
    plain = {"cat", "cd", "cp", "echo", "export", "grep", "head", "ls", "mkdir", "printf", "source", "tail"}
    return {*shortened.PROGRAMS, *plain, "python3"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: name(page.path))
def test_every_command_is_run_or_listed(page: Page) -> None:
    """The quick half: `make test` finds a command of a program that the long test does not know."""
    for command in page.commands:
        words = without_comment(command).split()
        program = next(word for word in words if not re.match(r"\w+=", word))
        assert reason(command) or program in known_programs(), (
            f"{name(page.path)}: no test runs {command!r}; add {program} to known_programs, or a pattern to NOT_RUN"
        )


LANGUAGES = {  # of blocks, and the test that executes them
    *("", "text", "json", "yaml", "html"),  # output and files
    *("sh", "console", "python"),  # here and in test_docs.py
}
OTHERS = {("docs/guides/extend.md", kind) for kind in ("bash", "py", "toml")}  # test_extend.py does what it says


def test_every_block_has_a_language_that_a_test_knows() -> None:
    """A block of another language would be neither run nor compared."""
    found = {(name(page), kind) for page in pages() for _, kind, _ in BLOCK.findall(page.read_text())}
    assert {(page, kind) for page, kind in found if kind not in LANGUAGES} <= OTHERS


@pytest.mark.parametrize("table", [NOT_RUN, EXIT_CODES], ids=["NOT_RUN", "EXIT_CODES"])
def test_the_tables_have_no_pattern_without_a_command(table: dict[str, object]) -> None:
    unused = [pattern for pattern in table if not any(re.match(pattern, command) for command in ALL)]
    assert unused == []


def test_commands_are_read_as_a_shell_reads_them() -> None:
    quoted = "sedd a \\\n  -d '{\n}'  # what for\n"
    written = "cat > f <<'E'\nx\nE\n"
    loop = "for i in 1 2; do\n  sedd c\ndone\n"
    found = split(f"# a comment\n{quoted}\nX=1 sedd b | head\n{written}{loop}")
    assert [f"{command}\n" for command in found] == [quoted, "X=1 sedd b | head\n", written, loop]
    assert without_comment(found[0]) == "sedd a -d '{\n}'"
    with pytest.raises(ValueError, match="unclosed"):
        split("sedd 'a\n")


def test_budgets_are_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prepared run gives way to that of a page; one that the page trained does not."""
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "mine"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run/PREPARED").touch()
    assert shortened.shorten(["train", "book.txt", "--minutes", "5"])[-len(shortened.TINY) :] == shortened.TINY
    shortened.shorten(["train", "book.txt", "--out=mine"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]
    assert shortened.shorten(["quality", "run", "--sweep", "steps=1"]) == ["quality", "run", "--sweep", "steps=1"]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, server: "subprocess.Popen[str]") -> Path:
    folder = tmp_path_factory.mktemp("documented")
    return prepared.write(folder / "shared", Commands(server, folder))


@pytest.fixture
def hub(shared: Path) -> Iterator[local_hub.Hub]:
    with local_hub.serve() as found:
        prepared.fill_hub(found, shared)
        yield found


@pytest.fixture
def documented(environment: dict[str, str], hub: local_hub.Hub, shared: Path, tmp_path: Path) -> dict[str, str]:
    """The variables of a reader's shell: the programs with smaller budgets come first on the PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in shortened.PROGRAMS:
        script = f'#!/bin/sh\nexec "{sys.executable}" "{shortened.__file__}" {program} "$@"\n'
        (programs / program).write_text(script)
        (programs / program).chmod(0o755)
    installed = str(Path(sys.executable).parent)
    path = os.pathsep.join([str(programs), installed, environment["PATH"]])
    mine = {"PATH": path, "PATH_BEFORE": environment["PATH"], "DOCUMENTED_BIN": installed, "COLUMNS": "120"}
    variables = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    variables |= {
        "HF_TOKEN": "hf_token",
        "SEDD_GPT2": str(shared / "tokenizer.json"),
        "SEDD_CACHE": str(tmp_path / "cache"),
    }
    return {**environment, **mine, **variables}


def script(page: Page) -> str:
    """Return the page as a shell script that writes the number of the command it is at to the file ``at``."""
    lines = ["set -o pipefail"]
    for number, command in enumerate(page.commands):
        if not reason(command):
            check = f"code=$?; [ $code = {expected_code(command)} ] || exit 99"
            lines += [f"echo {number} > ../at", command, check]
    return "\n".join([*lines, "wait"])


@pytest.mark.parametrize(("commands", "at"), [(["true", "false", "true"], 1), (["true", "false | true"], 1)])
def test_a_command_that_fails_is_found(commands: list[str], at: int, tmp_path: Path) -> None:
    """Mutants: a failing command in the middle of a page, and one at the beginning of a pipe."""
    (tmp_path / "page").mkdir()
    command = ["bash", "-c", script(Page(tmp_path, commands))]
    assert subprocess.run(command, cwd=tmp_path / "page", check=False).returncode == 99
    assert (tmp_path / "at").read_text() == f"{at}\n"


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: name(page.path))
def test_the_commands_of_a_page_run(
    page: Page, shared: Path, documented: dict[str, str], sedd: Commands, tmp_path: Path
) -> None:
    folder = tmp_path / "page"
    prepared.arrange(shared, folder, name(page.path), sedd)
    done = subprocess.run(
        ["bash", "-c", script(page)],
        cwd=folder,
        env=documented,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    at = int((tmp_path / "at").read_text()) if (tmp_path / "at").exists() else 0
    assert done.returncode == 0, f"{name(page.path)}: {page.commands[at]}\n{done.stderr[-3000:]}"
    for path in folder.iterdir():
        assert not path.is_symlink() or path.resolve().parent == ROOT
