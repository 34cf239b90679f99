import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "two",
    "small",
    "birds",
    "fly",
    "over",
    "old",
    "red",
    "houses",
    "near",
    "water",
]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 30,000 characters of nonsense."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text("\n".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(900)) + "\n")
    return path


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**os.environ, "SEDD_CACHE": str(tmp_path_factory.mktemp("cache")), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def sedd(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line, in a process of its own, or under torchrun in several."""

    def run(*words: object, processes: int = 1, **extra: str) -> subprocess.CompletedProcess[str]:
        start = [sys.executable, "-m"]
        if processes > 1:
            start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
        command = [*start, "sedd", *map(str, words)]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env={**environment, **extra}, timeout=240
        )

    return run
