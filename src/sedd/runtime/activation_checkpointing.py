"""What a block keeps from the way forwards for the way back, and what it computes again instead.

A block of a transformer makes a dozen tensors of the size of its input, and all of them are needed once more. Matrix
products and attention are dear and their results small; norms, gates, rotations and activations are cheap to repeat.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Callable[..., Any]
"""``(block, x, …) -> block(x, …)``."""

_aten = torch.ops.aten
DEAR = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
"""What `cheap` never computes twice. Products in float8 are not among them: queries are turned where they lie."""


def nothing(block: nn.Module, x: Tensor, *rest: Any) -> Any:
    """Nothing is computed twice, but for what a compiler thinks better so."""
    return block(x, *rest)


def cheap(block: nn.Module, x: Tensor, *rest: Any) -> Any:
    """All but matrix products and attention is computed twice."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(block, x, *rest, use_reentrant=False, context_fn=contexts)


def blocks(block: nn.Module, x: Tensor, *rest: Any) -> Any:
    """All is computed twice, the dear parts too: a block keeps nothing but its input."""
    return checkpoint(block, x, *rest, use_reentrant=False)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in DEAR else CheckpointPolicy.PREFER_RECOMPUTE
