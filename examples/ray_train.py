"""Train on a Ray cluster: Ray starts the workers, restarts them after a failure, and keeps metrics and checkpoints.

    python examples/ray_train.py corpus.txt --out /shared/run --workers 2

It needs ``ray[train]`` from the package index, and for ``--out`` and ``--storage`` folders that all machines share. Ray
Train makes the process group of its workers; `sedd.train` uses it and leaves it alive. When a worker dies, Ray starts
all of them again, and the run continues from its newest checkpoint.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import train
from ray.train.torch import TorchTrainer

import sedd


def newest_checkpoint(out: Path) -> train.Checkpoint | None:
    """Return the newest complete checkpoint of a run; the first worker alone hands it to Ray."""
    if train.get_context().get_world_rank() > 0:
        return None
    folders = sorted((out / "checkpoints").glob("step-*"))
    return train.Checkpoint.from_directory(folders[-1]) if folders else None


def train_worker(settings: dict[str, Any]) -> None:
    """Train in one worker; at each validation, and at the end, report the metrics and the newest checkpoint."""
    out, metrics = Path(settings["out"]), dict[str, Any]()

    def on_event(kind: str, record: dict[str, Any]) -> None:
        if kind == "log" and "bound" in record:  # in every worker, as Ray needs it
            metrics.update({name: record[name] for name in ("step", "tokens", "bound", "bound_stderr")})
            train.report(metrics, checkpoint=newest_checkpoint(out))

    resume = (out / "config.json").is_file()  # written when the run began
    sedd.train(settings["sources"], out=out, resume=resume, on_event=on_event, **settings["options"])
    train.report(metrics | {"finished": True}, checkpoint=newest_checkpoint(out))


def fit(settings: dict[str, Any], worker: Callable[[dict[str, Any]], None] = train_worker) -> train.Result:
    """Run the workers, and restart them when one fails."""
    trainer = TorchTrainer(
        worker,
        train_loop_config=settings,
        scaling_config=train.ScalingConfig(num_workers=settings["workers"], use_gpu=settings["use_gpu"]),
        run_config=train.RunConfig(
            name=Path(settings["out"]).name,
            storage_path=settings["storage"],
            failure_config=train.FailureConfig(max_failures=3),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--out", required=True)
    parser.add_argument("--storage", help="Folder of Ray's own copies; by default beside --out.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    result = fit(
        {
            "sources": [str(Path(source).resolve()) for source in given.sources],
            "out": str(Path(given.out).resolve()),
            "storage": str(Path(given.storage or f"{given.out}-ray").resolve()),
            "workers": given.workers,
            "use_gpu": given.use_gpu,
            "options": {"recipe": given.recipe, "steps": given.steps},
        }
    )
    print(f"{given.out}: {result.metrics}, {result.checkpoint}")
