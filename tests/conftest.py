import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from commands import Commands, start_server
from hypothesis import settings

sys.path += [str(Path(__file__).parents[1] / name) for name in ("benchmarks", "notebooks", "tests/plugin")]

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
    with start_server(environment) as process:
        yield process
        assert process.stdin
        process.stdin.close()


@pytest.fixture
def sedd(server: subprocess.Popen[str], tmp_path: Path) -> Commands:
    """Run the command line in a process of its own, or in several that are ranks of one group."""
    return Commands(server, tmp_path)


@pytest.fixture
def torchrun(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in two processes that torchrun starts."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "sedd"]
        command = [sys.executable, *start, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)

    return run
