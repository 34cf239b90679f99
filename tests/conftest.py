from collections.abc import Callable

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
