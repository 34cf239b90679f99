"""Optimizers, the learning-rate schedule and gradient clipping.

An `OptimizerStep` clips the gradient, applies AdamW (and Muon) and updates the EMA. There are two: `TorchOptimizerStep`
is the definition, `FusedOptimizerStep` computes the same in one Triton launch where AdamW alone trains whole float32
tensors on a GPU.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import final

import torch
from torch import Tensor, nn

from sedd.config import OptimConfig
from sedd.runtime import device
from sedd.training.ema import EMA

_NOT_HIDDEN = ("embed", "head", "output", "linear", "adaLN", "modulation", "sigma", "time")
"""Parts of the names of matrices that are no hidden layers: embeddings, the head, noise conditioning."""


def build_optimizers(network: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Build AdamW for all weights, or Muon for hidden matrices and AdamW for the rest; vectors have no weight decay."""
    named = [(name, weight) for name, weight in network.named_parameters() if weight.requires_grad]
    hidden = [w for name, w in named if config.name == "muon" and _is_hidden_matrix(name, w)]
    hidden_ids = {id(w) for w in hidden}
    rest = [w for _, w in named if id(w) not in hidden_ids]
    groups = [
        {"params": [w for w in rest if w.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [w for w in rest if w.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=betas, fused=_all_cuda(rest))
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


def _is_hidden_matrix(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and not any(word in name for word in _NOT_HIDDEN)


def _all_cuda(weights: Iterable[Tensor]) -> bool:
    return all(w.is_cuda for w in weights)


def lr_multiplier(config: OptimConfig, step: int, budget_used: float) -> float:
    """Return the learning-rate schedule's factor: linear warmup, then constant, linear or cosine decay.

    Args:
        config: ``warmup_steps``, ``lr_schedule`` and ``final_lr_fraction`` are read.
        step: Steps done so far; warmup counts these.
        budget_used: Fraction of the training budget used so far; decay follows it.
    """
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    used, final_fraction = min(max(budget_used, 0.0), 1.0), config.final_lr_fraction
    decay = {
        "constant": 1.0,
        "linear": 1 - (1 - final_fraction) * used,
        "cosine": final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * used)) / 2,
    }
    return warmup * decay[config.lr_schedule]


def set_learning_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """Set the learning rate of the next step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def step_if_finite(optimizers: list[torch.optim.Optimizer], finite: Tensor) -> None:
    """Apply the optimizers unless ``finite`` is false.

    A fused optimizer reads the flag on the device (``found_inf``), so that the host need not wait for it.
    """
    for optimizer in optimizers:
        if optimizer.defaults.get("fused"):
            optimizer.found_inf = 1 - finite.float()  # type: ignore[attr-defined]
            optimizer.step()
        elif bool(finite):
            optimizer.step()


class OptimizerStep(ABC):
    """Gradient clipping, optimizer step and EMA update of a network, from the gradients at its parameters."""

    def __init__(self, network: nn.Module, ema: EMA, config: OptimConfig) -> None:
        self.network, self.ema, self.config = network, ema, config
        self.optimizers = build_optimizers(network, config)
        self.weights = ema.source_weights

    @abstractmethod
    def clip_grad_norm(self) -> Tensor:
        """Clip the gradient's norm to ``grad_clip`` and return the norm before clipping; call once before `step`."""

    @abstractmethod
    def step(self, step: int, grad_norm: Tensor, finite: Tensor) -> None:
        """Update the weights in step number ``step``, unless ``finite`` is false."""

    @abstractmethod
    def update_ema(self, step: int) -> None:
        """Update the EMA, once step number ``step`` is known to have been finite."""

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@final
class TorchOptimizerStep(OptimizerStep):
    """torch's gradient clipping and optimizers, then the EMA."""

    def clip_grad_norm(self) -> Tensor:
        """Clip the gradients in place."""
        norm = torch.nn.utils.clip_grad_norm_(self.weights, self.config.grad_clip)
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP: a DTensor
        return whole

    def step(self, step: int, grad_norm: Tensor, finite: Tensor) -> None:
        """Apply the optimizers."""
        step_if_finite(self.optimizers, finite)

    def update_ema(self, step: int) -> None:
        """Average the weights."""
        self.ema.update(step)


@final
class FusedOptimizerStep(OptimizerStep):
    """Clipping, AdamW and EMA in one Triton launch: each is bound by memory bandwidth and reads what the last wrote.

    The moments are kept in the state of torch's AdamW, as its own step would have left them.
    """

    def clip_grad_norm(self) -> Tensor:
        """Return the norm; `step` scales the gradients as it reads them."""
        return torch.nn.utils.get_total_norm([w.grad for w in self.weights if w.grad is not None])

    @torch.no_grad()
    def step(self, step: int, grad_norm: Tensor, finite: Tensor) -> None:
        """Clip, apply AdamW and average the weights; the kernel reads ``finite`` on the device."""
        from sedd.ops import adamw_ema_triton

        group, share = self.optimizers[0].param_groups[0], 1 - self.ema.decay_at(step)
        averages: dict[Tensor, Tensor] = dict(zip(self.weights, self.ema.weights, strict=True))
        weights = [
            adamw_ema_triton.ParameterState(w, g, m, v, averages.pop(w), steps, d)
            for w, g, m, v, steps, d in self._moments()
        ]
        beta1, beta2 = group["betas"]
        hyper = adamw_ema_triton.AdamWHyperparameters(group["lr"], beta1, beta2, group["eps"], share)
        grad_scale = (self.config.grad_clip / (grad_norm + 1e-6)).clamp(max=1)
        adamw_ema_triton.adamw_ema_step(weights, hyper, grad_scale, finite)
        for weight, average in averages.items():  # those without a gradient
            average.lerp_(weight, share * finite)

    def _moments(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]]:
        """Yield (weight, gradient, first moment, second moment, step count, weight decay) where there is a gradient."""
        from sedd.ops.adamw_ema_triton import aligned

        (optimizer,) = self.optimizers
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not (state := optimizer.state[weight]):  # the keys in torch's order
                    state["step"] = torch.zeros((), device=weight.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
                state["exp_avg"], state["exp_avg_sq"] = m, v = aligned(state["exp_avg"]), aligned(state["exp_avg_sq"])
                yield weight, aligned(weight.grad), m, v, state["step"], group["weight_decay"]

    def update_ema(self, step: int) -> None:
        """Copy the buffers; `step` has averaged the weights."""
        self.ema.copy_buffers()


def build_optimizer_step(network: nn.Module, ema: EMA, config: OptimConfig) -> OptimizerStep:
    """Choose the fused step if AdamW alone trains whole float32 tensors on a GPU with Triton, else torch's."""
    tensors = [*network.parameters(), *ema.network.parameters()]
    fused = config.name == "adamw" and device.has_triton() and all(map(_is_plain_cuda, tensors))
    return (FusedOptimizerStep if fused else TorchOptimizerStep)(network, ema, config)


def _is_plain_cuda(weight: Tensor) -> bool:
    """Whether a weight is one contiguous, aligned float32 tensor on a GPU."""
    whole = type(weight.data) is Tensor and weight.is_contiguous() and weight.data_ptr() % 16 == 0
    return whole and weight.is_cuda and weight.dtype == torch.float32
