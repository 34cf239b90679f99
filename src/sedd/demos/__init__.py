"""Demonstrations on distributions small enough to enumerate; one module per command of ``sedd demo``.

Each yields its results as it computes them, and draws one picture of them.
"""
