"""Demonstrations on distributions small enough to enumerate, used by the notebooks.

Each module yields its results one by one and plots them in one figure.
"""
