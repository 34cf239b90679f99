"""The published checkpoint layouts: SEDD, RADD and MDLM, their weight names and their configurations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, final

from sedd.schema import is_of_type
from sedd.training.config import DataConfig, ModelConfig, NoiseConfig, RunConfig

ROTARY = "rotary_emb.inv_freq"
PROCESSES = {"absorb": "absorbing", "uniform": "uniform"}
SCHEDULES = {"loglinear": "log-linear", "geometric": "geometric"}
RADD_LOSSES = {"lambda_DCE": "lambda-dce", "t_DCE": "t-dce"}
"""Losses of RADD. They are equal in expectation, and the network does not depend on time under either."""
EPS = 1e-3  # parameter of the log-linear schedule in all published code
SIZE_PATHS = {
    "width": ("model.hidden_size", "hidden_dim"),
    "depth": ("model.n_blocks", "n_blocks"),
    "heads": ("model.n_heads", "n_heads"),
    "cond_dim": ("model.cond_dim", "cond_dim"),
    "seq_len": ("model.length", "model_length"),
    "dropout": ("model.dropout", "dropout"),
}
"""Where the nested configuration of a run and the flat one of the Hub have our settings of a network."""
Config = Mapping[str, Any]
T = TypeVar("T")


class WeightSizes(NamedTuple):
    """Sizes of a network, measured from the shapes of its weights."""

    num_states: int
    width: int
    depth: int
    heads: int
    cond_dim: int | None  # None for a network without a noise-level embedding


@final
@dataclass(frozen=True)
class CheckpointLayout:
    """A published format and the models that it describes."""

    name: str
    parameterization: str
    processes: Mapping[str, str]  # its names of noise processes, and ours
    time_conditioning: tuple[str, ...]
    dropout: float  # what its code takes where the configuration has none
    prefix: str = ""  # of the names of weights

    def fits(self, run: RunConfig) -> bool:
        """Return whether a model with the reference network can be written in this layout."""
        noise = run.noise
        return (
            run.model.parameterization == self.parameterization
            and noise.process in self.processes.values()
            and run.time_conditioning in self.time_conditioning
            # a configuration of MDLM has no schedule
            and (self is not MDLM or (noise.schedule, noise.options.get("eps", EPS)) == ("log-linear", EPS))
        )

    def parse_config(self, config: Config, sizes: WeightSizes) -> tuple[RunConfig, int]:
        """Return the run that a published configuration describes, and its vocabulary size."""
        process = _choice(config, "graph.type", self.processes, None if self is SEDD else "absorb")
        absorbing = process == "absorbing"
        if self is RADD:
            objective, conditioning = _choice(config, "training.loss_type", RADD_LOSSES, "lambda_DCE"), "none"
        elif self is MDLM:
            _choice(config, "parameterization", {"subs": "mean"}, "subs")
            objective = "t-dce"
            conditioning = "sigma" if _value(config, "time_conditioning", bool, False) else "zero"
        else:
            objective, conditioning = "score-entropy", None
            if (scaled := _value(config, "model.scale_by_sigma", bool, absorbing)) != absorbing:
                rule = "a published score is scaled by σ under absorbing noise alone"
                raise ValueError(f"model.scale_by_sigma is {scaled} and graph.type {process}: {rule}")
        options = {"parameterization": self.parameterization, "time_conditioning": conditioning}
        run = RunConfig(
            data=DataConfig(tokenizer="gpt2"),
            noise=NoiseConfig(process, *_schedule(config)),
            model=_model_config(config, sizes, self.dropout, **options),
            objective=objective,
        )
        vocab_size = sizes.num_states - absorbing  # the mask has the last row of the embedding
        tokens = _value(config, "tokens", int, _value(config, "vocab_size", int, sizes.num_states) - absorbing)
        if tokens != vocab_size:
            raise ValueError(f"the configuration has {tokens} tokens and the embedding {sizes.num_states} rows")
        return run.resolved(), vocab_size

    def write_config(self, run: RunConfig, vocab_size: int) -> dict[str, Any]:
        """Return the published configuration of a run: nested, or flat for MDLM."""
        nested = self is not MDLM
        sizes = {paths[not nested].removeprefix("model."): getattr(run.model, n) for n, paths in SIZE_PATHS.items()}
        if not nested:
            conditioned = run.time_conditioning == "sigma"
            return {"model_type": "mdlm", "vocab_size": vocab_size + 1, **sizes, "time_conditioning": conditioned}
        noise = run.noise
        published = {name: kind for kind, name in SCHEDULES.items()}
        if noise.schedule not in published:
            raise ValueError(f"the schedule is {noise.schedule}; published models have {' or '.join(published)}")
        ends = {"sigma_min": noise.options.get("lo", 1e-4), "sigma_max": noise.options.get("hi", 20.0)}
        eps = {} if (value := noise.options.get("eps", EPS)) == EPS else {"eps": value}
        config = {"tokens": vocab_size, "noise": {"type": published[noise.schedule], **ends, **eps}}
        if self is SEDD:
            absorbing = noise.process == "absorbing"
            graph = {"type": "absorb" if absorbing else "uniform"}
            return {**config, "model": {**sizes, "scale_by_sigma": absorbing}, "graph": graph}
        loss = [name for name, objective in RADD_LOSSES.items() if objective == run.objective]
        training = {"training": {"loss_type": loss[0]}} if loss else {}
        return {**config, "model": {**sizes, "use_checkpoint": False, "dtype": "float32"}, **training}


MASK = {"absorb": "absorbing"}
SEDD = CheckpointLayout("sedd", "score", PROCESSES, ("sigma",), 0.1)
"""A score: log s = output − ln(e^σ − 1) − ln(D − 1) under absorbing noise, and the output itself under uniform noise.

