"""Run commands in forks of one process that has imported everything, so that each starts at once.

Reads one JSON request per line and prints the exit code. A request has the ``words`` of the command, the files ``out``
and ``err`` for its output, the code ``before``, which runs first and may call the functions below to kill the command
with SIGKILL at a file operation, ``signals``: [seconds after the start, number] of each one that it is sent, and
``processes``: the number of ranks of one process group that run it, each in a fork of its own.
"""

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from sedd.cli import main

PRELOADED = (
    "concurrent.futures.process",
    "rich._emoji_codes",
    "rich.status",
    "torch._dynamo",  # imported when an optimizer is made
    "torch.distributed.checkpoint.state_dict",  # and when it is saved
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "typer._adapters",
    "yaml",
    "sedd.model",
    "sedd.evaluation.audit",
    "sedd.evaluation.compare",
    "sedd.evaluation.continuation",
    "sedd.evaluation.quality.judges",
    "sedd.evaluation.quality.plots",
    "sedd.evaluation.quality.results",
    "sedd.hub",
    "sedd.training.loop",
)
for module in PRELOADED:
    importlib.import_module(module)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(event: str, path: str, after: str = "", number: int = signal.SIGKILL) -> None:
    """Send a signal before the first audit event of this name at a path with this ending, after one at ``after``."""
    seen, is_sent = not after, False

    def hook(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen, is_sent
        if seen and not is_sent and name == event and str(arguments[0]).endswith(path):
            is_sent = True
            os.kill(os.getpid(), number)
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


def run(request: dict[str, Any]) -> int:
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


def wait(child: int, signals: list[tuple[float, int]]) -> int:
    """Send the signals at their times, each unless the child has ended; return its exit code."""
    start = time.monotonic()
    for seconds, number in signals:
        while (left := start + seconds - time.monotonic()) > 0:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(min(left, 0.002))
        os.kill(child, number)  # not yet waited for, so its number is still its own
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start(request: dict[str, Any], ranks: dict[str, str]) -> int:
    """Run a request in a fork with these environment variables; return the number of its process."""
    if (child := os.fork()) == 0:
        os.environ.update(ranks)
        code = run(request)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return child


def start_group(request: dict[str, Any], size: int) -> list[int]:
    """Run a request in forks that find each other as ranks do under torchrun; the first one's output is kept."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        start(
            request if rank == 0 else request | {"out": os.devnull, "err": f"{request['err']}-{rank}"},
            group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup ignore it, and so would all commands
    for line in sys.stdin:
        request = json.loads(line)
        if (size := request.get("processes", 1)) > 1:
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in start_group(request, size)]
            print(next(filter(None, codes), 0), flush=True)
        else:
            print(wait(start(request, {}), request.get("signals", [])), flush=True)
    os._exit(0)  # there is nothing to clean up, and an interpreter with torch takes seconds to end
