"""Build the parts of a run from its configuration, and load a model from disk."""

import copy
import functools
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from sedd import checkpoint, likelihood, networks, registry, stored_weights
from sedd import parameterization as parameterizations
from sedd.config import PRECISIONS, RunConfig, check_choice, check_label
from sedd.likelihood import BoundTerms, Estimator
from sedd.likelihood.orders import Orders, check_mixture, check_orders
from sedd.nn.adapter import AdaptedNetwork, adapt
from sedd.nn.layers import Linear
from sedd.nn.transformer import Transformer
from sedd.objectives import Objective
from sedd.process import Process
from sedd.runtime.cuda_graphs import GraphedBackbone
from sedd.runtime.offload import OffloadedNetwork
from sedd.schedule import Schedule
from sedd.tokenizer import Tokenizer, load_tokenizer
from sedd.tokenizer import build_tokenizer as build_tokenizer

WITHOUT_FLOAT64 = ("mps",)
"""Types of devices that have no float64."""


def build_estimator(
    name: str | None,
    loaded: "LoadedModel",
    terms: Sequence[str],
    t_min: float = 0.0,
    seed: int = 0,
    orders: Orders | None = None,
) -> Estimator:
    """Build the estimator of a model's likelihood.

    Args:
        name: bound, any-order, forward, backward or random, as far as they fit the model; None: the first that fits.
        loaded: The model.
        terms: The terms of the variational bound to include: all, or the diffusion term alone as in published
            tables.  [§8]
        t_min: The time at which the integral of the diffusion term begins, where it stands alone.
        seed: Decides the order named ``random``.
        orders: The number of orders of the mixture that a time-free denoiser of masks is, or ``all``; None: another
            estimator.
    """
    if orders is not None:
        return _mixture_estimator(name, loaded, orders)
    estimators = _estimators(loaded, set(terms) == set(BoundTerms._fields), t_min, seed)
    if name is not None and name not in estimators:
        what = f"{loaded.config.model.parameterization} under {loaded.config.noise.process} noise"
        raise ValueError(f"estimator, for {what}, is {name!r}; choose one of {', '.join(estimators)}")
    return estimators[name or next(iter(estimators))]


def _mixture_estimator(name: str | None, loaded: "LoadedModel", orders: Orders) -> Estimator:
    """Return the estimator of a mixture over orders."""
    check_orders(orders, name)
    check_mixture(loaded.config)
    if orders == "all":
        return likelihood.AllOrdersEstimator(loaded.process)
    return likelihood.ImportanceWeightedEstimator(loaded.process, int(orders))


def _estimators(loaded: "LoadedModel", all_terms: bool, t_min: float, seed: int) -> dict[str, Estimator]:
    """Return the estimators that fit a model by their names, the default first."""
    process, default = loaded.process, likelihood.default_estimator(loaded.model)
    if default.is_exact:
        return {"forward": default}
    bound = default if all_terms else likelihood.DiffusionTermEstimator(process, loaded.schedule, t_min)
    if not (isinstance(loaded.model, parameterizations.MeanModel) and process.only_masks):
        return {"bound": bound}
    in_order = functools.partial(likelihood.FixedOrderEstimator, process)
    return {
        "bound": bound,
        "any-order": likelihood.AnyOrderEstimator(process),
        "forward": in_order(torch.arange),
        "backward": in_order(lambda length: torch.arange(length).flip(0)),
        "random": in_order(lambda length: torch.randperm(length, generator=torch.Generator().manual_seed(seed))),
    }


class DiffusionSetup(NamedTuple):
    """The process, schedule and objective of a run."""

    process: Process
    schedule: Schedule
    objective: Objective[Any]


