"""Triton kernels, on a GPU where there is one and else in Triton's interpreter. Run without shape checks."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from sedd.runtime import device as devices

# Triton reads it when kernels are defined, so set it before they are imported
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[tuple[int, int]], None]]:
    """Pretend that there is a GPU of some compute capability."""

    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        devices.has_triton.cache_clear()

    yield pretend
    monkeypatch.undo()
    devices.has_triton.cache_clear()
