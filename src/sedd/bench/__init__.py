"""Time and memory on this machine of a loss, a training step or sampling, each beside its plain twin in the same run.

Rates are medians over repeated calls with random data. The share of the ceiling is useful arithmetic, by the formula
that is shown with it, over what the same machine reaches in one large matrix product in the same precision.
"""

from sedd.bench.loss import LOSS_FLOPS, LossSetting, loss
from sedd.bench.measure import Clocked, Machine, PositionEmbedding, Row, ceiling, clock, forget, machine, place
from sedd.bench.sample import SAMPLE_FLOPS, SampleSetting, sample
from sedd.bench.train import TRAIN_FLOPS, Batch, Steps, TrainSetting, batch, train

__all__ = [
    "LOSS_FLOPS",
    "SAMPLE_FLOPS",
    "TRAIN_FLOPS",
    "Batch",
    "Clocked",
    "LossSetting",
    "Machine",
    "PositionEmbedding",
    "Row",
    "SampleSetting",
    "Steps",
    "TrainSetting",
    "batch",
    "ceiling",
    "clock",
    "forget",
    "loss",
    "machine",
    "place",
    "sample",
    "train",
]
