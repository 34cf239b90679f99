"""The three published layouts: what their names and configurations say of a model, and how a model is said in them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, final

from sedd.config import DataConfig, ModelConfig, NoiseConfig, RunConfig

ROTARY = "rotary_emb.inv_freq"
PROCESSES = {"absorb": "absorbing", "uniform": "uniform"}
SCHEDULES = {"loglinear": "log-linear", "geometric": "geometric"}
LOSSES = {"lambda_DCE": "lambda-dce", "t_DCE": "t-dce"}
"""Of RADD. They are equal in the mean, and the network is free of time under both."""
EPS = 1e-3
"""Of the log-linear schedule, in all published code."""
Config = Mapping[str, Any]
T = TypeVar("T")


class Sizes(NamedTuple):
    """What the shapes of weights say."""

    states: int
    width: int
    depth: int
    heads: int
    cond: int | None


class Layout(ABC):
    """Names of weights and of options."""

    name: str
    prefix: str = ""
    """What stands before the names of weights."""

    @abstractmethod
    def fits(self, run: RunConfig) -> bool:
        """Whether a model of the reference network can be said in this layout."""

    @abstractmethod
    def understood(self, config: Config, sizes: Sizes) -> tuple[RunConfig, int]:
        """The model that a configuration describes, and its vocabulary."""

    @abstractmethod
    def described(self, run: RunConfig, vocab_size: int) -> dict[str, Any]:
        """The configuration that describes a model."""


@final
class Sedd(Layout):
    """A score, told σ: ``output − ln(e^σ − 1) − ln(D − 1)`` under absorbing noise, the output itself under uniform."""

    name = "sedd"

    def fits(self, run: RunConfig) -> bool:
        """A score that hears σ."""
        return run.model.parameterization == "score" and run.time_conditioning == "sigma"

    def understood(self, config: Config, sizes: Sizes) -> tuple[RunConfig, int]:
        """From ``tokens``, ``graph``, ``noise`` and ``model``."""
        process = _chosen(config, "graph.type", PROCESSES)
        scaled = _given(config, "model.scale_by_sigma", bool, process == "absorbing")
        if scaled != (process == "absorbing"):
            raise ValueError(
                f"model.scale_by_sigma is {scaled} and graph.type {process}: a published score is scaled by σ under "
                "absorbing noise, and there alone"
            )
        noise = NoiseConfig(process, *_schedule(config))
        model = _model(config, sizes, parameterization="score", dropout=0.1)
        return _run(noise, model, "score-entropy"), _tokens(config, sizes, masks=process == "absorbing")

    def described(self, run: RunConfig, vocab_size: int) -> dict[str, Any]:
        """As the nested configuration of a run."""
        masks = run.noise.process == "absorbing"
        nested = _nested(run, vocab_size)
        nested["model"] |= {"scale_by_sigma": masks}
        return nested | {"graph": {"type": "absorb" if masks else "uniform"}}


@final
class Radd(Layout):
    """A denoiser under absorbing noise whose network hears nothing of the noise."""

    name = "radd"

    def fits(self, run: RunConfig) -> bool:
        """A denoiser of masks, free of time."""
        return _denoises_masks(run) and run.time_conditioning == "none"

    def understood(self, config: Config, sizes: Sizes) -> tuple[RunConfig, int]:
        """From ``tokens``, ``noise``, ``model`` and the loss that was trained."""
        _chosen(config, "graph.type", {"absorb": "absorbing"}, "absorb")
        noise = NoiseConfig("absorbing", *_schedule(config))
        model = _model(config, sizes, parameterization="mean", dropout=0.02, time_conditioning="none")
        objective = _chosen(config, "training.loss_type", LOSSES, "lambda_DCE")
        return _run(noise, model, objective), _tokens(config, sizes, masks=True)

    def described(self, run: RunConfig, vocab_size: int) -> dict[str, Any]:
        """As the nested configuration of a run, with what its code asks for."""
        nested = _nested(run, vocab_size)
        nested["model"] |= {"use_checkpoint": False, "dtype": "float32"}
        loss = [name for name, objective in LOSSES.items() if objective == run.objective]
        return nested | ({"training": {"loss_type": loss[0]}} if loss else {})


@final
class Mdlm(Layout):
    """A denoiser under absorbing noise with the weights of SEDD's network, which hears 0 for σ unless it is told."""

    name = "mdlm"
    prefix = "backbone."

    def fits(self, run: RunConfig) -> bool:
        """A denoiser of masks with an embedding of σ, whatever that hears; the layout has one schedule."""
        plain = run.noise.schedule == "log-linear" and run.noise.options.get("eps", EPS) == EPS
        return _denoises_masks(run) and run.time_conditioning != "none" and plain

    def understood(self, config: Config, sizes: Sizes) -> tuple[RunConfig, int]:
        """From the flat configuration of the Hub, or the nested one of a run; both may be missing."""
        _chosen(config, "parameterization", {"subs": "mean"}, "subs")
        told = "sigma" if _given(config, "time_conditioning", bool, False) else "zero"
        noise = NoiseConfig("absorbing", *_schedule(config))
        model = _model(config, sizes, parameterization="mean", dropout=0.1, time_conditioning=told)
        return _run(noise, model, "t-dce"), _tokens(config, sizes, masks=True)

    def described(self, run: RunConfig, vocab_size: int) -> dict[str, Any]:
        """As the flat configuration of the Hub."""
        m = run.model
        return {
            "model_type": "mdlm",
            "vocab_size": vocab_size + 1,
            "model_length": m.seq_len,
            "hidden_dim": m.width,
            "cond_dim": m.cond_dim,
            "n_blocks": m.depth,
            "n_heads": m.heads,
            "dropout": m.dropout,
            "time_conditioning": run.time_conditioning == "sigma",
        }


