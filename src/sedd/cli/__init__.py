"""The command line: one module per command, registered with `root.app`.

Data goes to stdout, everything else to stderr; commands import torch only when they run.
"""

import os
import sys
from io import TextIOWrapper
from typing import NoReturn

from sedd.cli import (
    audit,
    cache,
    compare,
    convert,
    data,
    evaluate,
    info,
    lm_eval,
    push,
    quality,
    report,
    runs,
    sample,
    serve,
    train,
)
from sedd.cli.resource_errors import explain
from sedd.cli.root import app
from sedd.terminal import warn

__all__ = [
    "app",
    "audit",
    "cache",
    "compare",
    "convert",
    "data",
    "evaluate",
    "info",
    "lm_eval",
    "main",
    "push",
    "quality",
    "report",
    "runs",
    "sample",
    "serve",
    "train",
]


def main() -> None:
    """Run the command line; an error is printed as a sentence: of what was given with code 2, of the machine with 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # work that is done does not fail at a ± in ASCII
    try:
        app()
    except ValueError as error:
        warn(str(error))
        _exit(2)
    except (MemoryError, OSError, RuntimeError) as error:
        if (sentence := explain(error, sys.argv[1:])) is None:
            raise
        warn(sentence)
        _exit(1)
    except SystemExit as end:
        _exit(end.code)


def _exit(code: str | int | None) -> NoReturn:
    """Exit; one of several processes skips cleanup, in which threads left by gloo may abort it."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not isinstance(code, str):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    raise SystemExit(code) from None
