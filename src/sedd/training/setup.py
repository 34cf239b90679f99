"""Build the process, schedule, objective, network and model of a run from its configuration."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from sedd import parameterization
from sedd.nn.adapter import AdaptedNetwork, adapt
from sedd.nn.transformer import Modern, Reference
from sedd.objectives import Objective
from sedd.process import Process
from sedd.registry import PARAMETERIZATIONS
from sedd.runtime.cuda_graphs import GraphedBackbone
from sedd.schedule import LowNoiseTimes, Schedule, TimeSampler, bell_times
from sedd.schema import check_memory
from sedd.training import networks
from sedd.training.config import OBJECTIVES, PROCESSES, SCHEDULES, RunConfig

ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {"modern": Modern, "reference": Reference}
SIZES = ("width", "depth", "heads", "cond_dim", "dropout", "ngrams", "embedding_norm")
"""Options of the section `model` that are arguments of the networks."""
TIME_SAMPLERS: dict[str, Callable[[], TimeSampler]] = {"low-noise": LowNoiseTimes, "bell": bell_times}
"""The distributions of the option `train.time_sampling` other than uniform."""


class DiffusionSetup(NamedTuple):
    """The process, schedule and objective of a run."""

    process: Process
    schedule: Schedule
    objective: Objective


def build_setup(config: RunConfig, vocab_size: int, token_counts: Sequence[int] | None = None) -> DiffusionSetup:
    """Build the process, schedule and objective of a run; process ``frequency`` needs the counts of the tokens."""
    noise: dict[str, Any] = {} if config.noise.mask_share is None else {"mask_share": config.noise.mask_share}
    if token_counts is not None:
        noise["frequencies"] = [count + 1 for count in token_counts]  # a token that never occurs may be noise too
    process: Process = PROCESSES.build(config.noise.process, vocab_size, **noise)
    schedule: Schedule = SCHEDULES.build(config.noise.schedule or "log-linear", **config.noise.options)
    options: dict[str, Any] = {k: int(v) if k == "steps" else v for k, v in config.objective_options.items()}
    if (name := config.train.time_sampling) != "uniform":  # every objective's default; not all have another
        if "time_sampler" not in inspect.signature(OBJECTIVES.load(config.objective)).parameters:
            raise ValueError(f"train.time_sampling is {name!r}; leave it out: {config.objective} has uniform times")
        options["time_sampler"] = TIME_SAMPLERS[name]()
    objective: Objective = OBJECTIVES.build(config.objective, **options)
    objective.check_process(process)
    return DiffusionSetup(process, schedule, objective)


def build_network(config: RunConfig, setup: DiffusionSetup, labels: int = 0) -> nn.Module:
    """Build the network of a run with freshly initialised weights, for data with ``labels`` labels."""
    m = config.model
    causal, hollow = config.objective == "autoregressive", m.parameterization == "conditional"
    states = setup.process.vocab_size + 1 if causal else setup.process.num_states
    if config.network:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return networks.build(config.network, states, m.seq_len, labels)
    if torch.get_default_device().type != "meta":
        least = 4 * m.width * (states + 8 * m.depth * m.width)
        what = f"a network of width {m.width} and depth {m.depth} for {states} states has weights of"
        check_memory(least, what, "choose a smaller width, depth or vocabulary")
    network: nn.Module = ARCHITECTURES[m.architecture](
        states=states,
        **{name: getattr(m, name) for name in SIZES},
        time_conditioning=config.time_conditioning != "none",
        causal=causal,
        hollow=hollow,
        labels=labels,
        generator=torch.Generator().manual_seed(config.seed),
    )
    return network


def build_model(
    config: RunConfig, network: nn.Module, setup: DiffusionSetup, cuda_graphs: bool = False
) -> parameterization.DiscreteModel:
    """Build the model of a run from its network; ``cuda_graphs`` are for inference, and used on a GPU only."""
    network = adapt(network)
    can_use_graphs = cuda_graphs and not isinstance(network, AdaptedNetwork) and next(network.parameters()).is_cuda
    graphed = GraphedBackbone(network) if can_use_graphs else None
    kind = PARAMETERIZATIONS.load(config.model.parameterization or "score")
    model: parameterization.DiscreteModel = kind(
        network, setup.process, setup.schedule, time_conditioning=config.time_conditioning, graphed=graphed
    )
    return model
