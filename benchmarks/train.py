"""Training at the size of published models on one GPU: each setting beside our plain path, and beside its goal.

python benchmarks/train.py                     a table
python benchmarks/train.py --json FILE         and a record, as kept in benchmarks/results/
python benchmarks/train.py --only uniform,loss fewer rows
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import NamedTuple

from sedd import bench
from sedd.bench import LossSetting, Row, TrainSetting


class Goal(NamedTuple):
    """What a row should reach: tokens a second and GiB, or a share of the ceiling."""

    least: float
    most: float | None = None


SETTINGS: dict[str, tuple[TrainSetting | LossSetting, Goal]] = {
    "absorbing": (TrainSetting(batch=64), Goal(640e3, 24)),
    "uniform": (TrainSetting(process="uniform", batch=32), Goal(470e3, 16)),
    "medium": (TrainSetting(recipe="medium", batch=32), Goal(200e3, 32)),
    "lambda-dce": (TrainSetting(objective="lambda-dce", batch=64), Goal(660e3, 24)),
    "loss": (LossSetting(), Goal(0.6)),
    "loss, uniform": (LossSetting(process="uniform", rows=32_768), Goal(0.6)),
    "loss, mean": (LossSetting(parameterization="mean"), Goal(0.6)),
}


def show(name: str, row: Row, goal: Goal) -> None:
    """One line, with what is reached of the goal."""
    if row.milliseconds is None or row.tokens_per_second is None or row.peak_gib is None:
        print(f"{name:14s} {row.way:6s} out of memory", flush=True)
        return
    line = f"{name:14s} {row.way:6s} {row.milliseconds:9.2f} ms {row.tokens_per_second:12,.0f} tok/s"
    line += f" {row.peak_gib:7.2f} GiB {row.share_of_ceiling or 0:6.1%}"
    if row.way == "fused":
        reached = (row.tokens_per_second if goal.most else row.share_of_ceiling or 0) / goal.least
        line += f"   {reached:5.2f} of the goal" + (
            f", {row.peak_gib / goal.most:4.2f} of the memory" if goal.most else ""
        )
    print(line, flush=True)


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a record to this file, after every row")
    parser.add_argument("--only", default=",".join(SETTINGS), help="names of rows, with commas between them")
    parser.add_argument("--recompute", default="cheap", help="what blocks compute twice: nothing, cheap, blocks")
    parser.add_argument("--fused-only", action="store_true", help="leave the plain path out")
    given = parser.parse_args()
    names = [name.strip() for name in given.only.split(",")]
    on = bench.machine("cuda", "bfloat16")
    record: dict[str, object] = {"command": " ".join(sys.argv), "machine": on._asdict(), "recompute": given.recompute}
    print(f"{on.name}, torch {on.torch}, commit {on.commit}, ceiling {on.ceiling_tflops:.0f} TFLOP/s", flush=True)
    print(f"useful FLOP: loss {bench.LOSS_FLOPS}; training {bench.TRAIN_FLOPS}")
    for name, (setting, goal) in SETTINGS.items():
        if name not in names and name.split(",")[0] not in names:
            continue
        if isinstance(setting, TrainSetting):
            setting = dataclasses.replace(setting, recompute=given.recompute)
        measured = []
        for row in bench.train(setting, on) if isinstance(setting, TrainSetting) else bench.loss(setting, on):
            show(name, row, goal)
            measured.append(row._asdict())
            record[name] = {"setting": setting.__dict__, "goal": goal._asdict(), "rows": measured}
            if given.json:
                given.json.write_text(json.dumps(record, indent=1) + "\n")
            if given.fused_only:
                break


if __name__ == "__main__":
    main()
