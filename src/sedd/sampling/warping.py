"""Temperature, top-k and top-p (nucleus) sampling, applied to p(x_0 | x_t) and never to rates.  [§9]"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

COLDEST = 1e-30
"""Lower temperatures give the same distribution, but log p divided by them may exceed float32."""


@final
@dataclass(frozen=True)
class Warping:
    """A transformation of distributions over tokens: temperature, then top-k, then top-p.

    Samples of a warped model do not have the model's distribution. Masks are revealed at the same rate as before.

    References: top-k, Fan et al. 2018, "Hierarchical Neural Story Generation", arXiv 1805.04833; top-p, Holtzman et al.
    2019, "The Curious Case of Neural Text Degeneration", arXiv 1904.09751.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < torch.inf:
            raise ValueError(
                f"temperature is {self.temperature}; it must be above 0 (near 0 it takes the likeliest token)"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it is a share and must lie in (0, 1]")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; at least 1 token must be left to draw")

    @property
    def is_identity(self) -> bool:
        """Whether distributions stay as they are."""
        return self == Warping()

    def __call__(self, log_p: Float[Tensor, "k N"]) -> Float[Tensor, "k N"]:
        """Return log p^(1/temperature), limited to the top_k likeliest tokens and to the fewest that reach top_p."""
        log_p = (log_p / max(self.temperature, COLDEST)).log_softmax(-1)
        if self.top_k is not None and self.top_k < log_p.shape[-1]:
            least = log_p.topk(self.top_k, -1).values[:, -1:]
            log_p = log_p.masked_fill(log_p < least, -torch.inf).log_softmax(-1)
        if self.top_p < 1:
            ordered = log_p.sort(-1, descending=True)
            before = ordered.values.exp().cumsum(-1) - ordered.values.exp()
            # in float32 the least top_p are 0; the likeliest token, before which there is nothing, always stays
            outside = (before >= self.top_p) & (before > 0)
            dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, ordered.indices, outside)
            log_p = log_p.masked_fill(dropped, -torch.inf).log_softmax(-1)
        return log_p
