"""Losses of a linear head, with their gradients, without the head's output.

The output of a head is the largest tensor of a training step: an entry of the vocabulary for every position. Here it
exists for a few thousand rows at a time, and is turned into its own gradient in place:

    rows = unknown_rows(x_t == mask)                          # only these count
    loss = linear_loss(take(hidden, rows), weight, bias, cost)
    loss.total.backward()

`definition` says in torch what is computed for a block of rows, on any device; `tiles` is its twin in Triton, for CUDA.
`choice` draws tokens from the head's output, by its twin `picks` without a table of laws.
`glue` is what stands between the matrix products of a block, and `swift` its twin, for CUDA: `between` chooses.
`eighths` are matrices in float8 and their products, `runs` sums of rows by their key, `moves` a step of AdamW and of
the average, in one launch.
"""

from sedd.ops.block_ops import BlockOps, Modulation, ResidualBranch, between, branch
from sedd.ops.categorical import Choose, Drawn, Scores, choose, chosen, uniforms
from sedd.ops.linear_loss import Loss, linear_loss
from sedd.ops.loss_terms import Cost, CrossEntropy, ScoreEntropy
from sedd.ops.packed_tokens import PackedTokens, take, unknown_rows

__all__ = [
    "BlockOps",
    "Choose",
    "Cost",
    "CrossEntropy",
    "Drawn",
    "Loss",
    "Modulation",
    "PackedTokens",
    "ResidualBranch",
    "ScoreEntropy",
    "Scores",
    "between",
    "branch",
    "choose",
    "chosen",
    "linear_loss",
    "take",
    "uniforms",
    "unknown_rows",
]
