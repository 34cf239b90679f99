"""A network whose hidden states are computed by CUDA graphs."""

from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

from sedd.diffusion.parameterization import Backbone
from sedd.runtime.cuda_graphs import GraphedHidden


def _aligned(head: Any) -> tuple[Tensor, Tensor | None]:
    """Pad weight and bias to a multiple of 128 rows: matrix products with 50,257 rows take several times longer."""
    missing = -len(head.weight) % 128
    weight = F.pad(head.weight.detach(), (0, 0, 0, missing))
    return weight, None if head.bias is None else F.pad(head.bias.detach(), (0, missing))


@final
class GraphedBackbone:
    """The two parts of a network for inference: hidden states by CUDA graphs, and a head padded to a fast size."""

    def __init__(self, network: nn.Module) -> None:
        if not isinstance(network, Backbone):
            raise ValueError(f"{type(network).__name__} has no hidden states and head; CUDA graphs need both")
        self._head: nn.Module = network.head
        self._padded_head = _aligned(network.head) if hasattr(network.head, "weight") else None
        self._hidden = GraphedHidden(network.hidden)

    @torch.no_grad()
    def hidden(
        self,
        x: Int[Tensor, "b L"],
        sigma: Float[Tensor, " b"],
        valid: Bool[Tensor, "b L"] | None = None,
        label: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b L h"]:
        """Return the hidden states that the head reads."""
        return self._hidden(x, sigma, valid, label)

    def logits(self, hidden: Float[Tensor, "k h"]) -> Float[Tensor, "k m"]:
        """Return the head's output, followed by padding that has no meaning."""
        if self._padded_head is not None:
            return F.linear(hidden, *self._padded_head)
        logits: Tensor = self._head(hidden)
        return logits
