"""Every option of a run, as dataclasses that check themselves. No torch here."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

NEEDS = {  # which parameterization an objective trains, where it is not free to choose
    "ratio-matching": "conditional",
    "mean": "mean",
    "d3pm": "mean",
    "t-dce": "mean",
    "lambda-dce": "mean",
    "any-order": "mean",
    "autoregressive": "causal",
}
TIME_FREE = ("lambda-dce", "any-order", "autoregressive")
"""Objectives whose network is told no noise level."""


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")


def _at_least(name: str, value: int | float, least: int) -> None:
    if not value >= least:
        raise ValueError(f"{name} is {value}; it must be {least} or more")


def _above_zero(name: str, value: int | float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be above 0")


@dataclass
class DataConfig:
    """What to train on."""

    sources: list[str] = field(default_factory=list)
    tokenizer: str = "bytes"
    packing: str = "packed"
    """packed: one stream cut into blocks. lines: one record a line, padded to the model's length."""
    pad: str = "model"
    """For lines. model: padding is a token, in the loss. ignore: it is out of noise, loss, attention and counts."""
    column: str | None = None
    label: str | None = None
    """The column of a table that says what each record is; for lines."""
    label_dropout: float = 0.1
    """The share of rows whose label is hidden in training, so that the law of all of them is learned too."""
    val_fraction: float = 0.05

    def __post_init__(self) -> None:
        _choice("data.packing", self.packing, ("packed", "lines"))
        _choice("data.pad", self.pad, ("model", "ignore"))
        if self.label is not None and self.packing == "packed":
            raise ValueError(
                f"data.label is {self.label!r}, and packed text has no records to be labelled; set data.packing=lines"
            )
        if not 0 <= self.label_dropout < 1:
            raise ValueError(f"data.label_dropout is {self.label_dropout}; it is a share and must lie in [0, 1)")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction is {self.val_fraction}; it is a share and must lie between 0 and 1")


@dataclass
class NoiseConfig:
    """What noise does, and when."""

    process: str = "absorbing"
    schedule: str | None = None
    """By default log-linear; geometric for a denoiser under uniform noise, whose bound else is infinite."""
    options: dict[str, float] = field(default_factory=dict)
    """Of the schedule: eps, lo, hi, power."""

    def __post_init__(self) -> None:
        _choice("noise.process", self.process, ("absorbing", "uniform"))


@dataclass
class ModelConfig:
    """The network."""

    architecture: str = "modern"
    width: int = 256
    depth: int = 6
    heads: int = 4
    cond_dim: int = 128
    dropout: float = 0.0
    seq_len: int = 256
    parameterization: str | None = None
    """score or mean; by default what the objective needs, else score."""
    time_conditioning: str | None = None
    """What the network hears of the noise: sigma, zero whatever it is, or nothing; see `RunConfig.time_conditioning`."""

    def __post_init__(self) -> None:
        _choice("model.architecture", self.architecture, ("modern", "reference"))
        for name in ("width", "depth", "heads", "seq_len", "cond_dim"):
            _at_least(f"model.{name}", getattr(self, name), 1)
        if self.parameterization is not None:
            _choice("model.parameterization", self.parameterization, ("score", "mean", "conditional", "causal"))
        if self.time_conditioning is not None:
            _choice("model.time_conditioning", self.time_conditioning, ("sigma", "zero", "none"))


@dataclass
class OptimConfig:
    """How weights move."""

    name: str = "adamw"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.0
    warmup_steps: int = 100
    """Steps over which the learning rate rises from 0."""
    lr_schedule: str = "cosine"
    final_lr_fraction: float = 0.1
    """The share of the learning rate that is left at the end."""
    grad_clip: float = 1.0
    ema_decay: float = 0.999

    def __post_init__(self) -> None:
        _choice("optim.name", self.name, ("adamw", "muon"))
        _choice("optim.lr_schedule", self.lr_schedule, ("constant", "linear", "cosine"))
        _above_zero("optim.lr", self.lr)
        _above_zero("optim.grad_clip", self.grad_clip)
        _at_least("optim.warmup_steps", self.warmup_steps, 0)
        for name in ("beta1", "beta2", "ema_decay", "final_lr_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optim.{name} is {getattr(self, name)}; it must lie in [0, 1]")


