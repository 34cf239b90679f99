"""From names to objects: the only room in which a string chooses a class.

Tokenizers are chosen by `tokenizer.named`, known here as `build.tokenizer`: data are prepared without torch.
"""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from sedd import checkpoint
from sedd import likelihood as likelihoods
from sedd import sampling as samplers
from sedd import tokenizer as tokenizers
from sedd.config import RunConfig
from sedd.diffusion import objective as objectives
from sedd.diffusion import parameterization as parameterizations
from sedd.diffusion import process as processes
from sedd.diffusion import schedule as schedules
from sedd.nn import transformer as transformers
from sedd.nn.labels import Labelled
from sedd.nn.layers import Linear
from sedd.runtime import activation_checkpointing
from sedd.runtime.inference_graphs import Replayed

PROCESSES: Mapping[str, type[processes.Process]] = {
    "absorbing": processes.Absorbing,
    "uniform": processes.Uniform,
}
SCHEDULES: Mapping[str, type[schedules.Schedule]] = {
    "log-linear": schedules.LogLinear,
    "geometric": schedules.Geometric,
    "cosine": schedules.Cosine,
    "polynomial": schedules.Polynomial,
}
PARAMETERIZATIONS: Mapping[str, type[nn.Module]] = {
    "score": parameterizations.Score,
    "mean": parameterizations.Mean,
    "conditional": parameterizations.Conditional,
}
NETWORKS: Mapping[str, type[transformers.Transformer]] = {
    "reference": transformers.Reference,
    "modern": transformers.Modern,
}
CLOCKS: Mapping[str, type[schedules.TimeSampler]] = {
    "uniform": schedules.UniformTimes,
    "low-noise": schedules.LowNoiseTimes,
}
OBJECTIVES: Mapping[str, type[objectives.Objective[Any]]] = {
    "score-entropy": objectives.DenoisingScoreEntropy,
    "explicit-score-entropy": objectives.ExplicitScoreEntropy,
    "implicit-score-entropy": objectives.ImplicitScoreEntropy,
    "concrete-score": objectives.DenoisingConcreteScore,
    "explicit-concrete-score": objectives.ExplicitConcreteScore,
    "ratio-matching": objectives.RatioMatching,
    "mean": objectives.MeanCrossEntropy,
    "d3pm": objectives.D3PM,
    "t-dce": objectives.TimeDCE,
    "lambda-dce": objectives.LambdaDCE,
    "any-order": objectives.AnyOrder,
    "softmax-linear": objectives.SoftmaxLinear,
    "autoregressive": objectives.Autoregressive,
}
SAMPLERS: Mapping[str, type[samplers.Sampler]] = {
    "first-hitting": samplers.FirstHitting,
    "tweedie": samplers.Tweedie,
    "euler": samplers.Euler,
    "ancestral": samplers.Ancestral,
    "theta": samplers.Theta,
    "gibbs": samplers.Gibbs,
    "remask": samplers.Remask,
    "ordered": samplers.Ordered,
    "confidence": samplers.Confident,
    "entropy": samplers.EntropyBounded,
}
GRIDS: Mapping[str, Callable[[int], torch.Tensor]] = {
    "uniform": samplers.uniform_grid,
    "cosine": samplers.cosine_grid,
}
RECOMPUTES: Mapping[str, activation_checkpointing.ActivationCheckpointing] = {
    "none": activation_checkpointing.none,
    "selective": activation_checkpointing.selective,
    "full": activation_checkpointing.full,
}

tokenizer = tokenizers.build_tokenizer

T = TypeVar("T")


def process(name: str, vocab_size: int) -> processes.Process:
    """``absorbing`` or ``uniform`` noise on ``vocab_size`` tokens."""
    return _choose("process", name, PROCESSES)(vocab_size)


def schedule(name: str, **options: float) -> schedules.Schedule:
    """A schedule; ``options`` are its own: ``eps``, ``lo`` and ``hi``, ``power``."""
    return _make("schedule", name, SCHEDULES, options)


def network(style: str, **options: Any) -> transformers.Transformer:
    """A ``reference`` or a ``modern`` transformer; ``options`` are those of `transformer.Transformer`."""
    return _make("network", style, NETWORKS, options)


