"""Noise processes: what noise does to one token. Every position is corrupted independently.  [§1–§4]

Noise replaces a token by a draw from a distribution π. `Absorbing`, `Uniform`, `Hybrid` and `Frequency` are four
choices of π, and `Replacement` has the closed forms of all of them: 50,000 states cost a gather or a scalar where a
matrix would not fit. Any other Markov chain is a subclass of `Process`; the guide to extensions writes one from its
rate matrix.

Shapes: token ids are ``(*b, L)``, the total noise ``sigma`` is ``(*b,)``, scores are ``(*b, L, num_states)``.
"""

from sedd.diffusion.process.base import Process, Ratio, at_token
from sedd.diffusion.process.replacement import (
    Absorbing,
    Frequency,
    Hybrid,
    Replacement,
    Uniform,
    log_odds,
    reveal_probability,
)

__all__ = [
    "Absorbing",
    "Frequency",
    "Hybrid",
    "Process",
    "Ratio",
    "Replacement",
    "Uniform",
    "at_token",
    "log_odds",
    "reveal_probability",
]
