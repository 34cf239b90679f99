"""Noise processes: what noise does to one token. Every position is corrupted independently.  [§1–§4]

Two processes: `Uniform` replaces a token by a random one, `Absorbing` by a mask. Each is a rate matrix Q in the
column convention (``Q[y, x]`` is the rate from x to y) and all that follows from it in closed form, so that
50,000 states cost a gather or a scalar where a matrix would not fit. `DenseProcess` is the base of processes that are
given by a rate matrix alone, for small vocabularies.

Shapes: token ids are ``(*b, L)``, the total noise ``sigma`` is ``(*b,)``, scores are ``(*b, L, num_states)``.
"""

from sedd.diffusion.process.absorbing import Absorbing
from sedd.diffusion.process.base import Process, Ratio, at_token, interpolate_log, log_odds
from sedd.diffusion.process.dense import DenseProcess
from sedd.diffusion.process.uniform import Uniform

__all__ = [
    "Absorbing",
    "DenseProcess",
    "Process",
    "Ratio",
    "Uniform",
    "at_token",
    "interpolate_log",
    "log_odds",
]
