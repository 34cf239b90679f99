"""Optimizers: which weights move by which rule, and how fast at which time; and the average after them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import final

import torch
from torch import Tensor, nn

from sedd.config import OptimConfig
from sedd.runtime import device
from sedd.training import ema


def _is_hidden(name: str, weight: Tensor) -> bool:
    """A matrix between hidden states: not an embedding, a head, or what the noise level modulates."""
    outside = ("embed", "head", "output", "linear", "adaLN", "modulation", "sigma", "time")
    return weight.ndim == 2 and not any(word in name for word in outside)


def make(network: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for hidden matrices and AdamW for the rest. Vectors are never decayed."""
    named = [(name, weight) for name, weight in network.named_parameters() if weight.requires_grad]
    hidden = [w for n, w in named if config.name == "muon" and _is_hidden(n, w)]
    taken = {id(w) for w in hidden}
    rest = [w for _, w in named if id(w) not in taken]
    groups = [
        {"params": [w for w in rest if w.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [w for w in rest if w.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=betas, fused=_fused(rest))
    ]
    if hidden:
        optimizers.append(
            torch.optim.Muon(
                hidden,
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",  # so that one learning rate serves both
            )
        )
    return optimizers


def _fused(weights: Iterable[Tensor]) -> bool:
    return all(w.is_cuda for w in weights)


def factor(config: OptimConfig, step: int, progress: float) -> float:
    """The share of the learning rate at ``step``, with ``progress`` in [0, 1] of the budget spent."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    progress = min(max(progress, 0.0), 1.0)
    fall = {
        "constant": 1.0,
        "linear": 1 - (1 - config.final_lr_fraction) * progress,
        "cosine": config.final_lr_fraction + (1 - config.final_lr_fraction) * (1 + math.cos(math.pi * progress)) / 2,
    }
    return warm * fall[config.lr_schedule]


def step(optimizers: list[torch.optim.Optimizer], finite: Tensor) -> None:
    """Move the weights, unless ``finite`` is false. A fused optimizer asks that of the device: the host goes on."""
    for optimizer in optimizers:
        if optimizer.defaults.get("fused"):
            optimizer.found_inf = 1 - finite.float()  # type: ignore[attr-defined]
            optimizer.step()
        elif bool(finite):
            optimizer.step()


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """The learning rate of the next step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


# Weights and their average ---------------------------------------------------------------------------------


class Mover(ABC):
    """Moves a network and the average after it, by the gradients that lie at its parameters."""

    def __init__(self, network: nn.Module, average: nn.Module, config: OptimConfig) -> None:
        self.network, self.average, self.config = network, average, config
        self.optimizers = make(network, config)
        self.weights = list(network.parameters())  # to look for them takes as long as a launch for each
        self.averages = list(average.parameters())

    @abstractmethod
    def norm(self) -> Tensor:
        """That of the gradient before it is clipped; asked once a step, before `move`."""

    @abstractmethod
    def move(self, number: int, norm: Tensor, finite: Tensor) -> None:
        """Step ``number`` of the weights, unless ``finite`` is false."""

    @abstractmethod
    def follow(self, number: int) -> None:
        """What is left of it for the average, once it is known that there was a step."""

    def forget(self) -> None:
        """Drop the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@final
class PlainMover(Mover):
    """The definition: gradients are clipped, optimizers step, and the average follows."""

    def norm(self) -> Tensor:
        """Clips."""
        norm = torch.nn.utils.clip_grad_norm_(self.weights, self.config.grad_clip)
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def move(self, number: int, norm: Tensor, finite: Tensor) -> None:
        """Whatever the optimizers do."""
        step(self.optimizers, finite)

    def follow(self, number: int) -> None:
        """All of it."""
        ema.update(self.average, self.network, ema.decay_at(number, self.config.ema_decay))


@final
class SwiftMover(Mover):
    """The same in one launch: all of it is bound by bytes, and each part reads what the one before it wrote.

    The optimizer holds the moments, as its own step would have left them.
    """

    def __init__(self, network: nn.Module, average: nn.Module, config: OptimConfig) -> None:
        super().__init__(network, average, config)
        self.buffers = list(zip(average.buffers(), network.buffers(), strict=True))

    def norm(self) -> Tensor:
        """Gradients stay as they are."""
        return torch.nn.utils.get_total_norm([w.grad for w in self.weights if w.grad is not None])

    @torch.no_grad()
    def move(self, number: int, norm: Tensor, finite: Tensor) -> None:
        """The average too: the device knows whether there is a step."""
        from sedd.ops import adamw_ema_triton

        group, share = self.optimizers[0].param_groups[0], 1 - ema.decay_at(number, self.config.ema_decay)
        averages: dict[Tensor, Tensor] = dict(zip(self.weights, self.averages, strict=True))
        weights = [
            adamw_ema_triton.Weight(w, g, m, v, averages.pop(w), steps, d) for w, g, m, v, steps, d in self._moments()
        ]
        beta1, beta2 = group["betas"]
        rule = adamw_ema_triton.Rule(group["lr"], beta1, beta2, group["eps"], share)
        adamw_ema_triton.move(weights, rule, (self.config.grad_clip / (norm + 1e-6)).clamp(max=1), finite)
        for weight, average in averages.items():  # those without a gradient
            average.lerp_(weight, share * finite)

    def _moments(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]]:
        """Weights that have a gradient, it, mean and square of what they had, how many those were, and the decay."""
        from sedd.ops.adamw_ema_triton import wide

        (optimizer,) = self.optimizers
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not (state := optimizer.state[weight]):  # in the order in which torch has them
                    state["step"] = torch.zeros((), device=weight.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
                state["exp_avg"], state["exp_avg_sq"] = m, v = wide(state["exp_avg"]), wide(state["exp_avg_sq"])
                yield weight, wide(weight.grad), m, v, state["step"], group["weight_decay"]

    def follow(self, number: int) -> None:
        """Buffers alone."""
        for kept, buffer in self.buffers:
            kept.copy_(buffer)


def mover(network: nn.Module, average: nn.Module, config: OptimConfig) -> Mover:
    """What moves these weights: one launch, if AdamW alone moves whole tensors on a device that can do it."""
    tensors = [*network.parameters(), *average.parameters()]
    swift = config.name == "adamw" and device.has_triton() and all(map(_plain, tensors))
    return (SwiftMover if swift else PlainMover)(network, average, config)


def _plain(weight: Tensor) -> bool:
    """Whether it lies on one GPU in one piece, in float32."""
    whole = type(weight.data) is Tensor and weight.is_contiguous() and weight.data_ptr() % 16 == 0
    return whole and weight.is_cuda and weight.dtype == torch.float32
