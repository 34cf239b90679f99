"""Type commands that end before any work, in one process, which may be kept from importing torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

RUN_ALL = """
import contextlib, io, json, shlex, sys
if {blocked}:
    sys.modules["torch"] = None  # to import it is an error
from sedd import cli
for command in json.load(sys.stdin):
    sys.argv = ["sedd", *shlex.split(command)]
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = repr(error)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def run_commands(
    folder: Path, commands: list[str], with_torch: bool = False, **variables: str
) -> list[tuple[object, str, str]]:
    """Type commands in ``folder``; return code, stdout and stderr of each."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL.replace("{blocked}", str(not with_torch))],
        cwd=folder,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def check_refusals(folder: Path, refusals: list[tuple[str, str]], with_torch: bool = False, **variables: str) -> None:
    """Assert that each command is rejected with exit code 2 and a message that holds the sentence next to it."""
    results = run_commands(folder, [command for command, _ in refusals], with_torch, **variables)
    for (command, sentence), found in zip(refusals, results, strict=True):
        code, out, err = found
        assert (code, out) == (2, ""), (command, found)
        assert sentence in err.splitlines()[-1], (command, err)
