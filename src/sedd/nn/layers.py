"""Layers with weights: linear maps and layer normalization, and their weight initialisation.

Mixed precision: matrix products of the blocks run in the dtype of the weights, or of autocast. Norms, the noise-level
embedding and the modulation computed from it run in float32, or in float64 if the weights are.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.ops.block_ops import NormSpec
from sedd.tensors import upcast


@dataclass(frozen=True)
class TransformerShape:
    """The sizes that all blocks of a network have in common."""

    width: int
    heads: int
    cond_dim: int | None
    """Width of the noise-level embedding; None for a network without noise conditioning."""
    dropout: float
    zero_branches: bool = False
    """Whether the last matrix of every residual branch is initialised to 0."""

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width < 1 or self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"width {self.width} over {self.heads} heads leaves {self.head_dim} per head; "
                "rotary embeddings rotate pairs, so it must be even"
            )
        if self.cond_dim is not None and self.cond_dim < 1:
            raise ValueError(
                f"cond_dim is {self.cond_dim}; the noise-level embedding must be at least 1 wide "
                "(time_conditioning=False has none)"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must lie in [0, 1)")

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.width // self.heads


class Layer(nn.Module, ABC):
    """A module with weights of its own."""

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Initialise the weights from ``generator``, or from torch's global one if None."""


class LinearBase(Layer, ABC):
    """A linear map Wx + b, initialised from U(−1/√inputs, 1/√inputs), or to 0."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, zero: bool = False) -> None:
        super().__init__()
        self.bound = 0.0 if zero else 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Draw weight and bias from U(−bound, bound)."""
        for parameter in self.parameters():
            parameter.uniform_(-self.bound, self.bound, generator=generator)

    @abstractmethod
    def forward(self, x: Float[Tensor, "*s inputs"]) -> Float[Tensor, "*s outputs"]:
        """Compute Wx + b."""


@final
class Linear(LinearBase):
    """Wx + b in the dtype of the weights, or of autocast."""

    def forward(self, x: Float[Tensor, "*s inputs"]) -> Float[Tensor, "*s outputs"]:
        """Compute Wx + b."""
        return F.linear(x, self.weight, self.bias)


@final
class Float32Linear(LinearBase):
    """Wx + b in float32 or better, for noise conditioning: one row per sequence, which every block reads."""

    def forward(self, x: Float[Tensor, "*s inputs"]) -> Float[Tensor, "*s outputs"]:
        """Compute Wx + b."""
        with _no_autocast(x):
            return F.linear(x, upcast(self.weight), None if self.bias is None else upcast(self.bias))


def _no_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    # torch.autocast does not accept the meta device
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


@final
class LayerNorm(Layer):
    """The weights of layer normalization (x − mean)/√(variance + 1e-5)·weight + bias, initialised to 1 and 0."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Set the weight to 1 and the bias to 0."""
        self.weight.fill_(1)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self) -> NormSpec:
        """Return the normalization parameters."""
        return NormSpec(1e-5, True, self.weight, self.bias)
