"""The command line: one module per command, registered with `root.app`.

Data goes to stdout, everything else to stderr; commands import torch only when they run.
"""

import os
import sys
from typing import NoReturn

from sedd.cli import (
    audit,
    bench,
    cache,
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
    runs,
    sample,
    serve,
    train,
)
from sedd.cli.root import app

__all__ = [
    "app",
    "audit",
    "bench",
    "cache",
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
    "runs",
    "sample",
    "serve",
    "train",
]


OUT_OF_MEMORY = (
    "the GPU has too little memory. For training, accumulate gradients (--set train.grad_accumulation=4), use "
    "activation checkpointing (--set train.activation_checkpointing=selective) or turn CUDA graphs off (--set "
    "train.cuda_graphs=false); otherwise use a smaller --batch"
)


def main() -> None:
    """Run the command line; a ValueError is printed as a sentence, with exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"sedd: {error}", file=sys.stderr)
        _exit(2)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # of torch, which may not be imported
            raise
        print(f"sedd: {OUT_OF_MEMORY}. {'. '.join(str(error).split('. ')[:3])}", file=sys.stderr)
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
