"""Demonstrations on laws small enough to know everything about; a module for each command of ``sedd lab``.

Each yields what it finds as it finds it, and draws one picture of it.
"""
