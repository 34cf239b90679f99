"""Activation checkpointing: which activations of a block are stored for the backward pass and which are recomputed.

Matrix products and attention are expensive to repeat; norms, gates, rotations and activations are cheap. A block is
called as ``none(block, x, …)``, ``selective(block, x, …)`` or ``full(block, x, …)``.

Reference: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ActivationCheckpointing = Callable[..., Any]

_aten = torch.ops.aten
SAVED_OPS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
"""Operations whose outputs `selective` stores. Float8 products are excluded: queries are rotated in place."""

none: ActivationCheckpointing = nn.Module.__call__
"""Store every activation; a compiler may still choose to recompute some."""
full: ActivationCheckpointing = partial(checkpoint, use_reentrant=False)
"""Store nothing but the input of the block and recompute the whole block."""
selective: ActivationCheckpointing = partial(full, context_fn=partial(create_selective_checkpoint_contexts, SAVED_OPS))
"""Store the outputs of `SAVED_OPS` and recompute everything else."""
