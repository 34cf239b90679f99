"""Evaluation: the likelihood of a data set under a model, by a protocol that has a name.

A `Protocol` says how text becomes sequences, `given`, `held_out` and `alone` make a `Corpus` of them, `evaluate` gives
the number and everything it depends on, and `table` puts such records side by side if they may stand there. `after`
scores what follows a context.
"""

from sedd.evaluation.continuation import after, running, split
from sedd.evaluation.corpus import Corpus, alone, given, held_out
from sedd.evaluation.protocols import ALONE, DATASETS, PROTOCOLS, Protocol, protocol, suite
from sedd.evaluation.results import evaluate, table

__all__ = [
    "ALONE",
    "DATASETS",
    "PROTOCOLS",
    "Corpus",
    "Protocol",
    "after",
    "alone",
    "evaluate",
    "given",
    "held_out",
    "protocol",
    "running",
    "split",
    "suite",
    "table",
]
