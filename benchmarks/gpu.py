"""Training, loss and sampling at published sizes on one GPU, compared with the PyTorch reference and with goals.

python benchmarks/gpu.py                        a table
python benchmarks/gpu.py --json FILE            and a record, as kept in benchmarks/results/
python benchmarks/gpu.py --only uniform,loss    fewer rows
python benchmarks/gpu.py --curves               how time and memory grow with batch, length, vocabulary and steps
"""

import argparse
import datetime
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from loss import LOSS_FLOPS, LossSetting, measure_loss
from measure import Machine, Measurement, describe_machine
from sample import SAMPLE_FLOPS, SampleSetting, measure_sampling
from train import TRAIN_FLOPS, TrainSetting, measure_training

Setting = TrainSetting | LossSetting | SampleSetting


class Goal(NamedTuple):
    """Values that a row should reach; None: no goal."""

    tokens_per_second: float | None = None
    peak_gib: float | None = None
    milliseconds: float | None = None
    utilization: float | None = None


SCORE = {"objective": "score-entropy", "sampler": "tweedie"}
DCE = {"objective": "lambda-dce", "batch": 64}
GOALS: dict[str, tuple[Setting, Goal]] = {
    "absorbing": (TrainSetting(batch=64), Goal(640e3, 24)),
    "absorbing, float8": (TrainSetting(batch=64, precision="float8"), Goal(640e3, 24)),
    "uniform": (TrainSetting(process="uniform", batch=32), Goal(470e3, 16)),
    "uniform, float8": (TrainSetting(process="uniform", batch=32, precision="float8"), Goal(470e3, 16)),
    "medium": (TrainSetting(recipe="medium", batch=32), Goal(200e3, 32)),
    "medium, float8": (TrainSetting(recipe="medium", batch=32, precision="float8"), Goal(200e3, 32)),
    "lambda-dce": (TrainSetting(**DCE), Goal(660e3, 24)),
    "lambda-dce, float8": (TrainSetting(**DCE, precision="float8"), Goal(660e3, 24)),
    "loss": (LossSetting(), Goal(utilization=0.6)),
    "loss, uniform": (LossSetting(process="uniform", rows=32_768), Goal(utilization=0.6)),
    "loss, mean": (LossSetting(parameterization="mean"), Goal(utilization=0.6)),
    "sample 1": (SampleSetting(batch=1), Goal(milliseconds=1.1)),
    "sample 16": (SampleSetting(batch=16), Goal(milliseconds=8.0)),
    "sample 1, long": (SampleSetting(batch=1, steps=1024), Goal(milliseconds=750 / 1024)),
    "sample 16, long": (SampleSetting(batch=16, steps=1024, repeats=1), Goal(milliseconds=5200 / 1024)),
    "sample, score": (SampleSetting(**SCORE), Goal(milliseconds=10)),
    "sample, uniform": (SampleSetting(process="uniform", steps=64, **SCORE), Goal(milliseconds=12)),
}
CURVES: dict[str, list[Setting]] = {
    "training, batch": [TrainSetting(batch=batch, repeats=8) for batch in (4, 8, 16, 32, 64)],
    "training, length": [
        TrainSetting(batch=2**16 // n, length=n, repeats=8) for n in (256, 512, 1024, 2048, 4096, 8192)
    ],
    "loss, vocabulary": [LossSetting(vocab_size=n, repeats=8) for n in (256, 1024, 4096, 16_384, 65_536, 131_072)],
    "sampling, batch": [SampleSetting(batch=batch, repeats=1) for batch in (1, 4, 16, 64)],
    "sampling, steps": [SampleSetting(batch=4, steps=steps, repeats=1) for steps in (16, 64, 256, 1024)],
    "sampling, length": [SampleSetting(batch=2**13 // n, length=n, repeats=1) for n in (256, 1024, 4096, 8192)],
}


def rows(setting: Setting, machine: Machine) -> Iterator[Measurement]:
    """Measure the fused variant, then the PyTorch reference."""
    if isinstance(setting, TrainSetting):
        return measure_training(setting, machine)
    return measure_loss(setting, machine) if isinstance(setting, LossSetting) else measure_sampling(setting, machine)


def print_row(name: str, row: Measurement, goal: Goal) -> None:
    """Print one line, with the fraction of each goal that is reached."""
    if row.milliseconds is None or row.tokens_per_second is None or row.peak_gib is None:
        print(f"{name:18s} {row.variant:6s} out of memory", flush=True)
        return
    line = f"{name:18s} {row.variant:6s} {row.milliseconds:9.3f} ms {row.tokens_per_second:12,.0f} tok/s"
    line += f" {row.peak_gib:7.2f} GiB {row.utilization or 0:6.1%}"
    goals = [(field, value) for field, value in goal._asdict().items() if value is not None]
    if row.variant == "fused":
        line += "".join(f"   {field}: {getattr(row, field) / value:4.2f} of {value:,.4g}" for field, value in goals)
    print(line, flush=True)


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a record to this file, after every row")
    parser.add_argument("--only", help="names of rows, with commas between them")
    parser.add_argument("--curves", action="store_true", help="curves instead of goals, the fused variant only")
    parser.add_argument("--fused-only", action="store_true", help="leave the PyTorch reference out")
    args = parser.parse_args()
    machine = describe_machine("cuda", "bfloat16")
    formulas = {"loss": LOSS_FLOPS, "train": TRAIN_FLOPS, "sample": SAMPLE_FLOPS}
    record: dict[str, object] = {
        "command": " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "machine": machine._asdict(),
        "flops": formulas,
    }
    speed = f"matrix products {machine.matmul_tflops:.0f} TFLOP/s"
    print(f"{machine.name}, torch {machine.torch}, commit {machine.commit}, {speed}", flush=True)
    curves = {f"{name} {i}": (setting, Goal()) for name, all in CURVES.items() for i, setting in enumerate(all)}
    for name, (setting, goal) in (curves if args.curves else GOALS).items():
        if args.only and name.split(",")[0] not in args.only.split(","):
            continue
        measured = []
        for row in rows(setting, machine):
            print_row(name, row, goal)
            measured.append(row._asdict())
            record[name] = {"setting": setting.__dict__, "goal": goal._asdict(), "rows": measured}
            if args.json:
                args.json.write_text(json.dumps(record, indent=1) + "\n")
            if args.fused_only or args.curves or setting.precision == "float8":  # the bfloat16 row has the reference
                break


if __name__ == "__main__":
    main()
