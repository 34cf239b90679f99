"""Run commands in forks of one process that has imported everything, so that each starts at once.

Reads one JSON request per line, {"words": […], "out": path, "err": path, "before": code}, and prints the exit code. The
code runs first; it may call the functions below to kill the command with SIGKILL at a file operation.
"""

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import safetensors.torch
import torch

from sedd.cli import main

PRELOADED = (
    "omegaconf",
    "torch._dynamo",  # imported when an optimizer is made
    "torch.utils.tensorboard",
    "sedd.api",
    "sedd.evaluation.audit.verdict",
    "sedd.evaluation.compare",
    "sedd.evaluation.continuation",
    "sedd.evaluation.quality.judges",
    "sedd.evaluation.quality.plots",
    "sedd.evaluation.quality.results",
    "sedd.hub.models",
    "sedd.training.loop",
)
for module in PRELOADED:
    importlib.import_module(module)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(event: str, path: str, after: str = "") -> None:
    """Kill the process before the first audit event of this name at a path with this ending, after one at ``after``."""
    seen = not after

    def hook(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if seen and name == event and str(arguments[0]).endswith(path):
            die()
        seen = seen or any(str(argument).endswith(after) for argument in arguments[:2])

    sys.addaudithook(hook)


def kill_at_number(number: int, after: str) -> None:
    """Kill the process before this file operation, counted from the first at a path that ends in ``after``."""
    seen = -1

    def hook(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if name in ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"):
            seen += seen >= 0 or str(arguments[0]).endswith(after)
            if seen == number:
                die()

    sys.addaudithook(hook)


def kill_inside(name: str) -> None:
    """Kill the process when half of a file of tensors is written."""
    whole = safetensors.torch.save_file

    def half(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        if name in str(path):
            content = safetensors.torch.save(tensors)
            path.write_bytes(content[: len(content) // 2])
            die()
        whole(tensors, path, metadata)

    safetensors.torch.save_file = half


def run(request: dict[str, str]) -> int:
    for stream, path in enumerate([os.devnull, request["out"], request["err"]]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), stream)
    exec(request["before"], globals())
    sys.argv = ["sedd", *request["words"]]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            code = run(json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
