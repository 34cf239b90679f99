import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The same examples every time: a failure is a fact about the code, never about the day.
settings.register_profile("sedd", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("sedd")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are left out where there is no CUDA device: there is nothing they could run on."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if item not in gpu]
    config.hook.pytest_deselected(items=gpu)


def pytest_report_header() -> str:
    return "gpu tests: " + (torch.cuda.get_device_name() if torch.cuda.is_available() else "left out, no CUDA device")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def refuses() -> Callable[..., object]:
    """Asserts that a call is refused in a sentence that holds all the given words."""

    def check(call: Callable[[], object], *words: str) -> None:
        with pytest.raises(ValueError, match=r"\w") as error:
            call()
        for word in words:
            assert word in str(error.value)

    return check


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**os.environ, "SEDD_CACHE": str(tmp_path_factory.mktemp("cache")), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def server(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(Path(__file__).with_name("server.py"))]
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as process:
        yield process
        assert process.stdin
        process.stdin.close()


@pytest.fixture
def sedd(
    server: subprocess.Popen[str], environment: dict[str, str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in its own process after the code ``before``, or under torchrun in several."""

    def run(*words: object, processes: int = 1, before: str = "") -> subprocess.CompletedProcess[str]:
        given = [str(word) for word in words]
        if processes > 1:
            start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "sedd"]
            command = [sys.executable, *start, *given]
            return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
        out, err = tmp_path / ".out", tmp_path / ".err"
        assert server.stdin
        assert server.stdout
        request = {"words": given, "before": before, "out": str(out), "err": str(err)}
        print(json.dumps(request), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(given, code, out.read_text(), err.read_text())

    return run
