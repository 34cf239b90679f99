"""The command line: a file for each command, which puts itself under `root.app`.

Data goes to stdout, everything else to stderr; torch is imported by the commands when they run.
"""

import os
import sys
from typing import NoReturn

from sedd.cli import (
    bench,
    compare,
    convert,
    data,
    demo,
    evaluate,
    info,
    lm_eval,
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
    "convert",
    "data",
    "demo",
    "evaluate",
    "info",
    "lm_eval",
    "main",
    "push",
    "quality",
    "report",
    "sample",
    "train",
]


MEMORY = (
    "the GPU has too little memory for this. To train, cut a step into parts (--set train.grad_accumulation=4), compute more "
    "again (--set train.activation_checkpointing=selective) or record nothing (--set train.cuda_graphs=false); else take less at once (--batch)"
)


def main() -> None:
    """Run the command line; a refusal is a sentence and exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"sedd: {error}", file=sys.stderr)
        _leave(2)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which may not have been imported
            raise
        print(f"sedd: {MEMORY}. {'. '.join(str(error).split('. ')[:3])}", file=sys.stderr)
        _leave(1)
    except SystemExit as ended:
        _leave(ended.code)


def _leave(code: str | int | None) -> NoReturn:
    """Exit. One of several processes does so at once: threads that gloo has left may abort one that says goodbye."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not isinstance(code, str):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    raise SystemExit(code) from None