def parameterization(name: str, network: nn.Module, process: processes.Process) -> nn.Module:
    """``network``, wrapped so that it is called as a model is."""
    return _choose("parameterization", name, PARAMETERIZATIONS)(network, process)


def objective(
    name: str,
    process: processes.Process,
    schedule: schedules.Schedule,
    **options: Any,
) -> objectives.Objective[Any]:
    """An objective; ``options`` are its own: ``t_min``, ``clock``, ``steps`` of d3pm, ``law`` of the explicit ones."""
    kind = _choose("objective", name, OBJECTIVES)
    given = {"process": process, "schedule": schedule, "vocab_size": process.vocab_size}
    taken = inspect.signature(kind).parameters
    return _make("objective", name, OBJECTIVES, {k: v for k, v in given.items() if k in taken} | options)


def estimator(
    name: str | None, loaded: "LoadedModel", terms: Sequence[str], t_min: float = 0.0, seed: int = 0
) -> likelihoods.Estimator:
    """How a model's likelihood is found: by the first that fits it where ``name`` is None.

    ``terms`` are those of §8 that a bound is to hold: all, or the diffusion term from ``t_min`` on as in published
    tables. ``seed`` decides what a random order is.
    """
    found = _estimators(loaded, set(terms) == set(likelihoods.Terms._fields), t_min, seed)
    what = f"estimator, for {loaded.config.model.parameterization} under {loaded.config.noise.process} noise,"
    return _choose(what, name or next(iter(found)), found)


def _estimators(loaded: "LoadedModel", whole: bool, t_min: float, seed: int) -> dict[str, likelihoods.Estimator]:
    process, schedule = loaded.process, loaded.schedule
    if isinstance(loaded.model, parameterizations.Causal):
        return {"forward": likelihoods.LeftToRight()}
    bound = likelihoods.Bound(process, schedule) if whole else likelihoods.Published(process, schedule, t_min)
    if not (isinstance(loaded.model, parameterizations.Mean) and isinstance(process, processes.Absorbing)):
        return {"bound": bound}
    in_order = functools.partial(likelihoods.OneOrder, process)
    return {
        "bound": bound,
        "any-order": likelihoods.AnyOrder(process),
        "forward": in_order(torch.arange),
        "backward": in_order(lambda length: torch.arange(length).flip(0)),
        "random": in_order(lambda length: torch.randperm(length, generator=torch.Generator().manual_seed(seed))),
    }


def recompute(name: str) -> activation_checkpointing.ActivationCheckpointing:
    """What blocks compute again on the way back: ``nothing``, all that is ``cheap``, or whole ``blocks``."""
    return _choose("activation_checkpointing", name, RECOMPUTES)


def sampler(
    name: str | None,
    model: Any,
    process: processes.Process,
    schedule: schedules.Schedule,
    warping: samplers.Warping | None = None,
    **options: Any,
) -> samplers.Sampler:
    """A sampler; None is the best known for the model. ``options`` are its own: ``theta``, ``eta``, ``direction`` …"""
    denoiser = isinstance(model, parameterizations.MeanReader)
    warping = warping or samplers.Warping()
    if isinstance(model, parameterizations.Causal):
        if name is not None or options:
            raise ValueError("the model is autoregressive and goes from left to right; leave out sampler and options")
        return samplers.LeftToRight(model, process, schedule, warping)
    name = name or default_sampler(model, process)
    if name == "ancestral" and not denoiser:
        raise ValueError(
            "sampler ancestral needs a denoiser (parameterization mean); the model is a score: use tweedie"
        )
    kind = _choose("sampler", name, SAMPLERS)
    own = {f.name: type(f.default) for f in fields(kind) if f.default is not MISSING}
    for option, value in options.items():
        if option not in own:
            raise ValueError(f"sampler {name} has no option {option}; it takes {', '.join(own) or 'none'}")
        if not isinstance(value, (int, float) if own[option] is float else own[option]):
            raise ValueError(f"option {option} of sampler {name} is {value!r}; it must be a {own[option].__name__}")
    used = model if warping.none else samplers.Tempered(model, process, warping)
    return kind(used, process, schedule, **options)


