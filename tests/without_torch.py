"""Commands in a process that cannot import torch: what is refused there is refused before any work."""

import json
import os
import subprocess
import sys
from pathlib import Path

RUN_ALL = """
import contextlib, io, json, shlex, sys
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


def run_without_torch(folder: Path, commands: list[str], **variables: str) -> list[tuple[object, str, str]]:
    """Type commands in ``folder``, in one process that cannot import torch; return code, stdout and stderr of each."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        cwd=folder,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def check_refusals(folder: Path, refusals: list[tuple[str, str]], **variables: str) -> None:
    """Assert that each command is refused with exit code 2 and a message that holds the sentence beside it."""
    results = run_without_torch(folder, [command for command, _ in refusals], **variables)
    for (command, sentence), found in zip(refusals, results, strict=True):
        code, out, err = found
        assert (code, out) == (2, ""), (command, found)
        assert sentence in " ".join(err.split()), (command, err)
        stated = err.replace("sedd: no model was named; using stories\n", "")
        assert stated.count("sedd: ") == 1, (command, err)  # what a command is about to do is stated after all checks
