"""Noise conditioning: the noise-level embedding, and adaptive layer normalization (adaLN) computed from it.

Reference: Peebles and Xie 2022, "Scalable Diffusion Models with Transformers", arXiv 2212.09748.
"""

import math
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sedd.nn.layers import Float32Linear
from sedd.ops.block_ops import Modulation


@final
class NoiseEmbedding(nn.Module):
    """Noise-level embedding c = SiLU(W₂ SiLU(W₀ [cos(σf), sin(σf)] + b₀) + b₂), f_i = 10⁴^(−i/128) for i < 128.

    Computed in float32 or better.
    """

    def __init__(self, cond_dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Float32Linear(256, cond_dim), nn.SiLU(), Float32Linear(cond_dim, cond_dim), nn.SiLU())

    def forward(self, sigma: Float[Tensor, " b"]) -> Float[Tensor, "b cond"]:
        """Embed the total noise σ, which is given in float32 or better."""
        # σ(1) may be infinite, and its cosine NaN; above 10³, e^−σ is 0 even in float64
        sigma = sigma.clamp_max(1e3)
        i = torch.arange(128, device=sigma.device, dtype=sigma.dtype)
        angle = sigma[:, None] * torch.exp(-math.log(1e4) / 128 * i)
        c: Tensor = self.mlp(torch.cat([angle.cos(), angle.sin()], -1))
        return c


class BlockModulation(NamedTuple):
    """adaLN of one half of a block: modulation of its norm and gate of its residual branch; None without σ."""

    modulation: Modulation | None
    gate: Float[Tensor, "b h"] | None


def block_modulations(layer: Float32Linear | None, c: Tensor | None) -> tuple[BlockModulation, BlockModulation]:
    """Return the modulation of the attention half and of the MLP half, from shift, scale and gate of each."""
    if layer is None or c is None:
        return BlockModulation(None, None), BlockModulation(None, None)
    shift1, scale1, gate1, shift2, scale2, gate2 = layer(c).chunk(6, -1)
    return BlockModulation(Modulation(shift1, scale1), gate1), BlockModulation(Modulation(shift2, scale2), gate2)


def final_modulation(layer: Float32Linear | None, c: Tensor | None) -> Modulation | None:
    """Return the modulation of the final norm."""
    return None if layer is None or c is None else Modulation(*layer(c).chunk(2, -1))
