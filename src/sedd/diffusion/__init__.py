"""The mathematics: schedules, processes, divergences, parameterizations, objectives and exact draws. Pure PyTorch."""
