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
class Replayed(nn.Module):
    """A network in inference whose hidden states are computed by CUDA graphs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        if not isinstance(network, Backbone):
            raise ValueError(f"{type(network).__name__} has no hidden states and head; CUDA graphs need both")
        self.network: Any = network
        self._head = _aligned(network.head) if hasattr(network.head, "weight") else None
        self._hidden = GraphedHidden(network.hidden)

    @property
    def timed(self) -> bool:
        """Whether the output depends on σ."""
        timed: bool = self.network.timed
        return timed

    @property
    def head(self) -> nn.Module:
        """The last matrix."""
        head: nn.Module = self.network.head
        return head

    def said(self, hidden: Float[Tensor, "k h"]) -> Float[Tensor, "k m"]:
        """Return the head's output, followed by padding that means nothing."""
        logits: Tensor = self.head(hidden) if self._head is None else F.linear(hidden, *self._head)
        return logits

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network."""
        return self.network(*args, **kwargs)

    @torch.no_grad()
    def hidden(
        self, x: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b L h"]:
        """Return the hidden states that the head reads."""
        return self._hidden(x, sigma, valid)
