"""Commands in forks of one process that has imported everything; see `server`."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Signals = Sequence[tuple[float, int]]
"""Seconds after the start of a command, and the signal that it gets then."""


def start_server(environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    """Start the process that commands are forks of; it ends when its standard input is closed."""
    command = [sys.executable, str(Path(__file__).with_name("server.py"))]
    return subprocess.Popen(command, env=dict(environment), stdin=-1, stdout=-1, text=True)


class Commands:
    """The command line, one command at a time, each in a fork of ``server``; ``folder`` is for their output."""

    def __init__(self, server: "subprocess.Popen[str]", folder: Path) -> None:
        self.server, self.folder = server, folder

    def __call__(
        self, *words: object, before: str = "", signals: Signals = (), processes: int = 1
    ) -> "subprocess.CompletedProcess[str]":
        """Run ``sedd`` with these words after the code ``before``, and return its exit code and output.

        Several processes are ranks of one group; the output is that of the first.
        """
        out, err, given = self.folder / ".out", self.folder / ".err", [str(word) for word in words]
        assert self.server.stdin
        assert self.server.stdout
        request = {"words": given, "before": before, "out": str(out), "err": str(err), "signals": list(signals)}
        request["processes"] = processes
        print(json.dumps(request), file=self.server.stdin, flush=True)
        code = int(self.server.stdout.readline())
        return subprocess.CompletedProcess(
            given, code, out.read_text(errors="replace"), err.read_text(errors="replace")
        )
