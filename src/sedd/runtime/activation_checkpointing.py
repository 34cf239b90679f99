"""Activation checkpointing: which activations of a block are stored for the backward pass and which are recomputed.

A transformer block makes a dozen tensors of the size of its input, and its backward pass needs all of them. Matrix
products and attention are expensive to repeat; norms, gates, rotations and activations are cheap.

Reference: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ActivationCheckpointing = Callable[..., Any]
"""``(block, x, …) -> block(x, …)``."""

_aten = torch.ops.aten
SAVED_OPS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
"""Operations whose outputs `selective` stores. Float8 products are excluded: queries are rotated in place."""


def none(block: nn.Module, x: Tensor, *rest: Any) -> Any:
    """Store every activation; a compiler may still choose to recompute some."""
    return block(x, *rest)


def selective(block: nn.Module, x: Tensor, *rest: Any) -> Any:
    """Store the outputs of `SAVED_OPS` and recompute everything else."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(block, x, *rest, use_reentrant=False, context_fn=contexts)


def full(block: nn.Module, x: Tensor, *rest: Any) -> Any:
    """Store nothing but the input of the block and recompute the whole block."""
    return checkpoint(block, x, *rest, use_reentrant=False)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE
