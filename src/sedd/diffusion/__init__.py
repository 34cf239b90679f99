"""Discrete diffusion in pure PyTorch: schedules, processes, divergences, parameterizations, objectives, draws."""
