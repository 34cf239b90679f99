"""Operations that have a PyTorch reference and a Triton kernel, chosen by device.

- `block_ops`: what a transformer block does beside attention: residual + norm + adaLN modulation, QKV projection with
  rotary positions, MLP, embedding.
- `linear_loss`: the loss of a linear head and its gradients, without materializing the logits.
- `fused_loss`: the loss of a batch from the coefficients of an objective and the head of a network.
- `fp8`: float8 matrix products with one scale per row.
- `int8`: weights on disk as int8 with one scale per row; it has no kernels.
- `categorical`: one draw per row from weights that are affine in the scores.
- `momentum`: the elementwise halves of a Muon step.
- `packed_tokens`: the positions that count in a loss, packed together.

A module ``x_triton`` holds the kernels for ``x`` and is imported only where they run.

Reference: Tillet et al. 2019, "Triton: An Intermediate Language and Compiler for Tiled Neural Network Computations",
doi:10.1145/3315508.3329973.
"""
