"""Score entropy discrete diffusion: learn the ratios of a law over discrete sequences, and follow them.

The rooms are the modules: ``from sedd import exact, objective, process, schedule``. Importing ``sedd`` alone
costs nothing; torch is loaded by the rooms that need it.
"""

__version__ = "0.1.0"
