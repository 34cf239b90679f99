"""Training: from a configuration to a folder with a model, on one process or many.

The order of the data, times, noise and dropout are functions of the configuration and the step's number alone. So a run
that was stopped and resumed computes exactly what an uninterrupted one does, and two processes compute what one does.
"""

from typing import TYPE_CHECKING

from sedd.lazy import lazy_names

if TYPE_CHECKING:
    from sedd.training.batches import Batch, TrainingDataLoader
    from sedd.training.datasets import prepare_data
    from sedd.training.dry_run import estimate_cost
    from sedd.training.loop import OnEvent, TrainingResult, run
    from sedd.training.overrides import decide_resume, merge_config
    from sedd.training.progress import format_duration, progress_bar
    from sedd.training.sources import check_data, find_sources, require_sources
    from sedd.training.state import NonFiniteError, PendingStep, TrainingState
    from sedd.training.step import StepMetrics, finish_step, train_step
    from sedd.training.trackers import TRACKERS, import_tracker, track_run
    from sedd.training.trainer import Trainer

__all__ = [
    "TRACKERS",
    "Batch",
    "NonFiniteError",
    "OnEvent",
    "PendingStep",
    "StepMetrics",
    "Trainer",
    "TrainingDataLoader",
    "TrainingResult",
    "TrainingState",
    "check_data",
    "decide_resume",
    "estimate_cost",
    "find_sources",
    "finish_step",
    "format_duration",
    "import_tracker",
    "merge_config",
    "prepare_data",
    "progress_bar",
    "require_sources",
    "run",
    "track_run",
    "train_step",
]

__getattr__ = lazy_names(
    __name__,
    {
        "batches": ["Batch", "TrainingDataLoader"],
        "datasets": ["prepare_data"],
        "dry_run": ["estimate_cost"],
        "loop": ["OnEvent", "TrainingResult", "run"],
        "overrides": ["decide_resume", "merge_config"],
        "progress": ["format_duration", "progress_bar"],
        "sources": ["check_data", "find_sources", "require_sources"],
        "state": ["NonFiniteError", "PendingStep", "TrainingState"],
        "step": ["StepMetrics", "finish_step", "train_step"],
        "trackers": ["TRACKERS", "import_tracker", "track_run"],
        "trainer": ["Trainer"],
    },
)