@dataclass
class BudgetConfig:
    """When to stop: at the first of these that is reached."""

    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "minutes"):
            if (value := getattr(self, name)) is not None:
                _above_zero(f"budget.{name}", value)


@dataclass
class TrainConfig:
    """How a step is made, and what happens every so often; 0 turns an occasion off."""

    batch_size: int = 64
    """Sequences a step, over all processes."""
    grad_accumulation: int = 1
    """Equal parts into which each process cuts its share, to save memory."""
    time_sampling: str = "uniform"
    """At which times a step looks. even: all alike. early: t = u², weighed back; for objectives over time."""
    precision: str = "float32"
    """Of the trunk's matrix products: float32, bfloat16, or float8 where that is worth it and bfloat16 elsewhere."""
    compile: bool = False
    """Whether torch compiles the network; kernels of our own, which a GPU has, are as fast without."""
    cuda_graphs: bool = True
    """Whether a single GPU replays the launches of blocks, if they are neither compiled nor recomputed."""
    activation_checkpointing: str = "none"
    """What is computed again on the way back, to hold less: nothing, all but matrix products (cheap), or blocks."""
    deterministic: bool = False
    """Whether a GPU computes the same bits every time, as a CPU does; attention is slower for it."""
    fsdp: bool = False
    log_every: int = 10
    eval_every: int = 250
    eval_sequences: int = 256
    save_every: int = 500
    keep_checkpoints: int = 3
    sample_every: int = 0
    on_nonfinite: str = "stop"
    max_skips: int = 10

    def __post_init__(self) -> None:
        _choice("train.precision", self.precision, ("float32", "bfloat16", "float8"))
        _choice("train.time_sampling", self.time_sampling, ("uniform", "low-noise"))
        _choice("train.activation_checkpointing", self.activation_checkpointing, ("none", "selective", "full"))
        _choice("train.on_nonfinite", self.on_nonfinite, ("stop", "skip"))
        for name in ("batch_size", "grad_accumulation", "log_every", "keep_checkpoints", "eval_sequences"):
            _at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("eval_every", "save_every", "sample_every", "max_skips"):
            _at_least(f"train.{name}", getattr(self, name), 0)


@dataclass
class RunConfig:
    """Everything that decides what a run computes."""

    data: DataConfig = field(default_factory=DataConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    objective: str = "score-entropy"
    objective_options: dict[str, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def time_conditioning(self) -> str:
        """What the network hears of the noise: what was chosen, else sigma where the objective has times."""
        return self.model.time_conditioning or ("none" if self.objective in TIME_FREE else "sigma")

    def resolved(self) -> "RunConfig":
        """This, with what was left open decided and what contradicts refused."""
        needs = NEEDS.get(self.objective)
        self.model.parameterization = self.model.parameterization or needs or "score"
        if needs and self.model.parameterization != needs:
            raise ValueError(
                f"objective {self.objective} trains parameterization {needs}; model.parameterization is "
                f"{self.model.parameterization}: leave it out, or choose another objective"
            )
        if self.objective in TIME_FREE and self.time_conditioning == "sigma":
            raise ValueError(
                f"objective {self.objective} has no noise level to tell; leave model.time_conditioning out"
            )
        if self.noise.schedule is None:
            denoiser = self.noise.process == "uniform" and self.model.parameterization == "mean"
            self.noise.schedule = "geometric" if denoiser else "log-linear"
        if self.budget.steps is self.budget.tokens is self.budget.minutes is None:
            self.budget.steps = 1000
        return self

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as stored beside the weights."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RunConfig":
        """The run that `as_dict` wrote."""
        parts = {
            "data": DataConfig,
            "noise": NoiseConfig,
            "model": ModelConfig,
            "optim": OptimConfig,
            "budget": BudgetConfig,
            "train": TrainConfig,
        }
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"the configuration has {', '.join(unknown)}; it may have {', '.join(sorted(known))}")
        try:
            return cls(**{name: parts[name](**value) if name in parts else value for name, value in data.items()})
        except TypeError as error:
            raise ValueError(f"the configuration does not fit: {error}") from None
