"""Every option of a run, as dataclasses that check their values."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, get_type_hints

from sedd.registry import PARAMETERIZATIONS, Registry
from sedd.schema import MAX_COUNT, MAX_SAMPLES, check_choice, check_count, check_seed, from_dict

SCHEDULES = Registry(
    "schedule",
    {"log-linear": "LogLinear", "geometric": "Geometric", "cosine": "Cosine", "polynomial": "Polynomial"},
    "sedd.schedules",
    "sedd.schedule:Schedule",
)
PROCESSES = Registry(
    "process",
    {"absorbing": "Absorbing", "uniform": "Uniform", "hybrid": "Hybrid", "frequency": "Frequency"},
    "sedd.processes",
    "sedd.process:Process",
)
OBJECTIVES = Registry(
    "objective",
    {
        "score-entropy": "DenoisingScoreEntropy",
        "explicit-score-entropy": "sedd.exact.objectives:ExplicitScoreEntropy",
        "implicit-score-entropy": "ImplicitScoreEntropy",
        "concrete-score": "DenoisingConcreteScore",
        "explicit-concrete-score": "sedd.exact.objectives:ExplicitConcreteScore",
        "ratio-matching": "RatioMatching",
        "mean": "MeanCrossEntropy",
        "d3pm": "D3PM",
        "t-dce": "TimeDCE",
        "lambda-dce": "LambdaDCE",
        "any-order": "AnyOrder",
        "softmax-linear": "SoftmaxLinear",
        "autoregressive": "Autoregressive",
    },
    "sedd.objectives",
    "sedd.objectives:Objective",
)
REQUIRED_PARAMETERIZATION = {
    "ratio-matching": "conditional",
    "mean": "mean",
    "d3pm": "mean",
    "t-dce": "mean",
    "lambda-dce": "mean",
    "any-order": "mean",
    "autoregressive": "causal",
}
"""The parameterization that an objective trains, where there is no choice."""
TIME_FREE_OBJECTIVES = ("lambda-dce", "any-order", "autoregressive")
"""Objectives of networks that do not depend on the noise level."""

_ENUMERABLE = "it is for spaces small enough to enumerate, from Python"
NOT_FOR_TRAINING = {
    "explicit-score-entropy": f"{_ENUMERABLE}: it needs the probability of every sequence",
    "explicit-concrete-score": f"{_ENUMERABLE}: it needs the probability of every sequence",
    "implicit-score-entropy": f"{_ENUMERABLE}: it calls the network for every token that could replace another, length "
    "× vocabulary calls for each sequence",
    "softmax-linear": "its minimum is not at the ratios, so training makes the bound worse without limit; it is for "
    "comparison, from Python and in notebooks/score_entropy.ipynb",
}
"""Objectives that no run can have: why, and where they work."""


Rule = Callable[[str, Any], None]  # raises ValueError if an option of this name may not have this value
PRECISIONS = ("float32", "bfloat16")  # of matrix products in inference


def check_label(label: str, labels: Sequence[str]) -> None:
    """Reject a label that a model with these labels does not have."""
    if not labels:
        raise ValueError(f"label is {label!r}, and the model was trained without labels; leave it out")
    if label not in labels:
        raise ValueError(f"label is {label!r}; this model has {', '.join(labels)}")


def one_of(*names: str) -> Rule:
    """Allow these names."""
    return partial(check_choice, allowed=names)


def count(least: int, most: int) -> Rule:
    """Allow a range of integers; a larger one is a mistake, or asks for more memory than machines have."""
    return partial(check_count, least=least, most=most)


def within(interval: str) -> Rule:
    """Allow the numbers of an interval, as in ``[0, 1)``."""
    least, most = map(float, interval[1:-1].split(", "))

    def check(name: str, value: float) -> None:
        is_end = (value == least and interval[0] == "[") or (value == most and interval[-1] == "]")
        if not (least < value < most or is_end):
            raise ValueError(f"{name} is {value}; it must lie in {interval}")

    return check


MAX_STEPS = 10**8 - 1  # the names of checkpoints have eight digits
Interval = Annotated[int, count(0, MAX_STEPS)]
Fraction = Annotated[float, within("[0, 1]")]
NEEDS = {
    "data.label": ("packing", "lines"),
    "noise.mask_share": ("process", "hybrid"),
    "model.ngrams": ("architecture", "modern"),
    "model.embedding_norm": ("architecture", "modern"),
}
"""Options that only apply with one value of another option of their section."""


class _Section:
    """A section of the configuration, whose values are checked against the rules of their annotations."""

    def __post_init__(self) -> None:
        section = type(self).__name__.removesuffix("Config").lower()
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            key, value = f"{section}.{name}", getattr(self, name)
            for rule in getattr(hint, "__metadata__", ()) if value is not None else ():
                rule(key, value)
            if value and (needed := NEEDS.get(key)) and getattr(self, needed[0]) != needed[1]:
                needs = f"{section}.{needed[0]}={needed[1]}"
                raise ValueError(f"{key} is {value!r}; set {needs} too, or leave it out")


@dataclass
class DataConfig(_Section):
    """What to train on."""

    sources: list[str] = field(default_factory=list)
    """Files, folders or hf:NAME to train on, or one folder that sedd data prepare wrote."""
    tokenizer: str = "bytes"
    """bytes, chars, bpe:SIZE (fitted to what is not held out), gpt2, ints, or the path of a tokenizer.json."""
    packing: Annotated[str, one_of("packed", "lines")] = "packed"
    """packed: one stream of tokens, cut into blocks of model.seq_len. lines: one record per line or row, padded."""
    pad: Annotated[str, one_of("model", "ignore")] = "model"
    """Padding of lines. model: a token that is learned. ignore: left out of noise, loss, attention and counts."""
    column: str | None = None
    """Column of a table that holds the text; recognised by its name if left out."""
    encoding: str = "utf-8"
    """Encoding of text files, such as latin-1; tokenizers of bytes and byte-level BPE keep bytes that are not UTF-8."""
    label: str | None = None
    """Column of a table that holds the label of each record; implies data.packing=lines."""
    label_dropout: Annotated[float, within("[0, 1)")] = 0.1
    """Fraction of sequences whose label is dropped in training, which classifier-free guidance needs."""
    val_fraction: Annotated[float, within("(0, 1)")] = 0.05
    """Fraction of the data that is held out for validation, rounded to the nearest number of blocks or records."""

    @property
    def fitted_fraction(self) -> float:
        """The first part of the data, which the tokenizer is fitted to.

        BPE learns frequencies, and twice as much as is held out stays unseen: held-out tokens may be longer than
        others. The other tokenizers only list what occurs, and a character of held-out text needs a token too.
        """
        held_out = self.val_fraction
        return 1 - min(2 * held_out, (1 + held_out) / 2) if self.tokenizer.startswith("bpe:") else 1.0


@dataclass
class NoiseConfig(_Section):
    """The noise process and its schedule."""

    process: Annotated[str, one_of(*PROCESSES.names)] = "absorbing"
    """Noise process. Tokens become absorbing: masks; uniform: random tokens; hybrid: masks or random tokens; frequency:
    random tokens, drawn as often as they occur in the training data."""
    schedule: Annotated[str | None, one_of(*SCHEDULES.names)] = None
    """Noise schedule; log-linear by default."""
    options: dict[str, float] = field(default_factory=dict)
    """Options of the schedule: see the table below."""
    mask_share: Annotated[float | None, within("(0, 1)")] = None
    """Probability that hybrid noise replaces a token by the mask rather than by a random token; by default 0.9."""


@dataclass
class ModelConfig(_Section):
    """The network and its parameterization."""

    architecture: Annotated[str, one_of("modern", "reference")] = "modern"
    """Network. modern: RMSNorm, QK-norm, squared ReLU. reference: the network of the published models."""
    width: Annotated[int, count(1, 2**16)] = 256
    """Width of the residual stream, a multiple of model.heads."""
    depth: Annotated[int, count(1, 2**10)] = 6
    """Number of transformer blocks."""
    heads: Annotated[int, count(1, 2**10)] = 4
    """Number of attention heads."""
    cond_dim: Annotated[int, count(1, 2**16)] = 128
    """Width of the noise-level embedding that conditions the blocks (adaLN)."""
    dropout: Annotated[float, within("[0, 1)")] = 0.0
    """Dropout probability of the residual branches."""
    ngrams: Annotated[int, count(0, 4)] = 0
    """Length of the longest n-grams before and after a token whose embeddings are added to its own; 0: none."""
    embedding_norm: bool = False
    """RMSNorm after the embeddings; without time conditioning, residual branches are then initialised to 0."""
    seq_len: Annotated[int, count(1, MAX_COUNT)] = 256
    """Tokens per training sequence; of lines the length of the longest, unless given: then longer ones are left out."""
    parameterization: Annotated[str | None, one_of(*PARAMETERIZATIONS.names)] = None
    """What the network returns: score (log-scores), mean (a denoiser) or, for the objective concrete-score,
    signed-score; by default what the objective needs, else score. conditional and causal come with their objectives."""
    time_conditioning: Annotated[str | None, one_of("sigma", "zero", "none")] = None
    """Noise level given to the network: sigma, zero (always 0, as MDLM's) or none (time-free); by default sigma, and
    none for objectives that have no times."""


@dataclass
class OptimConfig(_Section):
    """Optimizer, learning-rate schedule, gradient clipping and EMA."""

    name: Annotated[str, one_of("adamw", "muon")] = "adamw"
    """Optimizer: adamw, or muon for hidden matrices with AdamW for the rest."""
    lr: Annotated[float, within("(0, 1e+30]")] = 1e-3
    """Peak learning rate."""
    beta1: Fraction = 0.9
    """Decay of AdamW's first moment."""
    beta2: Fraction = 0.98
    """Decay of AdamW's second moment."""
    weight_decay: Annotated[float, within("[0, inf)")] = 0.0
    """Decoupled weight decay of matrices, embeddings included."""
    warmup_steps: Interval = 100
    """Steps over which the learning rate rises linearly from 0."""
    lr_schedule: Annotated[str, one_of("constant", "linear", "cosine")] = "cosine"
    """Learning-rate schedule after warm-up: constant, or linear or cosine decay over the budget."""
    final_lr_fraction: Fraction = 0.1
    """Learning rate at the end of the decay, as a fraction of optim.lr."""
    decay_fraction: Annotated[float, within("(0, 1]")] = 1.0
    """Fraction of the budget, at its end, over which the learning rate decays; before that it is constant."""
    grad_clip: Annotated[float, within("(0, inf)")] = 1.0
    """Largest norm of the gradient; a larger gradient is scaled down to it."""
    ema_decay: Fraction = 0.999
    """Decay of the exponential moving average of the weights (EMA), with which validation and sampling compute."""


@dataclass
class BudgetConfig(_Section):
    """When to stop: at the first limit that is reached; 1000 steps if there is none."""

    steps: Annotated[int | None, count(1, MAX_STEPS)] = None
    """Number of optimizer steps."""
    tokens: Annotated[int | None, count(1, 2**60)] = None
    """Number of training tokens."""
    minutes: Annotated[float | None, within("(0, inf)")] = None
    """Minutes of training by the wall clock; evaluation and saving are counted apart."""

    @property
    def limits(self) -> dict[str, int | float]:
        """The limits by name."""
        return {name: limit for name, limit in vars(self).items() if limit}

    def describe(self) -> str:
        """Return the limits: 1,000 steps or 5 minutes."""
        return " or ".join(f"{limit:,.12g} {name}" for name, limit in self.limits.items())

    def spent(self, step: int, tokens: int, seconds: float) -> float:
        """Return the fraction of the nearest limit that is used, at most 1."""
        done = {"steps": step, "tokens": tokens, "minutes": seconds / 60}
        used = 0.0
        for name, limit in self.limits.items():
            used = max(used, done[name] / limit)
        return min(1.0, used)

    def describe_spent(self, step: int, tokens: int, seconds: float) -> str:
        """Say that a budget is used up, and which one is larger by as much: budgets are totals of a run."""
        done: dict[str, float] = {"steps": step, "tokens": tokens, "minutes": round(seconds / 60, 2)}
        options = {"steps": "--steps ", "tokens": "--set budget.tokens=", "minutes": "--minutes "}
        name, limit = max(self.limits.items(), key=lambda item: done[item[0]] / item[1])
        option, more = options[name], f"{round(done[name] + limit, 2):.12g}"
        return (
            f"it has trained for {done[name]:,.12g} {name}, and {option}{limit:.12g} is the total of a run, so nothing "
            f"is left to train; {option}{more} trains for {limit:,.12g} more"
        )


@dataclass
class TrainConfig(_Section):
    """How a step is computed, and what happens every so many steps; 0 switches an interval off."""

    batch_size: Annotated[int, count(1, MAX_COUNT)] = 64
    """Sequences per step, over all processes."""
    grad_accumulation: Annotated[int, count(1, MAX_COUNT)] = 1
    """Equal parts into which each process splits its sequences to save memory."""
    time_sampling: Annotated[str, one_of("uniform", "low-noise", "bell")] = "uniform"
    """Distribution of training times: uniform; with importance weights, low-noise (t = u²) or bell (around 1/2)."""
    loss_weighting: Annotated[float, within("[0, inf)")] = 0.0
    """Exponent p of a factor (1 + p)(1 − e^−σ)^p on the loss of a sequence, for less noisy gradients; 0: no factor."""
    precision: Annotated[str, one_of("float32", "bfloat16", "float8")] = "float32"
    """Precision of matrix products: float32, bfloat16 (mixed precision), or float8 in the blocks where it pays."""
    compile: bool = False
    """Compile the network with torch.compile; on a GPU the Triton kernels of this package are as fast without."""
    cuda_graphs: bool = True
    """Use CUDA graphs for the blocks on a single GPU, unless they are compiled or checkpointed."""
    activation_checkpointing: Annotated[str, one_of("none", "selective", "full")] = "none"
    """Activations to recompute, which saves memory: none, selective (not of matrix products and attention) or full."""
    deterministic: bool = False
    """Use deterministic algorithms on a GPU, as a CPU always does, with any number of threads; attention is slower."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer state over processes (FSDP2) instead of DDP."""
    log_every: Annotated[int, count(1, MAX_STEPS)] = 10
    """Steps between records of the training loss."""
    eval_every: Annotated[int | None, count(0, MAX_STEPS)] = None
    """Steps between validations, by default 250, or a quarter of a budget below 1,000 steps; the last is validated."""
    eval_sequences: Annotated[int, count(1, MAX_SAMPLES)] = 256
    """Sequences per validation."""
    save_every: Interval = 500
    """Steps between checkpoints; halfway, one is saved if its validation bound is the best so far."""
    keep_checkpoints: Annotated[int, count(1, MAX_COUNT)] = 3
    """Number of newest checkpoints to keep, beside the best."""
    sample_every: Interval = 0
    """Steps between logged samples."""
    on_nonfinite: Annotated[str, one_of("stop", "skip")] = "stop"
    """What to do at a loss or gradient that is not finite: stop, or skip the step."""
    max_skips: Interval = 10
    """Largest number of skipped steps; one more stops the run."""


@dataclass
class RunConfig:
    """Everything that decides what a run computes."""

    data: DataConfig = field(default_factory=DataConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    network: dict[str, Any] = field(default_factory=dict)
    """A network of your own: `class`, its import path (my_package:MyNet) or the name of an entry point, and options of
    its constructor. Of the section model, seq_len, parameterization and time_conditioning still apply."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    objective: str = "score-entropy"
    """Training objective."""
    objective_options: dict[str, float] = field(default_factory=dict)
    """Options of the objective: see the table below."""
    seed: int = 0
    """Seed of initial weights, data order, times, noise and dropout."""
    out: str | None = None
    """Folder of the run, set by --out; data that was moved together with the run is found relative to it."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.network and not isinstance(self.network.get("class"), str):
            raise ValueError(f"network is {self.network}, and has no class; add --network my_package:MyNet")

    @property
    def time_conditioning(self) -> str:
        """Return the noise level given to the network: as configured, else sigma if the objective has times."""
        return self.model.time_conditioning or ("none" if self.objective in TIME_FREE_OBJECTIVES else "sigma")

    @property
    def eval_every(self) -> int:
        """Return the steps between validations: as configured, else 250 or a quarter of the steps of a shorter run."""
        if self.train.eval_every is not None:
            return self.train.eval_every
        return min(250, math.ceil((self.budget.steps or 1000) / 4))

    def describe_network(self) -> str:
        """Return the network's size; of a network of the user's own, its class and options."""
        if self.network:
            return ", ".join(str(value) if key == "class" else f"{key} {value}" for key, value in self.network.items())
        return f"{self.model.depth} block{'s' * (self.model.depth > 1)} of width {self.model.width}"

    def describe_sizes(self) -> str:
        """Return the size of the network and of a step, the tokenizer, the loss weighting and the precision."""
        return (
            f"{self.describe_network()}, "
            f"{self.train.batch_size} sequence{'s' * (self.train.batch_size > 1)} of "
            f"{self.model.seq_len} tokens per step, tokenizer {self.data.tokenizer}"
            f"{f' fitted to the first {self.data.fitted_fraction:.0%} of the data' * (self.data.fitted_fraction < 1)}, "
            f"{f'n-grams up to {self.model.ngrams}, ' if self.model.ngrams and not self.network else ''}"
            f"{f'loss weighting {self.train.loss_weighting:g}, ' if self.train.loss_weighting else ''}"
            f"{self.train.precision}"
        )

    def resolved(self) -> "RunConfig":
        """Fill in defaults that depend on other options, reject options that contradict each other, and return this."""
        required = REQUIRED_PARAMETERIZATION.get(self.objective)
        self.model.parameterization = self.model.parameterization or required or "score"
        name, given = self.objective, f"model.parameterization is {self.model.parameterization}"
        if required and self.model.parameterization != required:
            raise ValueError(f"objective {name} trains parameterization {required}; {given}: leave it out")
        if self.model.parameterization == "signed-score" and name != "concrete-score":
            advice = "choose objective concrete-score, or leave it out"
            raise ValueError(f"{given}, and objective {name} needs the logarithm of the scores; {advice}")
        if name in TIME_FREE_OBJECTIVES and self.time_conditioning == "sigma":
            raise ValueError(f"objective {name} has no noise level to condition on; leave model.time_conditioning out")
        self.noise.schedule = self.noise.schedule or "log-linear"
        if self.noise.process == "hybrid":
            self.noise.mask_share = self.noise.mask_share or 0.9
        if (n := self.model.ngrams) and self.model.parameterization == "conditional":
            raise ValueError(f"model.ngrams is {n}; n-grams contain the token that objective {name} hides: set it to 0")
        options = {
            "objective ratio-matching": self.model.parameterization == "conditional",
            "train.precision float8": self.train.precision == "float8",
            "train.compile": self.train.compile,
            "train.activation_checkpointing": self.train.activation_checkpointing != "none",
        }
        for option in (option for option, is_set in options.items() if self.network and is_set):
            own = self.network["class"]
            raise ValueError(f"{option} needs sedd's own transformer, and network is {own}; leave it out")
        if not self.budget.limits:
            self.budget.steps = 1000
        return self

    def check_trainable(self) -> "RunConfig":
        """Reject an objective that is unknown or that no run can have, and return this."""
        check_choice("objective", self.objective, OBJECTIVES.names)
        if (p := self.train.loss_weighting) and self.objective == "autoregressive":
            raise ValueError(f"train.loss_weighting is {p}; objective autoregressive has no noise levels: set it to 0")
        if reason := NOT_FOR_TRAINING.get(self.objective):
            raise ValueError(f"objective {self.objective} trains no model: {reason}. Choose score-entropy")
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as stored beside the weights."""
        return asdict(self)

    def by_key(self) -> dict[str, Any]:
        """Return every value by its dotted key, as ``--set`` takes it."""

        def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
            for name, value in values.items():
                if isinstance(value, dict) and value:
                    yield from flatten(value, f"{prefix}{name}.")
                else:
                    yield f"{prefix}{name}", value

        return dict(flatten(self.as_dict()))

    @classmethod
    def from_dict(cls, data: Any) -> "RunConfig":
        """Return the configuration with these values, such as `as_dict` returns; defaults for the rest."""
        return from_dict(cls, data)