def build_setup(config: RunConfig, vocab_size: int, token_counts: Sequence[int] | None = None) -> DiffusionSetup:
    """Build the process, schedule and objective of a run.

    Args:
        config: The run.
        vocab_size: Number of tokens.
        token_counts: How often each token occurs in the training data, for process ``frequency``.
    """
    noise: dict[str, Any] = {}
    if config.noise.mask_share is not None:
        noise["mask_share"] = config.noise.mask_share
    if token_counts is not None:
        noise["frequencies"] = [count + 1 for count in token_counts]  # a token that never occurs may be noise too
    process: Process = registry.PROCESSES.build(config.noise.process, vocab_size, **noise)
    schedule: Schedule = registry.SCHEDULES.build(config.noise.schedule or "log-linear", **config.noise.options)
    options: dict[str, Any] = {k: int(v) if k == "steps" else v for k, v in config.objective_options.items()}
    if (name := config.train.time_sampling) != "uniform":  # every objective's default; not all have another
        if "time_sampler" not in inspect.signature(registry.OBJECTIVES.load(config.objective)).parameters:
            raise ValueError(
                f"train.time_sampling is {name!r}; objective {config.objective} has uniform times only: leave it out"
            )
        options["time_sampler"] = registry.TIME_SAMPLERS.load(name)()
    objective: Objective[Any] = registry.OBJECTIVES.build(config.objective, **options)
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
    network: nn.Module = registry.ARCHITECTURES.build(
        m.architecture,
        states=states,
        width=m.width,
        depth=m.depth,
        heads=m.heads,
        cond_dim=m.cond_dim,
        dropout=m.dropout,
        time_conditioning=config.time_conditioning != "none",
        causal=causal,
        hollow=hollow,
        ngrams=m.ngrams,
        embedding_norm=m.embedding_norm,
        labels=labels,
        generator=torch.Generator().manual_seed(config.seed),
    )
    return network


def check_memory(least: int, what: str, advice: str) -> None:
    """Reject what takes more bytes than this machine has memory, before any are allocated."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if least > memory:
        raise ValueError(f"{what} at least {least:,} bytes, and this machine has a memory of {memory:,}; {advice}")


def build_model(
    config: RunConfig, network: nn.Module, setup: DiffusionSetup, cuda_graphs: bool = False
) -> parameterizations.DiscreteModel:
    """Build the model of a run from its network.

    Args:
        config: The run.
        network: Its network.
        setup: Its process, schedule and objective.
        cuda_graphs: Compute hidden states by CUDA graphs where the network is on a GPU; not for training.
    """
    network = adapt(network)
    can_use_graphs = cuda_graphs and not isinstance(network, AdaptedNetwork) and next(network.parameters()).is_cuda
    graphed = GraphedBackbone(network) if can_use_graphs else None
    kind = registry.PARAMETERIZATIONS.load(config.model.parameterization or "score")
    model: parameterizations.DiscreteModel = kind(
        network, setup.process, setup.schedule, time_conditioning=config.time_conditioning, graphed=graphed
    )
    return model


class LoadedModel(NamedTuple):
    """A trained model with its process, schedule, tokenizer and configuration."""

    model: parameterizations.DiscreteModel
    network: nn.Module
    process: Process
    schedule: Schedule
    objective: Objective[Any]
    tokenizer: Tokenizer
    config: RunConfig
    folder: Path
    labels: tuple[str, ...] = ()
    """The labels that it was trained with."""
    label: str | None = None
    """The label that ``model`` is conditioned on; None: none."""
    sha256: str | None = None
    """Hash of the file of its weights; None: they are from no file."""
    data_sha256: str | None = None
    """Hash of the data it was trained on, if it was recorded."""

    @property
    def learned_pad(self) -> int | None:
        """The id of the padding that the model generates, as it learned from records of several lengths; None: none."""
        data = self.config.data
        return self.tokenizer.pad if data.packing == "lines" and data.pad == "model" else None

    @property
    def precision(self) -> str:
        """The precision of matrix products."""
        if isinstance(self.network, _AutocastNetwork):
            return "bfloat16"
        dtypes = (part.weight.dtype for part in self.network.modules() if isinstance(part, Linear))
        return str(next(dtypes, torch.float32)).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """The device of tokens: that of the weights, or the CPU for an offloaded network."""
        offloaded = isinstance(self.network, OffloadedNetwork)
        return torch.device("cpu") if offloaded else next(self.network.parameters()).device


class _AutocastNetwork(nn.Module):
    """A network whose matrix products are in bfloat16, while its weights are as they were."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **options: Any) -> Any:
        with torch.autocast(arguments[0].device.type, torch.bfloat16):
            return self.module(*arguments, **options)


def prepare_for_inference(network: nn.Module, device: str, precision: str) -> nn.Module:
    """Move a network to a device for inference, its linear layers in ``float32`` or ``bfloat16``.

    A network of the user's own computes in bfloat16 by autocast. To a device without float64 the network alone is
    moved: see `runtime.offload`.
    """
    check_choice("precision", precision, PRECISIONS)
    offloaded = torch.device(device).type in WITHOUT_FLOAT64
    network = network.to("cpu" if offloaded else device).eval().requires_grad_(False)
    if precision == "bfloat16" and not isinstance(network, Transformer):
        network = _AutocastNetwork(network)
    for part in network.modules():
        if precision == "bfloat16" and isinstance(part, Linear):
            part.to(torch.bfloat16)
    return OffloadedNetwork(network, device) if offloaded else network


