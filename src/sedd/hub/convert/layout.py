"""The published checkpoint layouts: SEDD, RADD and MDLM, their weight names and their configurations."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, final

from sedd.training.config import DataConfig, ModelConfig, NoiseConfig, RunConfig

ROTARY = "rotary_emb.inv_freq"
PROCESSES = {"absorb": "absorbing", "uniform": "uniform"}
SCHEDULES = {"loglinear": "log-linear", "geometric": "geometric"}
RADD_LOSSES = {"lambda_DCE": "lambda-dce", "t_DCE": "t-dce"}
"""Losses of RADD. They are equal in expectation, and the network does not depend on time under either."""
EPS = 1e-3
"""Parameter of the log-linear schedule in all published code."""
Config = Mapping[str, Any]
T = TypeVar("T")


class WeightSizes(NamedTuple):
    """Sizes of a network, measured from the shapes of its weights."""

    num_states: int
    width: int
    depth: int
    heads: int
    cond_dim: int | None
    """None for a network without a noise-level embedding."""


class CheckpointLayout(ABC):
    """A published format: names of weights and of configuration keys."""

    name: str
    prefix: str = ""
    """Prefix of the names of weights."""

    @abstractmethod
    def fits(self, run: RunConfig) -> bool:
        """Return whether a model with the reference network can be written in this layout."""

    @abstractmethod
    def parse_config(self, config: Config, sizes: WeightSizes) -> tuple[RunConfig, int]:
        """Return the run that a published configuration describes, and its vocabulary size."""

    @abstractmethod
    def write_config(self, run: RunConfig, vocab_size: int) -> dict[str, Any]:
        """Return the published configuration that describes a run."""


@final
class SeddLayout(CheckpointLayout):
    """SEDD: a score conditioned on σ.

    log s = output − ln(e^σ − 1) − ln(D − 1) under absorbing noise, and the output itself under uniform noise.

    Reference: Lou et al. 2024, "Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution",
    arXiv 2310.16834.
    """

    name = "sedd"

    def fits(self, run: RunConfig) -> bool:
        """Return whether the model is a score conditioned on σ, under absorbing or uniform noise."""
        known = run.noise.process in PROCESSES.values()
        return known and run.model.parameterization == "score" and run.time_conditioning == "sigma"

    def parse_config(self, config: Config, sizes: WeightSizes) -> tuple[RunConfig, int]:
        """Parse ``tokens``, ``graph``, ``noise`` and ``model``."""
        process = _choice(config, "graph.type", PROCESSES)
        scaled = _value(config, "model.scale_by_sigma", bool, process == "absorbing")
        if scaled != (process == "absorbing"):
            raise ValueError(
                f"model.scale_by_sigma is {scaled} and graph.type {process}: a published score is scaled by σ under "
                "absorbing noise, and there alone"
            )
        noise = NoiseConfig(process, *_schedule(config))
        model = _model_config(config, sizes, parameterization="score", dropout=0.1)
        return _run_config(noise, model, "score-entropy"), _vocab_size(config, sizes, has_mask=process == "absorbing")

    def write_config(self, run: RunConfig, vocab_size: int) -> dict[str, Any]:
        """Return the nested configuration of a run of SEDD's code."""
        absorbing = run.noise.process == "absorbing"
        nested = _nested_config(run, vocab_size)
        nested["model"] |= {"scale_by_sigma": absorbing}
        return nested | {"graph": {"type": "absorb" if absorbing else "uniform"}}


