"""Training: from a configuration to a folder with a model, on one process or many.

What a step computes is a function of the configuration and the step's number alone: the order of the data, the times,
the noise, dropout. So a run that was stopped goes on exactly as if it had not been, and two processes compute what one
does.
"""

from sedd.training.batches import Batch, Batches, seeded
from sedd.training.dry_run import plan
from sedd.training.loop import NonFiniteError, OnEvent, Outcome, run, writable
from sedd.training.overrides import configured, stored
from sedd.training.progress import watched
from sedd.training.sources import prepared
from sedd.training.trainer import Gradient, Progress, Trainer

__all__ = [
    "Batch",
    "Batches",
    "Gradient",
    "NonFiniteError",
    "OnEvent",
    "Outcome",
    "Progress",
    "Trainer",
    "configured",
    "plan",
    "prepared",
    "run",
    "seeded",
    "stored",
    "watched",
    "writable",
]
