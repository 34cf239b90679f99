"""Triton's kernels, on a GPU where there is one and else through Triton's interpreter. Run without shape checks."""

import os

import pytest
import torch

# read when kernels are made, so before they are imported
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