@final
class RaddLayout(CheckpointLayout):
    """RADD: a denoiser under absorbing noise whose network does not depend on the noise level.

    Reference: Ou et al. 2024, "Your Absorbing Discrete Diffusion Secretly Models the Conditional Distributions of Clean
    Data", arXiv 2406.03736.
    """

    name = "radd"

    def fits(self, run: RunConfig) -> bool:
        """Return whether the model is a denoiser under absorbing noise without noise-level conditioning."""
        return _is_mask_denoiser(run) and run.time_conditioning == "none"

    def parse_config(self, config: Config, sizes: WeightSizes) -> tuple[RunConfig, int]:
        """Parse ``tokens``, ``noise``, ``model`` and ``training.loss_type``."""
        _choice(config, "graph.type", {"absorb": "absorbing"}, "absorb")
        noise = NoiseConfig("absorbing", *_schedule(config))
        model = _model_config(config, sizes, parameterization="mean", dropout=0.02, time_conditioning="none")
        objective = _choice(config, "training.loss_type", RADD_LOSSES, "lambda_DCE")
        return _run_config(noise, model, objective), _vocab_size(config, sizes, has_mask=True)

    def write_config(self, run: RunConfig, vocab_size: int) -> dict[str, Any]:
        """Return the nested configuration of a run of RADD's code, with the keys it requires."""
        nested = _nested_config(run, vocab_size)
        nested["model"] |= {"use_checkpoint": False, "dtype": "float32"}
        loss = [name for name, objective in RADD_LOSSES.items() if objective == run.objective]
        return nested | ({"training": {"loss_type": loss[0]}} if loss else {})


@final
class MdlmLayout(CheckpointLayout):
    """MDLM: a denoiser under absorbing noise with SEDD's network, which receives σ = 0 unless time conditioning is on.

    Reference: Sahoo et al. 2024, "Simple and Effective Masked Diffusion Language Models", arXiv 2406.07524.
    """

    name = "mdlm"
    prefix = "backbone."

    def fits(self, run: RunConfig) -> bool:
        """Return whether the model is a denoiser under absorbing noise with a noise-level embedding.

        The layout has no schedule option: only the log-linear schedule with the published ε fits.
        """
        published_schedule = run.noise.schedule == "log-linear" and run.noise.options.get("eps", EPS) == EPS
        return _is_mask_denoiser(run) and run.time_conditioning != "none" and published_schedule

    def parse_config(self, config: Config, sizes: WeightSizes) -> tuple[RunConfig, int]:
        """Parse the flat configuration of the Hub or the nested one of a run; both may be missing."""
        _choice(config, "parameterization", {"subs": "mean"}, "subs")
        conditioning = "sigma" if _value(config, "time_conditioning", bool, False) else "zero"
        noise = NoiseConfig("absorbing", *_schedule(config))
        model = _model_config(config, sizes, parameterization="mean", dropout=0.1, time_conditioning=conditioning)
        return _run_config(noise, model, "t-dce"), _vocab_size(config, sizes, has_mask=True)

    def write_config(self, run: RunConfig, vocab_size: int) -> dict[str, Any]:
        """Return the flat configuration of the Hub."""
        model = run.model
        return {
            "model_type": "mdlm",
            "vocab_size": vocab_size + 1,
            "model_length": model.seq_len,
            "hidden_dim": model.width,
            "cond_dim": model.cond_dim,
            "n_blocks": model.depth,
            "n_heads": model.heads,
            "dropout": model.dropout,
            "time_conditioning": run.time_conditioning == "sigma",
        }


SEDD, RADD, MDLM = SeddLayout(), RaddLayout(), MdlmLayout()
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
    raise ValueError(
        f"the weights are called {', '.join(names[:4])} …, as in no layout of {', '.join(LAYOUTS)}; only these can be "
        "imported"
    )


def choose_layout(run: RunConfig, name: str | None) -> CheckpointLayout:
    """Return the layout called ``name``, or by default the first that fits the model."""
    if name is not None and name not in LAYOUTS:
        raise ValueError(f"format is {name!r}; choose one of {', '.join(LAYOUTS)}")
    is_reference = run.model.architecture == "reference" and not run.network
    fitting = [layout for layout in LAYOUTS.values() if is_reference and layout.fits(run)]
    chosen = [layout for layout in fitting if name in (None, layout.name)]
    if not chosen:
        model, noise = run.model, run.noise
        advice = f"its format is {fitting[0].name}" if fitting else "no published format has such models"
        network = "network of your own" if run.network else f"{model.architecture} network"
        raise ValueError(
            f"a {network} with parameterization {model.parameterization}, {noise.process} noise, "
            f"schedule {noise.schedule} and time conditioning {run.time_conditioning} cannot be written as a "
            f"{name or 'published'} model; {advice}"
        )
    return chosen[0]


# Configurations --------------------------------------------------------------------------------------------


def _is_mask_denoiser(run: RunConfig) -> bool:
    return run.model.parameterization == "mean" and run.noise.process == "absorbing"


