"""The Dockerfile: what it copies, installs and starts exists. Images are not built in tests."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from sedd.cli import app
from sedd.serve.page import FOLDER, MEDIA

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    text = "\n".join(line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    found = [line.split(None, 1) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(name, rest) for name, rest in found]


def argument(name: str) -> str:
    [found] = [rest for instruction, rest in instructions() if instruction == name]
    return found


def copied() -> list[str]:
    return [source for name, rest in instructions() if name == "COPY" for source in rest.split()[:-1]]


def test_the_entry_point_is_a_command_of_the_package() -> None:
    """A list, so that the server itself gets SIGTERM; the port is the default of the command."""
    program, command, *options = json.loads(argument("ENTRYPOINT"))
    assert program in PROJECT["scripts"]
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    defaults = {option: parameter.default for parameter in parameters for option in parameter.opts}
    assert {option for option in options if option.startswith("--")} <= defaults.keys()
    assert argument("EXPOSE") == str(defaults["--port"])


def test_the_health_check_can_be_run() -> None:
    """It is a Python program that requests the route without a key, at the port of the server."""
    instruction, command = argument("HEALTHCHECK").split(None, 1)
    program, flag, code = json.loads(command)
    assert (instruction, program, flag) == ("CMD", "python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    assert f"http://127.0.0.1:{argument('EXPOSE')}/health" in code


def test_what_is_copied_and_installed_exists() -> None:
    assert copied()
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for source in copied():
        assert (ROOT / source).exists()
        assert f"!{source}" in allowed
    install, _ = (rest for name, rest in instructions() if name == "RUN")
    extras = re.search(r"python (\S+) '\.\[(\w+)\]'", install)
    assert extras
    assert {extras[1], "requirements.lock", "constraints.txt"} <= set(copied())
    assert extras[2] in PROJECT["optional-dependencies"]


@pytest.mark.verify
def test_the_copied_files_are_enough_to_build_the_package(tmp_path: Path) -> None:
    """A wheel from them alone has the page."""
    for source in copied():
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, tmp_path / source)
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", "site", "."]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = {path.name for path in FOLDER.iterdir() if path.suffix in MEDIA}
    assert files <= {path.name for path in (tmp_path / "site/sedd/serve/page").iterdir()}
