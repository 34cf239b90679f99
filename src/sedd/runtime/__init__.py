"""Devices, processes, CUDA graphs, activation checkpointing and run logs."""
