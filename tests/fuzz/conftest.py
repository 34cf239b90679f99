"""Fuzzing: what is parsed is returned or refused with a ValueError, within a cap of memory.

``make test`` tries a few examples of each, always the same; ``make verify`` many, other ones each time, by setting
SEDD_FUZZ to their number.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import publications
import pytest
from hypothesis import HealthCheck, settings

from sedd.hub import convert

EXAMPLES = int(os.environ.get("SEDD_FUZZ", "0"))
MEMORY_CAP = 2**31
"""Bytes that a test may map beside what the process has already: a small file must not ask for more."""
settings.register_profile(
    "fuzz",
    deadline=None,
    derandomize=not EXAMPLES,
    max_examples=EXAMPLES or 12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def _memory_cap() -> Iterator[None]:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if os.path.exists("/proc/self/statm") else None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if pages is not None:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_CAP, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model, imported from a published checkpoint."""
    source = publications.folder(tmp_path_factory.mktemp("source"), publications.KINDS[0], "safetensors")
    imported = convert.read_published(source)
    return convert.save_model_folder(imported, None, tmp_path_factory.mktemp("models") / "model", "source")
