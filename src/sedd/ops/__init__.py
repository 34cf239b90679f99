"""Operations that have a PyTorch reference and a Triton kernel, chosen by device.

- `block_ops`: the embedding, and what a transformer block does besides attention: residual + norm + adaLN modulation,
  QKV projection with rotary positions, MLP; packing of the positions that count in a loss.
- `fused_loss`: the loss of a batch and its gradients from an objective and the head, without materializing the logits.
- `fp8`: float8 matrix products with one scale per row.
- `int8`: weights on disk as int8 with one scale per row; it has no kernels.
- `categorical`: one draw per row from weights that are affine in the scores.
- `momentum`: the elementwise halves of a Muon step.

A module ``x_triton`` holds the kernels for ``x`` and is imported only where they run.

Reference: Tillet et al. 2019, "Triton: An Intermediate Language and Compiler for Tiled Neural Network Computations",
doi:10.1145/3315508.3329973.
"""
