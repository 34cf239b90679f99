"""What depends on the machine: device capability, CUDA graphs, activation checkpointing, processes, the run log."""
