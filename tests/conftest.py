from collections.abc import Callable

import pytest
import torch
from hypothesis import settings

# The same examples every time: a failure is a fact about the code, never about the day.
settings.register_profile("sedd", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("sedd")


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
