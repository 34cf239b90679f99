"""Evaluation: the likelihood of a data set under a model, by a protocol that has a name.

`corpus` makes sequences of files as a `protocol` says, `estimate` looks at them, `record` says everything that the
number depends on, and `table` puts records side by side if they may stand there. `compare` does it for runs.
"""

from sedd.evaluate.corpus import Corpus, alone, given, held_out
from sedd.evaluate.estimate import Estimate, estimate
from sedd.evaluate.protocol import DATASETS, PROTOCOLS, SUITES, Protocol, protocol
from sedd.evaluate.record import record, table

__all__ = [
    "DATASETS",
    "PROTOCOLS",
    "SUITES",
    "Corpus",
    "Estimate",
    "Protocol",
    "alone",
    "estimate",
    "given",
    "held_out",
    "protocol",
    "record",
    "table",
]
