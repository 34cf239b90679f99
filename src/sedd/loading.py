"""Load a trained model from disk: its configuration, weights and tokenizer."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sedd.nn.layers import Linear
from sedd.nn.transformer import Transformer
from sedd.objectives import Objective
from sedd.parameterization import DiscreteModel
from sedd.process import Process
from sedd.runtime.offload import OffloadedNetwork
from sedd.schedule import Schedule
from sedd.schema import check_choice
from sedd.tokenizer import Tokenizer, load_tokenizer
from sedd.training import checkpoint, networks
from sedd.training.config import PRECISIONS, RunConfig, check_label
from sedd.training.setup import DiffusionSetup, build_model, build_network, build_setup

WITHOUT_FLOAT64 = ("mps",)  # types of devices


@dataclass(frozen=True)
class LoadedModel:
    """A trained model with its process, schedule, tokenizer and configuration."""

    model: DiscreteModel
    network: nn.Module
    process: Process
    schedule: Schedule
    objective: Objective
    tokenizer: Tokenizer
    config: RunConfig
    folder: Path
    labels: tuple[str, ...] = ()  # that it was trained with
    label: str | None = None  # that ``model`` is conditioned on
    sha256: str | None = None  # of the file of its weights, if they are from a file
    data_sha256: str | None = None  # of the data it was trained on, if it was recorded

    @cached_property
    def learned_pad(self) -> int | None:
        """The id of the padding that the model generates, as it learned from records of several lengths; None: none."""
        data = self.config.data
        return self.tokenizer.pad if data.packing == "lines" and data.pad == "model" else None

    @property
    def precision(self) -> str:
        if isinstance(self.network, _AutocastNetwork):
            return "bfloat16"
        dtypes = (part.weight.dtype for part in self.network.modules() if isinstance(part, Linear))
        return str(next(dtypes, torch.float32)).removeprefix("torch.")

    @cached_property
    def device(self) -> torch.device:
        """The device of tokens: that of the weights, or the CPU for an offloaded network."""
        offloaded = isinstance(self.network, OffloadedNetwork)
        return torch.device("cpu") if offloaded else next(self.network.parameters()).device

    def with_label(self, label: str | None) -> "LoadedModel":
        """Return the model conditioned on a label; None: the model without a label, of all sequences together."""
        if label is None:
            return self
        check_label(label, self.labels)
        number = torch.tensor(self.labels.index(label), device=self.device)
        return replace(self, model=self.model.bind(label=number), label=label)


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
        folder: A model folder, one of a run's checkpoints, or the run, of which `checkpoint.best_or_newest` is taken.
        weights: ``ema``, the exponential moving average, or ``model``, the weights of the last step.
        precision: Precision of matrix products, float32 or bfloat16; None: on a GPU, the precision of training.
        network: The class of a network of the user's own, or its name, instead of the name in its configuration.
    """
    path, config, vocab_size, labels, data_sha256, token_counts = checkpoint.find_model(folder, weights)
    if network is None:
        networks.allow_own(checkpoint.run_folder(path), config.network)
    else:  # what the user named, which alone may be imported
        name = networks.allow(network)
        if not config.network:
            raise ValueError(f"network is {name}, and {path} has sedd's own transformer; leave network out")
        config = replace(config, network={**config.network, "class": name})
    setup = build_setup(config, vocab_size, token_counts)
    (stored, sha256), tokenizer = checkpoint.load_weights(path, weights), load_tokenizer(path)
    with torch.device("cpu" if config.network else "meta"):  # a network of the user's own may need values
        expected = _shapes(build_network(config, setup, len(labels)).state_dict())  # this takes no memory
    found = _shapes(stored)
    if differing := [name for name in expected | found if expected.get(name) != found.get(name)]:
        shapes = f"{found.get(differing[0], 'none')} in the file and {expected.get(differing[0], 'none')} in the model"
        sentence = f"{differing[0]} has the shape {shapes}"
        raise ValueError(f"{path / weights}.safetensors is not of the model in its config.json: {sentence}")
    built = build_network(config, setup, len(labels))
    built.load_state_dict(stored)
    half_precision = config.train.precision != "float32"  # float8 is for training alone
    default_precision = "bfloat16" if half_precision and device.startswith("cuda") else "float32"
    prepared = prepare_for_inference(built, device, precision or default_precision)
    model = build_model(config, prepared, setup, cuda_graphs=True)
    return LoadedModel(model, prepared, *setup, tokenizer, config, path, labels, sha256=sha256, data_sha256=data_sha256)


def _shapes(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in weights.items()}


def convert_precision(loaded: LoadedModel, precision: str, device: str | None = None) -> LoadedModel:
    """Return a copy of a model in another precision, or on another device, conditioned on the same label.

    The precision of the weights is only lowered: a copy of a model in bfloat16 is in bfloat16.
    """
    device = device or str(next(loaded.network.parameters()).device)
    original: Any = loaded.network
    while isinstance(original, OffloadedNetwork | _AutocastNetwork):
        original = original.module
    network = prepare_for_inference(copy.deepcopy(original), device, precision)
    setup = DiffusionSetup(loaded.process, loaded.schedule, loaded.objective)
    model = build_model(loaded.config, network, setup, cuda_graphs=True)
    return replace(loaded, model=model, network=network, label=None).with_label(loaded.label)