def default_sampler(model: Any, process: processes.Process) -> str:
    """The name of the best known sampler for a model."""
    if isinstance(model, parameterizations.Causal):
        return "left-to-right"
    if not isinstance(model, parameterizations.MeanReader):
        return "tweedie"
    return "first-hitting" if isinstance(process, processes.Absorbing) else "ancestral"


def grid(spec: str, steps: int | None) -> torch.Tensor:
    """Times from 1 down to 0: ``uniform``, ``cosine``, or as in ``1,0.6,0.2,0``; None steps is no grid at all."""
    if steps is None:
        return torch.zeros(0, dtype=torch.float64)
    if "," in spec:
        try:
            return samplers.given_grid([float(word) for word in spec.split(",")])
        except ValueError as error:
            raise ValueError(f"grid is {spec!r}: {error}") from None
    return _choose("grid", spec, GRIDS)(steps)


class Parts(NamedTuple):
    """What a run is made of besides its network."""

    process: processes.Process
    schedule: schedules.Schedule
    objective: objectives.Objective[Any]


def parts(config: RunConfig, vocab_size: int) -> Parts:
    """Process, schedule and objective of a run."""
    noise = process(config.noise.process, vocab_size)
    times = schedule(config.noise.schedule or "log-linear", **config.noise.options)
    options: dict[str, Any] = {k: int(v) if k == "steps" else v for k, v in config.objective_options.items()}
    if config.train.time_sampling != "uniform":  # which is every objective's own; not all have another
        options["time_sampler"] = _choose("train.time_sampling", config.train.time_sampling, CLOCKS)()
    return Parts(noise, times, objective(config.objective, noise, times, **options))


def build_network(config: RunConfig, parts: Parts, labels: int = 0) -> transformers.Transformer:
    """The network of a run on data with so many labels, with fresh weights."""
    m = config.model
    causal = config.objective == "autoregressive"
    states = parts.process.vocab_size + 1 if causal else parts.process.num_states
    return network(
        m.architecture,
        states=states,
        width=m.width,
        depth=m.depth,
        heads=m.heads,
        cond=m.cond_dim,
        dropout=m.dropout,
        timed=config.time_conditioning != "none",
        causal=causal,
        labels=labels,
        generator=torch.Generator().manual_seed(config.seed),
    )


def build_model(config: RunConfig, network: nn.Module, parts: Parts) -> nn.Module:
    """The network, called as a model is."""
    network = parameterizations.Untimed(network) if config.time_conditioning == "zero" else network
    if config.model.parameterization == "causal":
        return parameterizations.Causal(network, parts.process.vocab_size)
    return parameterization(config.model.parameterization or "score", network, parts.process)


