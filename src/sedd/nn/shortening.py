"""Shortening: groups of adjacent positions become one for the inner blocks of a transformer (hourglass).

The first and the last blocks compute at every position, those between at one position per group of k tokens, so they
take 1/k of the time; a network of the same cost has more of them. What the inner blocks compute is added to the
stream of the first ones as one more residual branch.

Reference: Nawrot et al. 2021, "Hierarchical Transformers Are More Efficient Language Models", arXiv 2110.13711.
"""

from typing import final

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.diffusion.precision import compute_dtype
from sedd.nn.attention import AttentionContext
from sedd.nn.layers import Linear
from sedd.ops import block_ops
from sedd.ops.block_ops import RMS_NORM, ResidualBranch, Rotation


@final
class Shortening(nn.Module):
    """Merge every ``factor`` adjacent positions into one, and expand each into as many again.

    Groups count from the left, so padding on the right changes nothing. The expanded branch is initialised to 0.
    """

    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.merge = Linear(factor * width, width, bias=False)
        self.expand = Linear(width, factor * width, bias=False, zero=True)

    def shorten(
        self, x: Float[Tensor, "b L h"], branch: ResidualBranch | None, context: AttentionContext
    ) -> tuple[Float[Tensor, "b L h"], Float[Tensor, "b groups h"]]:
        """Return the residual stream with its branch added, and one position per group of it.

        Args:
            x: The residual stream.
            branch: The last block's branch, to be added to ``x``.
            context: Its mask says which positions are padding, which is 0 in a group.
        """
        x, n = self._add_and_norm(x, branch)
        if context.mask is not None:
            n = n * context.mask[:, 0, 0, :, None]
        groups = F.pad(n, (0, 0, 0, -x.shape[1] % self.factor)).unflatten(1, (-1, self.factor)).flatten(2)
        return x, self._linear(groups, self.merge).to(x.dtype)

    def lengthen(self, x: Float[Tensor, "b groups h"], branch: ResidualBranch | None, length: int) -> ResidualBranch:
        """Return the branch of every position from the stream of the groups."""
        y = self._linear(self._add_and_norm(x, branch)[1], self.expand).unflatten(2, (self.factor, -1)).flatten(1, 2)
        return ResidualBranch(y[:, :length].contiguous(), None)

    def short_context(self, context: AttentionContext) -> AttentionContext:
        """Return the inputs of attention between groups; a group is padding if all of it is."""
        length = len(context.rotation.cos)
        rotation = Rotation(*(angles[: -(-length // self.factor)] for angles in context.rotation))
        if context.mask is None:
            return AttentionContext(rotation, None, False)
        mask = F.pad(context.mask, (0, -length % self.factor)).unflatten(-1, (-1, self.factor)).any(-1)
        return AttentionContext(rotation, mask, False)

    def _add_and_norm(self, x: Tensor, branch: ResidualBranch | None) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(self.merge.weight)
        backend = block_ops.select_backend(x.device.type, dtype)
        return backend.residual_norm_modulate(x, branch, RMS_NORM, None, dtype)[:2]

    def _linear(self, x: Tensor, layer: Linear) -> Tensor:
        return block_ops.select_backend(x.device.type, x.dtype).linear(x, layer.weight)