SEDD, RADD, MDLM = Sedd(), Radd(), Mdlm()
LAYOUTS: Mapping[str, Layout] = {layout.name: layout for layout in (SEDD, RADD, MDLM)}


def recognised(names: Mapping[str, Any]) -> Layout:
    """The layout that uses such names."""
    known = [str(name) for name in names]
    if any(name.startswith(MDLM.prefix) for name in known):
        return MDLM
    if any(name.startswith("sigma_map.") or "adaLN_modulation" in name for name in known):
        return SEDD
    if any(name.startswith("blocks.") for name in known):
        return RADD
    raise ValueError(
        f"the weights are called {', '.join(known[:4])} …, which is no layout of {', '.join(LAYOUTS)}; this reads those"
    )


def fitting(run: RunConfig, name: str | None) -> Layout:
    """The layout called ``name``, or the first that can say the model."""
    if name is not None and name not in LAYOUTS:
        raise ValueError(f"format is {name!r}; choose one of {', '.join(LAYOUTS)}")
    able = [layout for layout in LAYOUTS.values() if run.model.architecture == "reference" and layout.fits(run)]
    chosen = [layout for layout in able if name in (None, layout.name)]
    if not chosen:
        instead = f"its format is {able[0].name}" if able else "no published format has such models"
        raise ValueError(
            f"a {run.model.architecture} network with parameterization {run.model.parameterization}, {run.noise.process} "
            f"noise, schedule {run.noise.schedule} and told {run.time_conditioning} is no {name or 'published'} model; {instead}"
        )
    return chosen[0]


# Words of configurations -----------------------------------------------------------------------------------


def _denoises_masks(run: RunConfig) -> bool:
    return run.model.parameterization == "mean" and run.noise.process == "absorbing"


def _run(noise: NoiseConfig, model: ModelConfig, objective: str) -> RunConfig:
    return RunConfig(data=DataConfig(tokenizer="gpt2"), noise=noise, model=model, objective=objective).resolved()


def _look(config: Config, path: str) -> Any:
    """What stands at ``model.length``, or None."""
    found: Any = config
    for word in path.split("."):
        found = found.get(word) if isinstance(found, Mapping) else None
    return found


