"""Demonstrations on distributions small enough to enumerate; one module per command of ``sedd demo``.

Each module yields its results one by one and plots them in one figure.
"""
