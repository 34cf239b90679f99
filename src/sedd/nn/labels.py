"""Labels: what a sequence is, told to a network beside the sequence.

A network with labels that is told none answers for all sequences together; `Labelled` is one that is told. Whatever
takes a network takes that, so parameterizations, samplers and bounds know nothing of labels.
"""

from typing import Any, final

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


@final
class Labelled(nn.Module):
    """A network that is told a label: one for all rows it will ever be asked about, or one for each of a batch."""

    def __init__(self, network: nn.Module, label: Int[Tensor, "*b"]) -> None:
        super().__init__()
        self.network: Any = network
        self.label = label

    @property
    def timed(self) -> bool:
        """Whether it is told σ."""
        timed: bool = self.network.timed
        return timed

    @property
    def head(self) -> nn.Module:
        """The last matrix."""
        head: nn.Module = self.network.head
        return head

    def forward(self, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], *more: Any, **options: Any) -> Any:
        """What the network says."""
        return self.network(x, sigma, *more, **options, label=self.label.expand(sigma.shape))

    def hidden(
        self, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"], valid: Bool[Tensor, "*b L"] | None = None
    ) -> Float[Tensor, "*b L h"]:
        """What the head reads."""
        hidden: Tensor = self.network.hidden(x, sigma, valid, label=self.label.expand(sigma.shape))
        return hidden