def _run_config(noise: NoiseConfig, model: ModelConfig, objective: str) -> RunConfig:
    return RunConfig(data=DataConfig(tokenizer="gpt2"), noise=noise, model=model, objective=objective).resolved()


def _lookup(config: Config, path: str) -> Any:
    """Return the value at a dotted path such as ``model.length``, or None."""
    found: Any = config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _value(config: Config, path: str, kind: type[T], default: T) -> T:
    """Return the value at a path, which must be of this type, or the default."""
    found = _lookup(config, path)
    if found is None:
        return default
    fits = isinstance(found, (int, float) if kind is float else kind)
    if not fits or (isinstance(found, bool) and kind is not bool):
        raise ValueError(f"in the configuration {path} is {found!r}; it must be a {kind.__name__}")
    return kind(found)  # type: ignore[call-arg]


def _choice(config: Config, path: str, choices: Mapping[str, str], default: str | None = None) -> str:
    """Return our name for the value at a path, which must be one of ``choices``."""
    found = _lookup(config, path)
    found = default if found is None else found
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


SIZE_PATHS = {
    "width": ("model.hidden_size", "hidden_dim"),
    "depth": ("model.n_blocks", "n_blocks"),
    "heads": ("model.n_heads", "n_heads"),
    "cond_dim": ("model.cond_dim", "cond_dim"),
    "length": ("model.length", "model_length"),
}
"""Paths of sizes in the nested configuration of a run and in the flat one of the Hub."""


def _size(config: Config, name: str, default: int) -> int:
    for path in SIZE_PATHS[name]:
        default = _value(config, path, int, default)
    return default


def _model_config(config: Config, sizes: WeightSizes, **options: Any) -> ModelConfig:
    """Return the network's configuration; sizes in the configuration must agree with those of the weights."""
    for name in ("width", "heads", *([] if sizes.cond_dim is None else ["cond_dim"])):
        measured = getattr(sizes, name)
        if (configured := _size(config, name, measured)) != measured:
            raise ValueError(
                f"in the configuration {' or '.join(SIZE_PATHS[name])} is {configured}; the weights have {measured}"
            )
    depth = _size(config, "depth", sizes.depth)
    # a slightly different depth passes here: the check of the weights names those that are missing or unknown
    if not 0 < depth < 2 * sizes.depth + 2:
        raise ValueError(f"in the configuration {SIZE_PATHS['depth'][0]} is {depth}; the weights have {sizes.depth}")
    options["dropout"] = _value(config, "dropout", float, _value(config, "model.dropout", float, options["dropout"]))
    return ModelConfig(
        architecture="reference",
        width=sizes.width,
        depth=depth,
        heads=sizes.heads,
        cond_dim=sizes.cond_dim or _size(config, "cond_dim", 128),
        seq_len=_size(config, "length", 1024),
        **options,
    )


def _vocab_size(config: Config, sizes: WeightSizes, has_mask: bool) -> int:
    """Return the number of tokens without the mask, which has the last row of the embedding."""
    vocab_size = sizes.num_states - has_mask
    configured = _value(config, "tokens", int, _value(config, "vocab_size", int, sizes.num_states) - has_mask)
    if configured != vocab_size:
        raise ValueError(
            f"in the configuration there are {configured} tokens; the embedding has {sizes.num_states} rows"
        )
    return vocab_size


def _nested_config(run: RunConfig, vocab_size: int) -> dict[str, Any]:
    """Return the keys that the configurations of SEDD and RADD share."""
    model, schedule, options = run.model, run.noise.schedule, run.noise.options
    kind = [published for published, name in SCHEDULES.items() if name == schedule]
    if not kind:
        raise ValueError(f"the schedule is {schedule}; published models have {' or '.join(SCHEDULES.values())}")
    ends = {"sigma_min": options.get("lo", 1e-4), "sigma_max": options.get("hi", 20.0)}
    eps = {} if (value := options.get("eps", EPS)) == EPS else {"eps": value}
    return {
        "tokens": vocab_size,
        "noise": {"type": kind[0], **ends, **eps},
        "model": {
            "hidden_size": model.width,
            "cond_dim": model.cond_dim,
            "length": model.seq_len,
            "n_blocks": model.depth,
            "n_heads": model.heads,
            "dropout": model.dropout,
        },
    }
