"""The command line: a file for each command, which puts itself under `root.app`.

Data goes to stdout, everything else to stderr; torch is imported by the commands when they run.
"""

import sys

from sedd.cli import (
    bench,
    compare,
    data,
    evaluate,
    harness,
    info,
    lab,
    published,
    push,
    quality,
    report,
    sample,
    train,
)
from sedd.cli.root import app

__all__ = [
    "app",
    "bench",
    "compare",
    "data",
    "evaluate",
    "harness",
    "info",
    "lab",
    "main",
    "published",
    "push",
    "quality",
    "report",
    "sample",
    "train",
]


def main() -> None:
    """Run the command line; a refusal is a sentence and exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"sedd: {error}", file=sys.stderr)
        raise SystemExit(2) from None