class LoadedModel(NamedTuple):
    """A trained model and what belongs to it."""

    model: nn.Module
    network: nn.Module
    process: processes.Process
    schedule: schedules.Schedule
    objective: objectives.Objective[Any]
    tokenizer: tokenizers.Tokenizer
    config: RunConfig
    folder: Path
    labels: tuple[str, ...] = ()
    """What its records may be."""
    label: str | None = None
    """What ``model`` is told that they are; None: nothing."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.network.parameters()).device


def served(network: transformers.Transformer, device: str, precision: str) -> transformers.Transformer:
    """A network to be asked: on a device, its matrices in ``float32`` or ``bfloat16``; the rest stays exact."""
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision is {precision!r}; choose one of float32, bfloat16")
    network = network.to(device).eval().requires_grad_(False)
    for part in network.modules():
        if precision == "bfloat16" and isinstance(part, Linear):
            part.to(torch.bfloat16)
    return network


def replayed(network: nn.Module) -> nn.Module:
    """The network as it is, or on a GPU with recordings of its launches."""
    return Replayed(network) if next(network.parameters()).is_cuda else network


def load(
    folder: Path | str, weights: str = "ema", device: str = "cpu", precision: str | None = "float32"
) -> LoadedModel:
    """A model folder, or the newest whole checkpoint of a run; ``weights`` is ``ema`` or ``model``.

    ``precision`` is that of matrix products, float32 or bfloat16; None: on a GPU that of training.
    """
    path = Path(folder)
    if (path / "checkpoints").is_dir():
        found = checkpoint.newest(path / "checkpoints", lambda text: print(f"sedd: {text}", file=sys.stderr))
        path = found or path
    elif (path / checkpoint.MANIFEST).is_file() and (reason := checkpoint.damage(path)):
        raise ValueError(f"{path} is damaged: {reason}; use another checkpoint")
    if not (path / "config.json").is_file() or not (path / f"{weights}.safetensors").is_file():
        raise ValueError(
            f"{folder} holds no model; give the folder of a run, one of its checkpoints, or what sedd import wrote"
        )
    stored = checkpoint.record(path, "config")
    if not isinstance(stored, dict) or not isinstance(vocab_size := stored.pop("vocab_size", None), int):
        raise ValueError(f"{path / 'config.json'} does not say vocab_size; it is no configuration of a model")
    labels = stored.pop("labels", [])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ValueError(f"{path / 'config.json'} says that labels are {labels!r}; they are a list of names")
    config = RunConfig.from_dict(stored)
    made = parts(config, vocab_size)
    net = build_network(config, made, len(labels))
    try:
        net.load_state_dict(checkpoint.tensors(path, weights))
    except RuntimeError as error:
        raise ValueError(f"{path / weights}.safetensors is not of the model in its config.json: {error}") from None
    half = config.train.precision != "float32" and device.startswith("cuda")  # float8 is for training alone
    net = served(net, device, precision or ("bfloat16" if half else "float32"))
    model = build_model(config, replayed(net), made)
    return LoadedModel(model, net, *made, tokenizers.load_tokenizer(path), config, path, tuple(labels))


def labelled(loaded: LoadedModel, label: str | None) -> LoadedModel:
    """The model that is told ``label``; None: the one that is told nothing, and answers for all records together."""
    if label is None:
        return loaded
    if not loaded.labels:
        raise ValueError(f"label is {label!r}, and the model was trained without labels; leave it out")
    if label not in loaded.labels:
        raise ValueError(f"label is {label!r}; this model knows {', '.join(loaded.labels)}")
    number = torch.tensor(loaded.labels.index(label), device=loaded.device)
    made = Parts(loaded.process, loaded.schedule, loaded.objective)
    model = build_model(loaded.config, replayed(Labelled(loaded.network, number)), made)
    return loaded._replace(model=model, label=label)


def guided(loaded: LoadedModel, label: str | None, guidance: float = 1.0) -> Any:
    """The model of a label, to be sampled: at 0 the one without, at 1 the label's own, beyond it more of the label."""
    if not 0 <= guidance < math.inf:
        raise ValueError(f"guidance is {guidance}; it must be 0 or more, where 1 is the law of the label itself")
    if label is None and guidance != 1:
        raise ValueError(f"guidance is {guidance}, and there is no label to guide to; give one, or leave guidance out")
    told = labelled(loaded, label)
    if guidance in (0, 1):
        return (told if guidance else loaded).model
    if isinstance(told.model, parameterizations.Causal):
        raise ValueError("guidance mixes scores, and an autoregressive model has none; leave it out")
    return samplers.guided(loaded.model, told.model, loaded.process, guidance)  # type: ignore[arg-type]


def _choose(what: str, name: str, choices: Mapping[str, T]) -> T:
    if name not in choices:
        raise ValueError(f"{what} is {name!r}; choose one of {', '.join(choices)}")
    return choices[name]


def _make(what: str, name: str, choices: Mapping[str, type[T]], options: Mapping[str, Any]) -> T:
    kind = _choose(what, name, choices)
    parameters = inspect.signature(kind).parameters
    if unknown := [option for option in options if option not in parameters]:
        raise ValueError(
            f"{what} {name} has no option {', '.join(unknown)}; it takes {', '.join(parameters) or 'none'}"
        )
    required = [n for n, p in parameters.items() if p.default is p.empty]
    if missing := [option for option in required if option not in options]:
        raise ValueError(f"{what} {name} needs {', '.join(missing)}, which was not given")
    return kind(**options)
