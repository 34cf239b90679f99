"""Operations that have a PyTorch reference and a Triton kernel, chosen by device.

A module ``x_triton`` holds the kernels for ``x``, which read and write a tensor once; it is imported where they run.

Reference: Tillet et al. 2019, "Triton: An Intermediate Language and Compiler for Tiled Neural Network Computations",
doi:10.1145/3315508.3329973.
"""