def _given(config: Config, path: str, kind: type[T], default: T) -> T:
    found = _look(config, path)
    if found is None:
        return default
    fits = isinstance(found, (int, float) if kind is float else kind)
    if not fits or (isinstance(found, bool) and kind is not bool):
        raise ValueError(f"the configuration says {path} is {found!r}; it must be a {kind.__name__}")
    return kind(found)  # type: ignore[call-arg]


def _chosen(config: Config, path: str, choices: Mapping[str, str], default: str | None = None) -> str:
    found = _look(config, path)
    found = default if found is None else found
    if not isinstance(found, str) or found not in choices:
        said = f"says {path} is {found!r}" if found is not None else f"does not say {path}; is config.json missing?"
        raise ValueError(f"the configuration {said}: it must be one of {', '.join(choices)}")
    return choices[found]


def _schedule(config: Config) -> tuple[str, dict[str, float]]:
    schedule = _chosen(config, "noise.type", SCHEDULES, "loglinear")
    if schedule == "log-linear":
        return schedule, {"eps": _given(config, "noise.eps", float, EPS)}
    ends = {"lo": ("noise.sigma_min", 1e-4), "hi": ("noise.sigma_max", 20.0)}
    return schedule, {ours: _given(config, path, float, default) for ours, (path, default) in ends.items()}


PLACES = {
    "width": ("model.hidden_size", "hidden_dim"),
    "depth": ("model.n_blocks", "n_blocks"),
    "heads": ("model.n_heads", "n_heads"),
    "cond": ("model.cond_dim", "cond_dim"),
    "length": ("model.length", "model_length"),
}
"""Where sizes stand: in the nested configuration of a run, and in a flat one."""


def _size(config: Config, name: str, default: int) -> int:
    for path in PLACES[name]:
        default = _given(config, path, int, default)
    return default


def _model(config: Config, sizes: Sizes, **options: Any) -> ModelConfig:
    """The network, of the sizes that the configuration says and the weights have."""
    for name in ("width", "heads", *([] if sizes.cond is None else ["cond"])):
        measured = getattr(sizes, name)
        if (said := _size(config, name, measured)) != measured:
            raise ValueError(
                f"the configuration says {' or '.join(PLACES[name])} is {said}; the weights have {measured}"
            )
    depth = _size(config, "depth", sizes.depth)
    if not 0 < depth < 2 * sizes.depth + 2:  # of fewer that are there, those that lack are named
        raise ValueError(f"the configuration says {PLACES['depth'][0]} is {depth}; the weights have {sizes.depth}")
    options["dropout"] = _given(config, "dropout", float, _given(config, "model.dropout", float, options["dropout"]))
    return ModelConfig(
        architecture="reference",
        width=sizes.width,
        depth=depth,
        heads=sizes.heads,
        cond_dim=sizes.cond or _size(config, "cond", 128),
        seq_len=_size(config, "length", 1024),
        **options,
    )


def _tokens(config: Config, sizes: Sizes, masks: bool) -> int:
    """How many tokens there are, the mask not counted: the embedding has a row for it, the last."""
    tokens = sizes.states - masks
    said = _given(config, "tokens", int, _given(config, "vocab_size", int, sizes.states) - masks)
    if said != tokens:
        raise ValueError(f"the configuration says there are {said} tokens; the embedding has {sizes.states} rows")
    return tokens


def _nested(run: RunConfig, vocab_size: int) -> dict[str, Any]:
    """What SEDD and RADD have in common."""
    m, schedule = run.model, run.noise.schedule
    kind = [name for name, ours in SCHEDULES.items() if ours == schedule]
    if not kind:
        raise ValueError(f"the schedule is {schedule}; published models have {' or '.join(SCHEDULES.values())}")
    said = run.noise.options
    ends = {"sigma_min": said.get("lo", 1e-4), "sigma_max": said.get("hi", 20.0)}
    eps = {} if (found := said.get("eps", EPS)) == EPS else {"eps": found}
    return {
        "tokens": vocab_size,
        "noise": {"type": kind[0], **ends, **eps},
        "model": {
            "hidden_size": m.width,
            "cond_dim": m.cond_dim,
            "length": m.seq_len,
            "n_blocks": m.depth,
            "n_heads": m.heads,
            "dropout": m.dropout,
        },
    }