Lou et al. 2024, "Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution", arXiv 2310.16834.
"""
RADD = CheckpointLayout("radd", "mean", MASK, ("none",), 0.02)
"""A denoiser whose network does not depend on the noise level.

Ou et al. 2024, "Your Absorbing Discrete Diffusion Secretly Models the Conditional Distributions of Clean Data",
arXiv 2406.03736.
"""
MDLM = CheckpointLayout("mdlm", "mean", MASK, ("sigma", "zero"), 0.1, "backbone.")
"""A denoiser with SEDD's network, which receives σ = 0 unless time conditioning is on.

Sahoo et al. 2024, "Simple and Effective Masked Diffusion Language Models", arXiv 2406.07524.
"""
LAYOUTS: Mapping[str, CheckpointLayout] = {layout.name: layout for layout in (SEDD, RADD, MDLM)}


def detect_layout(state: Mapping[str, Any]) -> CheckpointLayout:
    """Return the layout that the names of weights belong to."""
    names = [str(name) for name in state]
    if any(name.startswith(MDLM.prefix) for name in names):
        return MDLM
    if any(name.startswith("sigma_map.") or "adaLN_modulation" in name for name in names):
        return SEDD
    if any(name.startswith("blocks.") for name in names):
        return RADD
    shown = ", ".join(names[:4])
    raise ValueError(f"the weights are called {shown} …, as in no layout of {', '.join(LAYOUTS)}; import one of these")


def choose_layout(run: RunConfig, name: str | None) -> CheckpointLayout:
    """Return the layout called ``name``, or by default the first that fits the model."""
    if name is not None and name not in LAYOUTS:
        raise ValueError(f"format is {name!r}; choose one of {', '.join(LAYOUTS)}")
    is_reference = run.model.architecture == "reference" and not run.network
    fitting = [layout for layout in LAYOUTS.values() if is_reference and layout.fits(run)]
    chosen = [layout for layout in fitting if name in (None, layout.name)]
    if not chosen:
        advice = f"its format is {fitting[0].name}" if fitting else "no published format has such models"
        network = "network of your own" if run.network else f"{run.model.architecture} network"
        noise = f"{run.noise.process} noise, schedule {run.noise.schedule}, time conditioning {run.time_conditioning}"
        described = f"a {network} with parameterization {run.model.parameterization}, {noise}"
        raise ValueError(f"{described} cannot be written as a {name or 'published'} model; {advice}")
    return chosen[0]


def _lookup(config: Config, path: str) -> Any:
    """Return the value at a dotted path such as ``model.length``, or None."""
    found: Any = config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _value(config: Config, path: str, kind: type[T], default: T) -> T:
    """Return the value at a path, which must be of this type, or the default."""
    if (found := _lookup(config, path)) is None:
        return default
    if not is_of_type(found, kind):
        raise ValueError(f"in the configuration {path} is {found!r}; it must be a {kind.__name__}")
    return kind(found)  # type: ignore[call-arg]


def _choice(config: Config, path: str, choices: Mapping[str, str], default: str | None = None) -> str:
    """Return our name for the value at a path, which must be one of ``choices``."""
    found = default if (stated := _lookup(config, path)) is None else stated
    if not isinstance(found, str) or found not in choices:
        given = f"in the configuration {path} is {found!r}"
        missing = f"the configuration has no {path}; is config.json, or .hydra/config.yaml of a training run, missing?"
        raise ValueError(f"{missing if found is None else given}: it must be one of {', '.join(choices)}")
    return choices[found]


def _schedule(config: Config) -> tuple[str, dict[str, float]]:
    schedule = _choice(config, "noise.type", SCHEDULES, "loglinear")
    if schedule == "log-linear":
        return schedule, {"eps": _value(config, "noise.eps", float, EPS)}
    ends = {"lo": ("noise.sigma_min", 1e-4), "hi": ("noise.sigma_max", 20.0)}
    return schedule, {option: _value(config, path, float, default) for option, (path, default) in ends.items()}


def _model_config(config: Config, sizes: WeightSizes, dropout: float, **options: Any) -> ModelConfig:
    """Return the network's configuration; sizes in the configuration must agree with those of the weights."""
    measured = sizes._asdict() | {"cond_dim": sizes.cond_dim or 128, "seq_len": 1024, "dropout": dropout}
    found = {}
    for name, paths in SIZE_PATHS.items():
        value = measured[name]
        for path in paths:
            value = _value(config, path, type(value), value)
        # the check of the weights names those that are missing or unknown if the depth is slightly different
        is_close = name == "depth" and 0 < value < 2 * sizes.depth + 2
        if name in sizes._fields and getattr(sizes, name) not in (value, None) and not is_close:
            raise ValueError(f"in the configuration {' or '.join(paths)} is {value}; the weights have {measured[name]}")
        found[name] = value
    return ModelConfig(architecture="reference", **found, **options)
