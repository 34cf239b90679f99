"""Time and memory of sampling, per step, with random weights: fused with CUDA graphs, and the PyTorch reference.

python benchmarks/sample.py                      sizes of published models on a GPU, small ones on a CPU
python benchmarks/sample.py --process uniform --objective score-entropy --sampler tweedie --steps 64 --json
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from measure import (
    Machine,
    Measurement,
    build_parser,
    describe_machine,
    free_memory,
    print_measurements,
    read_setting,
    time_variant,
)
from train import TrainSetting

from sedd import samplers
from sedd.loading import LoadedModel, prepare_for_inference
from sedd.tokenizer import Integers
from sedd.training.setup import build_model, build_network, build_setup

SAMPLE_FLOPS = (
    "per token of each sequence in a network call, without output layer: "
    "24 · depth · width² + 4 · depth · length · width"
)


@dataclass(frozen=True)
class SampleSetting:
    """The model and the sampler to measure."""

    CPU: ClassVar[dict[str, Any]] = {
        **{"recipe": "tiny", "steps": 16, "batch": 4, "vocab_size": 4096, "precision": "float32"}
    }
    recipe: str = "small"
    process: str = "absorbing"
    objective: str = "lambda-dce"
    """Decides the network: lambda-dce a denoiser without time conditioning, score-entropy a score with it."""
    sampler: str | None = None
    """None: the default for the model."""
    steps: int = 128
    batch: int = 16
    length: int | None = None
    """None: that of the recipe."""
    vocab_size: int = 50_257
    precision: str = "bfloat16"
    device: str = "cuda"
    repeats: int = 3

    def __post_init__(self) -> None:
        if self.batch < 1 or self.steps < 1 or self.repeats < 1:
            raise ValueError(f"batch {self.batch}, steps {self.steps}, repeats {self.repeats}: each must be 1 or more")


def random_model(setting: SampleSetting, cuda_graphs: bool = True) -> LoadedModel:
    """Build a model with random weights whose tokens are integers."""
    run = TrainSetting(setting.recipe, setting.process, setting.objective, length=setting.length).run()
    parts = build_setup(run, setting.vocab_size)
    network = build_network(run, parts)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():  # with an output layer of zeros all tokens would be equally likely
            parameter.normal_(0, 0.02, generator=generator)
    prepared = prepare_for_inference(network, setting.device, setting.precision)
    model = build_model(run, prepared, parts, cuda_graphs=cuda_graphs)
    return LoadedModel(model, prepared, *parts, Integers(size=setting.vocab_size), run, Path(setting.recipe))


class SamplingRuns:
    """Samples one batch per call."""

    def __init__(self, setting: SampleSetting, fused: bool) -> None:
        loaded = random_model(setting, fused)
        model: Any = loaded.model
        self.sampler, self.steps = samplers.build_sampler(setting.sampler, model), setting.steps
        m = loaded.config.model
        self.prompt = samplers.empty(setting.batch, m.seq_len, setting.device)
        self.fused, self.seed, self.model = fused, 0, samplers.SamplingModel(model)
        self.flops = m.seq_len * m.depth * (24.0 * m.width**2 + 4 * m.seq_len * m.width)

    def __call__(self) -> torch.Tensor:
        """Sample a batch."""
        self.model = samplers.SamplingModel(self.model.model, fused=None if self.fused else False)
        x = self.sampler.sample(self.model, self.prompt, seed=self.seed, steps=self.steps)
        self.seed += 1
        return x


def measure_sampling(setting: SampleSetting, machine: Machine) -> Iterator[Measurement]:
    """Measure a sampling step: with CUDA graphs and fused kernels, and the PyTorch reference."""
    for variant in ("fused", "plain"):
        free_memory(setting.device)
        samples = SamplingRuns(setting, variant == "fused")
        samples()
        tokens, flops = samples.prompt.given.numel(), samples.flops * samples.model.stats.row_calls
        yield time_variant(variant, samples, machine, setting.repeats, tokens, flops, setting.steps, warmup=0)


def main() -> None:
    """Measure and print."""
    parser = build_parser(__doc__, SampleSetting)
    args = parser.parse_args()
    setting = read_setting(parser, args, SampleSetting)
    machine = describe_machine(setting.device, setting.precision)
    print_measurements(setting.__dict__, machine, SAMPLE_FLOPS, measure_sampling(setting, machine), args.json)


if __name__ == "__main__":
    main()
