"""Benchmarks of the loss, of a training step and of sampling, each measured beside its PyTorch reference.

Times are medians over repeated calls with random data. Utilization is the useful arithmetic, by the formula shown with
the results, divided by the throughput of one large matrix product on the same machine in the same precision.
"""

from sedd.bench.loss import LOSS_FLOPS, LossSetting, measure_loss
from sedd.bench.measure import (
    DeviceDefaults,
    Machine,
    Measurement,
    Timing,
    describe_machine,
    device_defaults,
    free_memory,
    matmul_flops,
    time_calls,
)
from sedd.bench.sample import SAMPLE_FLOPS, SampleSetting, measure_sampling, random_model
from sedd.bench.serve import Load, ServeSetting, measure_serving
from sedd.bench.train import TRAIN_FLOPS, NoisyBatch, TrainingSteps, TrainSetting, measure_training, random_batch

__all__ = [
    "LOSS_FLOPS",
    "SAMPLE_FLOPS",
    "TRAIN_FLOPS",
    "DeviceDefaults",
    "Load",
    "LossSetting",
    "Machine",
    "Measurement",
    "NoisyBatch",
    "SampleSetting",
    "ServeSetting",
    "Timing",
    "TrainSetting",
    "TrainingSteps",
    "describe_machine",
    "device_defaults",
    "free_memory",
    "matmul_flops",
    "measure_loss",
    "measure_sampling",
    "measure_serving",
    "measure_training",
    "random_batch",
    "random_model",
    "time_calls",
]