@checkpoint.retry_if_pruned
def load_model(
    folder: Path | str,
    weights: str = "ema",
    device: str = "cpu",
    precision: str | None = "float32",
    network: type[nn.Module] | str | None = None,
) -> LoadedModel:
    """Load a model from disk.

    Args:
        folder: A model folder, one of a run's checkpoints, or the run, of which
            `checkpoint.best_or_newest` is taken.
        weights: ``ema``, the exponential moving average, or ``model``, the weights of the last step.
        device: cpu, cuda …
        precision: Precision of matrix products, float32 or bfloat16; None: on a GPU that of training.
        network: The class of a network of the user's own, or its name, instead of the name in its configuration.
    """
    path, config, vocab_size, labels, data_sha256, token_counts = checkpoint.find_model(folder, weights)
    config = _with_network(config, path, network)
    setup = build_setup(config, vocab_size, token_counts)
    stored, tokenizer = stored_weights.load_weights(path, weights), load_tokenizer(path)
    if difference := _difference(config, setup, len(labels), stored.tensors):
        raise ValueError(f"{path / weights}.safetensors is not of the model in its config.json: {difference}")
    built = build_network(config, setup, len(labels))
    built.load_state_dict(stored.tensors)
    half_precision = config.train.precision != "float32"  # float8 is for training alone
    default_precision = "bfloat16" if half_precision and device.startswith("cuda") else "float32"
    prepared = prepare_for_inference(built, device, precision or default_precision)
    model = build_model(config, prepared, setup, cuda_graphs=True)
    return LoadedModel(
        model, prepared, *setup, tokenizer, config, path, labels, sha256=stored.sha256, data_sha256=data_sha256
    )


def _difference(config: RunConfig, setup: DiffusionSetup, labels: int, weights: Mapping[str, torch.Tensor]) -> str:
    """Return how weights differ from the network of a configuration, which takes no memory here; empty: they fit."""
    with torch.device("cpu" if config.network else "meta"):  # a network of the user's own may need values
        expected = build_network(config, setup, labels).state_dict()
    for name, value in expected.items():
        if name not in weights:
            return f"{name} is missing"
        if weights[name].shape != value.shape:
            return f"{name} has shape {tuple(weights[name].shape)} instead of {tuple(value.shape)}"
    unknown = next((name for name in weights if name not in expected), None)
    return f"{unknown} is not part of it" if unknown else ""


def _with_network(config: RunConfig, path: Path, network: type[nn.Module] | str | None) -> RunConfig:
    """Return the configuration of a model with the network that the user named, which alone may be imported."""
    if network is None:
        networks.allow_own(checkpoint.run_folder(path), config.network)
        return config
    name = networks.allow(network)
    if not config.network:
        raise ValueError(f"network is {name}, and {path} has sedd's own transformer; leave network out")
    return replace(config, network={**config.network, "class": name})


def convert_precision(loaded: LoadedModel, precision: str, device: str | None = None) -> LoadedModel:
    """Return a copy of a model, which is in float32, in another precision, conditioned on the same label.

    On the same device, or on another: in bfloat16, if it is, whatever ``precision`` names.

    Args:
        loaded: The model.
        precision: float32 or bfloat16.
        device: Where the copy is; None: where the model is.
    """
    device = device or str(next(loaded.network.parameters()).device)
    original: Any = loaded.network
    while isinstance(original, OffloadedNetwork | _AutocastNetwork):
        original = original.module
    copied = copy.deepcopy(original)
    network = prepare_for_inference(copied, device, precision)
    setup = DiffusionSetup(loaded.process, loaded.schedule, loaded.objective)
    model = build_model(loaded.config, network, setup, cuda_graphs=True)
    return condition_on_label(loaded._replace(model=model, network=network, label=None), loaded.label)


def condition_on_label(loaded: LoadedModel, label: str | None) -> LoadedModel:
    """Condition a model on a label; None: the model without a label, of all sequences together."""
    if label is None:
        return loaded
    check_label(label, loaded.labels)
    number = torch.tensor(loaded.labels.index(label), device=loaded.device)
    return loaded._replace(model=loaded.model.bind(label=number), label=label)
