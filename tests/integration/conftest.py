import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NONSENSE = "the cat sat on a mat and saw two small birds fly over old red houses near water"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of about 30,000 characters of random words."""
    draw, words = random.Random(0), NONSENSE.split()
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text("\n".join(" ".join(draw.choices(words, k=8)) for _ in range(900)) + "\n")
    return path


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
